"""``kvalloc solve --refine MODEL``: measure around the solution, and solve again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from kvalloc.cli.output import note, size
from kvalloc.cli.progress import load
from kvalloc.errors import InputError
from kvalloc.units import Option

if TYPE_CHECKING:
    from kvalloc.allocation.request import Request
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.score_profile import ScoreProfile

REFINING = "Refining"


class RefineFlags(TypedDict, total=False):
    """How ``kvalloc solve`` refines; see `kvalloc.tuning.refinement.RefineOptions`.

    Parameters
    ----------
    refine : str
        Measure the solution's loss on this model, correct the loss curves around it and solve
        again; with `target_loss`, the loss on prompts that only choose the round counts.
    refine_prompts : sequence of str
        Prompts to refine on, of each 'task' a quarter to choose the round by and a quarter to
        report the loss on. By default four of each kind that 'kvalloc profile --loss' makes.
    rounds : int
        With `refine`: rounds at most; 3 by default.
    refine_probes : int
        With `refine`: single changes measured a round and prompt, the least decided ones; all
        neighbours by default.
    resume : bool
        With `refine`: go on with what a killed command had measured.
    """

    refine: Annotated[str | None, Option("MODEL", REFINING)]
    refine_prompts: Annotated[Sequence[str] | None, Option("FILE.jsonl", REFINING)]
    rounds: Annotated[int | None, Option("N", REFINING, least=1)]
    refine_probes: Annotated[int | None, Option("N", REFINING, least=1)]
    resume: Annotated[bool | None, Option("", REFINING)]


def check_refinement(given: Mapping[str, Any], output: Path | None) -> None:
    """Refuse flags of a refinement without one, and one that cannot be.

    Parameters
    ----------
    given : mapping
        Of `RefineFlags`, and ``average`` and ``device``.
    output : Path or None

    Raises
    ------
    InputError
        If flags of a refinement stand without one, or it has nowhere to keep what it measured.
    """
    if given["refine"] is None:
        for name in ("refine_prompts", "rounds", "refine_probes", "resume", "device"):
            if given[name]:
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} belongs to a refinement; name the model with --refine")
    elif given["average"] != "curves":
        raise InputError("a refinement corrects the mean curves; leave out --average")
    elif output is None:
        raise InputError("--refine keeps what it measured beside the profile: say -o OUT.json")


def refined(
    scores: ScoreProfile,
    request: Request,
    given: Mapping[str, Any],
    output: Path,
    how: dict[str, Any],
    *,
    quiet: bool,
) -> BudgetProfile:
    """Refine and save, with a bar; what was measured is in ``OUT.json.partial`` until then.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
    given : mapping
        As for `check_refinement`, and ``dtype``.
    output : Path
    how : dict
        Solver, its options and the time limit.
    quiet : bool

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
    files, resume = given["refine_prompts"], bool(given["resume"])
    prompts = refinement_prompts(files)[0] if files else None
    check_unfinished(checkpoint_folder(output), resume=resume)
    loaded = load(given["refine"], dtype=given["dtype"], device=given["device"], quiet=quiet)
    if given["rounds"] is not None:
        how = {**how, "rounds": given["rounds"]}
    with ProgressBar("refining", unit="prompts", quiet=quiet) as progress:
        decided = refine(
            scores,
            loaded.model,
            loaded.tokenizer,
            prompts,
            probes=given["refine_probes"],
            output=output,
            resume=resume,
            progress=progress,
            model_id=loaded.model_id,
            request=request,
            **how,
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
    if decided.requested["target"] == "loss":
        target = decided.requested["value"]
        fields["target"] = f"met by {told['choosing_loss']:.6f} on the prompts that chose the round"
        if told["measured_loss"] > target:
            fields["target"] += "; the held-out loss is above it"
    beyond = told.get("largest_size_beyond_target")
    if beyond is not None:
        fields["least bytes"] = f"{size(beyond)} of decided layers was too little"
    return fields
