"""``kvalloc solve --refine MODEL``: measure around the solution, and solve again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvalloc.cli.output import note, size
from kvalloc.cli.progress import load
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.allocation.request import Request
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.score_profile import ScoreProfile

Refine = Annotated[
    str | None,
    typer.Option(
        "--refine",
        metavar="MODEL",
        help="Measure the solution's loss on this model, correct the loss curves around it and "
        "solve again; with --target-loss, the loss on prompts that only choose the round counts.",
    ),
]
RefinePrompts = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Prompts to refine on, of each 'task' a quarter to choose the round by and a quarter "
        "to report the loss on; can be repeated. By default four of each kind that 'kvalloc "
        "profile --loss' makes.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="With --refine: rounds at most; 3 by default."),
]
RefineProbes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="With --refine: single changes measured a round and prompt, the least decided ones; "
        "all neighbours by default.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="With --refine: go on with what a killed command had measured."),
]

ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """What was asked for beside the request.

    Attributes
    ----------
    model : str
    prompts : tuple of Path
    rounds : int
    probes : int or None
    dtype : str
    device : str or None
    resume : bool
    """

    model: str
    prompts: tuple[Path, ...]
    rounds: int
    probes: int | None
    dtype: str
    device: str | None
    resume: bool


def asked_refinement(given: Mapping[str, Any], output: Path | None) -> Refinement | None:
    """The refinement that the command's options ask for, None where they ask for none.

    Raises
    ------
    InputError
        If options of a refinement stand without one, or it has nowhere to keep what it measured.
    """
    if given["refine"] is None:
        for name in ("refine_prompts", "rounds", "refine_probes", "resume", "device"):
            if given[name]:
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} belongs to a refinement; name the model with --refine")
        return None
    if given["average"] != "curves":
        raise InputError("a refinement corrects the mean curves; leave out --average")
    if output is None:
        raise InputError("--refine keeps what it measured beside the profile: say -o OUT.json")
    return Refinement(
        model=given["refine"],
        prompts=tuple(given["refine_prompts"] or ()),
        rounds=given["rounds"] or ROUNDS,
        probes=given["refine_probes"],
        dtype=given["dtype"],
        device=given["device"],
        resume=given["resume"],
    )


def refined(
    scores: ScoreProfile,
    request: Request,
    wanted: Refinement,
    output: Path,
    *,
    solver: str,
    solver_options: dict[str, Any],
    time_limit: float | None,
    quiet: bool,
) -> BudgetProfile:
    """Refine and save, with a bar; what was measured is in ``OUT.json.partial`` until then.

    Raises
    ------
    KVAllocError
        As `kvalloc.refine`.
    """
    from kvalloc.cli.progress import ProgressBar
    from kvalloc.measure.checkpoint import check_unfinished, checkpoint_folder
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    from kvalloc.tuning import refine, refinement_prompts

    # what cannot be read or resumed is refused before the model is loaded
    prompts = refinement_prompts(wanted.prompts)[0] if wanted.prompts else None
    check_unfinished(checkpoint_folder(output), resume=wanted.resume)
    loaded = load(wanted.model, dtype=wanted.dtype, device=wanted.device, quiet=quiet)
    with ProgressBar("refining", unit="prompts", quiet=quiet) as progress:
        decided = refine(
            scores,
            loaded.model,
            loaded.tokenizer,
            prompts,
            rounds=wanted.rounds,
            probes=wanted.probes,
            solver=solver,
            solver_options=solver_options,
            time_limit=time_limit,
            output=output,
            resume=wanted.resume,
            progress=progress,
            model_id=loaded.model_id,
            request=request,
        )
    if decided.refinement is not None and decided.refinement["note"]:
        note(decided.refinement["note"], quiet=quiet)
    return decided


def refinement_fields(decided: BudgetProfile) -> dict[str, str]:
    """What is told of a refinement, for people."""
    told = decided.refinement
    assert told is not None  # the caller has looked

    def text(kind: str, prompts: str) -> str:
        low, high = told[f"{kind}_interval"]
        count = len(told[f"{prompts}_prompts"])
        return (
            f"{told[f'{kind}_loss']:.6f} nats per token ({told['confidence']:.0%} interval "
            f"{low:.4g} to {high:.4g}, {count} prompts)"
        )

    rounds = "; ".join(
        f"{one['round']}: {one['predicted']:.4g} predicted, {one['training']:.4g} where "
        f"learnt, {one['choosing']:.4g} where chosen{'' if one['kept'] else ', not kept'}"
        for one in told["rounds"]
    )
    fields = {
        "predicted loss": text("predicted", "training"),
        "held-out loss": text("measured", "held_out"),
        "agreement": "within 25% or their intervals"
        if told["agrees"]
        else "NO: predicted and held-out loss are further apart than 25% and their intervals",
        "measured on": told["text_description"],
        **({"note": told["note"]} if told["note"] else {}),
        "rounds": rounds,
    }
    beyond = told.get("largest_size_beyond_target")
    if beyond is not None:
        fields["least bytes"] = f"{size(beyond)} of decided layers was too little"
    return fields
