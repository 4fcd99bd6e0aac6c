"""``kvalloc solve``: from a score profile and a target to a budget profile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.cli.options import ModelFlags, takes
from kvalloc.cli.output import (
    duration,
    note,
    print_fields,
    print_result,
    wants_json,
)
from kvalloc.cli.progress import ProgressBar, load, slow
from kvalloc.cli.values import check_time_limit, solver_options
from kvalloc.errors import InputError, option
from kvalloc.report.wording import LOSS_NOTE, RETENTION_NOTE, decision_fields, requested_bytes
from kvalloc.units import Option

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.score_profile import ScoreProfile

EXAMPLES = """\
  kvalloc solve s.safetensors --target-retention 0.9 -o p.json
  kvalloc solve s.safetensors --memory 64MiB --context 8192 --batch 4 -o p.json
  kvalloc solve s.safetensors --budget 20% --solver pyramid --solver-option beta=10 --json
  kvalloc solve s.safetensors --budget 20% --level head --refine demo -o p.json
"""

_STATED = (
    "solver decided_by solver_options detail termination sense objective bound bound_source gap "
    "value_per_mib retention predicted_loss retained_tokens full_tokens retained_bytes cost_bytes "
    "full_cost_bytes full_bytes"
)
"""What is stated of every decision as its profile has it."""


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


@takes(RequestOptions, RefineFlags, ModelFlags)
def solve(
    scores: Path,
    solver: str = "auto",
    solver_option: list[str] | None = None,
    average: str = "curves",
    time_limit: float | None = None,
    output: Annotated[Path | None, Option("OUT.json")] = None,
    **asked: Any,
) -> None:
    """Decide how many entries each layer and KV head keeps.

    What was decided comes with a bound that shows how much better it could be at most.
    Exactly one target: --target-retention, --target-loss, --budget, --budget-tokens or --memory.

    Parameters
    ----------
    output : Path
        The budget profile to write; may be left out with --json.
    """
    from kvalloc.allocation.decision import solve as decide
    from kvalloc.formats.shipped_profiles import load_scores

    others = [name for name in asked if name not in RequestOptions.__annotations__]
    given = {name: asked.pop(name) for name in others}
    request = Request.parse(**asked)  # refuses before the scores are read
    _check_refinement(given, output, average=average)
    check_time_limit(time_limit)
    _check_output(output, scores)
    chosen = solver_options(solver, solver_option or [])
    profile = load_scores(scores)
    start = time.perf_counter()
    how: dict[str, Any] = {"solver": solver, "solver_options": chosen, "time_limit": time_limit}
    if "refine" in given and output is not None:
        decided = _refined(profile, request, given, output, how)
    else:
        with slow(f"solving with {solver}"):
            decided = decide(
                profile,
                request=request,
                average=average,  # type: ignore[arg-type]  # solving checks it
                notify=note,
                **how,
            )
    seconds = time.perf_counter() - start
    if output is not None and "refine" not in given:
        decided.save(output)
    data = {
        **decision_row(decided, seconds),
        **_decision(decided),
        "predicted_loss_interval": _loss_interval(decided, profile),
        "output": output,
    }
    print_result(data, lambda: print_fields(_summary(decided, data)))


def _check_refinement(given: Mapping[str, Any], output: Path | None, *, average: str) -> None:
    """Refuse flags of a refinement without one, and one that cannot be.

    Parameters
    ----------
    given : mapping
        What was typed of `RefineFlags` and `kvalloc.cli.options.ModelFlags`.
    output : Path or None
    average : str

    Raises
    ------
    InputError
        If flags of a refinement stand without one, or it has nowhere to keep what it measured.
    """
    if given and "refine" not in given:
        flag = option(next(iter(given)))
        raise InputError(f"{flag} belongs to a refinement; name the model with --refine")
    if "refine" in given and average != "curves":
        raise InputError("a refinement corrects the mean curves; leave out --average")
    if "refine" in given and output is None:
        raise InputError("--refine keeps what it measured beside the profile: say -o OUT.json")


def _refined(
    scores: ScoreProfile,
    request: Request,
    given: Mapping[str, Any],
    output: Path,
    how: dict[str, Any],
) -> BudgetProfile:
    """Refine and save, with a bar; what was measured is in ``OUT.json.partial`` until then.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
    given : mapping
        As for `check_refinement`.
    output : Path
    how : dict
        Solver, its options and the time limit.

    Raises
    ------
    KVAllocError
        As `kvalloc.refine`.
    """
    from kvalloc.measure.checkpoint import check_output
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    from kvalloc.tuning import refine, refinement_prompts

    # what cannot be read or resumed is refused before the model is loaded
    files, resume = given.get("refine_prompts"), given.get("resume", False)
    how = {**how, **({"rounds": given["rounds"]} if "rounds" in given else {})}
    prompts = refinement_prompts(files)[0] if files else None
    check_output(output, resume=resume)
    loaded = load(given["refine"], given)
    with ProgressBar("refining", unit="prompts") as progress:
        decided = refine(
            scores,
            loaded.model,
            loaded.tokenizer,
            prompts,
            probes=given.get("refine_probes"),
            output=output,
            resume=resume,
            progress=progress,
            model_id=loaded.model_id,
            request=request,
            **how,
        )
    if decided.refinement is not None and decided.refinement["note"]:
        note(decided.refinement["note"])
    return decided


def decision_row(decided: BudgetProfile, seconds: float) -> dict[str, Any]:
    """What is told of every decision, as plain values.

    Parameters
    ----------
    decided : BudgetProfile
    seconds : float
        Formulating, solving and checking.
    """
    noted = decided.predicted_loss is not None and decided.refinement is None
    return {
        **{name: getattr(decided, name) for name in _STATED.split()},
        "price_source": decided.price_source or None,
        "predicted_loss_note": LOSS_NOTE if noted else None,
        "requested_bytes": requested_bytes(decided),
        "cost": decided.requested.get("cost", "bytes"),
        "seconds": seconds,
    }


def _loss_interval(decided: BudgetProfile, scores: ScoreProfile) -> tuple[float, float] | None:
    """How sure a predicted loss is on such text; None where it is unknown or was refined."""
    import numpy as np

    from kvalloc.allocation.curves import predicted_loss_interval

    if decided.predicted_loss is None or decided.refinement is not None:
        return None
    policies = None
    if decided.unit_policies is not None:
        titles = [policy.title for policy in scores.policies]
        places = np.array([titles.index(policy.title) for policy in decided.policies])
        policies = places[decided.unit_policies]
    return predicted_loss_interval(
        scores, decided.budgets, decided.context_tokens, bits=decided.bits, policies=policies
    )


def _check_output(output: Path | None, scores: Path) -> None:
    from kvalloc.files import check_writable

    if output is None:
        if not wants_json():
            raise InputError(
                "say where the budget profile goes with -o OUT.json, or print the result with "
                "--json"
            )
        return
    if output.exists() and scores.exists() and output.samefile(scores):
        raise InputError(f"-o {output} would overwrite the score profile; name another file")
    check_writable(output, stream=True)


def _decision(decided: BudgetProfile) -> dict[str, Any]:
    names = (
        "requested context_tokens batch level page_tokens budgets bits ranks unit_policies "
        "refinement"
    )
    return {
        **{name: getattr(decided, name) for name in names.split()},
        "policies": [policy.title for policy in decided.policies],
    }


def _summary(decided: BudgetProfile, data: Mapping[str, Any]) -> dict[str, str]:
    heads = decided.budgets.size
    fields = decision_fields(decided)
    fields["solver"] += f", {duration(data['seconds'])}"
    fields["tokens"] = (
        f"{decided.retained_tokens / heads:,.1f} of {decided.full_tokens / heads:,.1f} per KV head "
        f"on average ({decided.retained_tokens:,} entries)"
    )
    fields["note"] = "" if decided.retention is None else RETENTION_NOTE
    if data["predicted_loss_note"] is not None:
        if (sure := data["predicted_loss_interval"]) is not None:
            interval = f"95% interval over samples {sure[0]:.4g} to {sure[1]:.4g}"
            fields["predicted loss"] += f" ({interval})"
        fields["loss note"] = data["predicted_loss_note"]
    fields["written"] = str(data["output"] or "")
    return fields
