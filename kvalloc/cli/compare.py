"""``kvalloc compare``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

from kvalloc.allocation import decision
from kvalloc.allocation.decision import Attempt
from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.cli.options import SOLVING, ScoresArgument, SolverOptions, takes
from kvalloc.cli.output import ProgressBar, note, print_result
from kvalloc.cli.solve import decision_facts
from kvalloc.report import wording
from kvalloc.report.terminal import field_lines, table_text
from kvalloc.units import Option, size


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ScoresArgument):
    """Solvers to compare."""

    solver: Annotated[list[str] | None, Option("NAME", SOLVING)] = None
    """Only this solver, also with options: ilp:gap=0.001."""


@takes(only={SolverOptions: ["average", "time_limit"]})
def compare(
    options: CompareOptions, solving: SolverOptions, **request_options: Unpack[RequestOptions]
) -> None:
    """Show the decisions of all solvers for one target, side by side.

    Exactly one target: --target-retention, --target-loss, --budget, --budget-tokens or --memory.
    The best comes first. A solver that cannot solve this problem is listed with its reason.

    Examples
    --------
    kvalloc compare s.safetensors --budget 20%
    kvalloc compare s.safetensors --target-retention 0.9 --level head
    kvalloc compare s.safetensors --memory 64MiB --solver greedy --solver ilp --json
    """
    request = Request.parse(**request_options)  # refuses before the scores are read
    attempts = decision.compare(
        options.scores,
        solvers=options.solver,
        request=request,
        time_limit=solving.time_limit,
        average=solving.average,  # type: ignore[arg-type]  # solving checks it
        notify=note,
        watch=lambda name: ProgressBar(f"solving with {name}"),
    )
    notes = [f"note: {wording.RETENTION_NOTE}"]
    if any(one.profile and one.profile.predicted_loss is not None for one in attempts):
        notes.append(f"note: {wording.LOSS_NOTE}")
    facts = [_facts(one) for one in attempts]
    print_result(facts, lines=_lines(attempts), notes=notes, always=True)


def _facts(attempt: Attempt) -> dict[str, Any]:
    if attempt.profile is None:
        return {"solver": attempt.solver, "reason": attempt.reason}
    return {**decision_facts(attempt.profile, attempt.seconds), "reason": None}


def _lines(attempts: list[Attempt]) -> Iterator[str]:
    decided = [(one, one.profile) for one in attempts if one.profile is not None]
    _, first = decided[0]
    yield f"{wording.request_text(first)}, {first.level} level"
    if (granted := wording.requested_bytes(first)) is not None:
        yield f"granted {size(granted)} of {size(first.full_bytes)}"
    columns = [wording.decision_cells(profile, one.seconds) for one, profile in decided]
    unknown = all(column["loss"] == "?" for column in columns)
    headings = [name for name in columns[0] if not (unknown and name == "loss")]
    yield "\n" + table_text(headings, [[column[name] for name in headings] for column in columns])
    if refused := {one.solver: one.reason for one in attempts if one.profile is None}:
        yield ""
        yield from field_lines(
            {name: reason.removeprefix(f"{name} ") for name, reason in refused.items()}
        )
