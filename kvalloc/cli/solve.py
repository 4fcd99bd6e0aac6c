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
  kvalloc solve s.safetensors --target-loss 0.02 --level head --measure demo -o p.json
"""

_STATED = (
    "solver decided_by solver_options detail termination sense objective bound bound_source gap "
    "value_per_mib retention predicted_loss retained_tokens full_tokens retained_bytes cost_bytes "
    "full_cost_bytes full_bytes"
)
"""What is stated of every decision as its profile has it."""


MEASURING = "Measuring"


class MeasureFlags(TypedDict, total=False):
    """What ``kvalloc solve`` measures; see `kvalloc.solve_measured`.

    Parameters
    ----------
    measure : str
        Measure what the whole reduced cache loses on this model; with `target_loss`, ask for less
        until the measured loss is within it.
    measure_prompts : sequence of str
        Prompts to measure on. By default four of each kind that 'kvalloc profile --loss' makes.
    resume : bool
        With `measure`: go on with what a killed command had measured.
    """

    measure: Annotated[str | None, Option("MODEL", MEASURING)]
    measure_prompts: Annotated[Sequence[str] | None, Option("FILE.jsonl", MEASURING)]
    resume: Annotated[bool | None, Option("", MEASURING)]


@takes(RequestOptions, MeasureFlags, ModelFlags)
def solve(
    scores: Path,
    solver: str = "auto",
    solver_option: list[str] | None = None,
    average: str = "curves",
    time_limit: float | None = None,
    output: Annotated[Path | None, Option("OUT.json")] = None,
    **options: Any,
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

    others = [name for name in options if name not in RequestOptions.__annotations__]
    given = {name: options.pop(name) for name in others}
    request = Request.parse(**options)  # refuses before the scores are read
    if given and "measure" not in given:
        raise InputError(f"{option(next(iter(given)))} goes with --measure MODEL; name the model")
    check_time_limit(time_limit)
    _check_output(output, scores)
    chosen = solver_options(solver, solver_option or [])
    profile = load_scores(scores)
    start = time.perf_counter()
    how: dict[str, Any] = {
        **{"solver": solver, "solver_options": chosen, "time_limit": time_limit},
        **{"average": average, "notify": note},
    }
    if "measure" in given:
        decided = _measured(profile, request, given, output, how)
    else:
        with slow(f"solving with {solver}"):
            decided = decide(profile, request=request, **how)
        if output is not None:
            decided.save(output)
    seconds = time.perf_counter() - start
    data = {
        **decision_row(decided, seconds),
        **_decision(decided),
        "predicted_loss_interval": _loss_interval(decided, profile),
        "output": output,
    }
    print_result(data, lambda: print_fields(_summary(decided, data)))


def _measured(
    scores: ScoreProfile,
    request: Request,
    given: Mapping[str, Any],
    output: Path | None,
    how: Mapping[str, Any],
) -> BudgetProfile:
    """Decide and measure, with a bar; what was measured is in ``OUT.json.partial`` until then."""
    from kvalloc.measure.checkpoint import check_output
    from kvalloc.models.loading import require_run_packages
    from kvalloc.prompts.texts import read_prompts

    require_run_packages()
    from kvalloc.online.solving import solve_measured

    # what cannot be read or resumed is refused before the model is loaded
    files, resume = given.get("measure_prompts"), given.get("resume", False)
    prompts = [prompt for file in files for prompt in read_prompts(file)] if files else None
    if output is not None:
        check_output(output, resume=resume)
    loaded = load(given["measure"], given)
    with ProgressBar("measuring", unit="prompts") as progress:
        return solve_measured(
            scores,
            loaded.model,
            loaded.tokenizer,
            prompts,
            output=output,
            resume=resume,
            progress=progress,
            model_id=loaded.model_id,
            request=request,
            how=how,
        )


def decision_row(decided: BudgetProfile, seconds: float) -> dict[str, Any]:
    """Return a decision as plain values.

    Parameters
    ----------
    decided : BudgetProfile
    seconds : float
        Formulating, solving and checking.
    """
    return {
        **{name: getattr(decided, name) for name in _STATED.split()},
        "price_source": decided.price_source or None,
        "predicted_loss_note": None if decided.predicted_loss is None else LOSS_NOTE,
        "requested_bytes": requested_bytes(decided),
        "cost": decided.requested.get("cost", "bytes"),
        "seconds": seconds,
    }


def _loss_interval(decided: BudgetProfile, scores: ScoreProfile) -> tuple[float, float] | None:
    """How sure a predicted loss is on such text; None where it is unknown."""
    import numpy as np

    from kvalloc.allocation.curves import RequestCurves
    from kvalloc.allocation.request import Request

    if decided.predicted_loss is None:
        return None
    policies = None
    if decided.unit_policies is not None:
        titles = [policy.title for policy in scores.policies]
        places = np.array([titles.index(policy.title) for policy in decided.policies])
        policies = places[decided.unit_policies]
    curves = RequestCurves(scores=scores, request=Request.read(decided))
    return curves.predicted_loss_interval(decided.budgets, decided.bits, policies)


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
    names = "requested context_tokens batch level page_tokens budgets bits unit_policies"
    measured = decided.measured_loss
    return {
        **{name: getattr(decided, name) for name in names.split()},
        "measured_loss": None if measured is None else measured.record(),
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
