"""``kvalloc compare``: every solver on the same problem, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.cli import targets
from kvalloc.cli.options import Json, Quiet
from kvalloc.cli.output import gap_text, hanging, note, print_json, print_table, size
from kvalloc.cli.solve import (
    LOSS_NOTE,
    RETENTION_NOTE,
    ended_text,
    request_text,
    requested_bytes,
    row,
    solver_text,
)
from kvalloc.errors import InputError, SolverError
from kvalloc.report.terminal import number_text

if TYPE_CHECKING:
    from kvalloc.allocation.decision import Attempt
    from kvalloc.formats.budget_profile import BudgetProfile

EXAMPLES = """\
  kvalloc compare s.safetensors --budget 20%
  kvalloc compare s.safetensors --target-retention 0.9 --level head
  kvalloc compare s.safetensors --memory 64MiB --solver greedy --solver ilp --json
"""


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """A solver that decided, and whether within what was granted."""

    profile: BudgetProfile
    row: dict[str, Any]

    @property
    def over_bytes(self) -> int:
        """Bytes beyond the request: some published rules overspend."""
        granted = requested_bytes(self.profile)
        return 0 if granted is None else max(0, self.profile.retained_bytes - granted)

    @property
    def rank(self) -> tuple[bool, float, bool, float]:
        """Sorts the best objective within the request first, then what is proven and quick."""
        better = -1.0 if self.profile.sense == "max_value" else 1.0
        proven = self.profile.termination == "optimal"
        return self.over_bytes > 0, better * self.profile.objective, not proven, self.row["seconds"]


@targets.takes(RequestOptions)
def compare(
    scores: targets.Scores,
    solver: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this solver; can be repeated."),
    ] = None,
    solver_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:KEY=VALUE",
            help="An option of one solver, such as ilp:gap=0.001; can be repeated.",
        ),
    ] = None,
    average: targets.Average = "curves",
    time_limit: targets.TimeLimit = None,
    json: Json = False,
    quiet: Quiet = False,
    **asked: Unpack[RequestOptions],
) -> None:
    """Show what every solver makes of one target, side by side.

    Exactly one target: --target-retention, --target-loss, --budget, --budget-tokens or --memory.
    The best comes first. A solver that cannot solve this problem is listed with its reason.
    """
    from kvalloc.allocation.decision import compare_solvers
    from kvalloc.cli.progress import slow
    from kvalloc.problem.registry import get_solver, solver_names

    request = Request.parse(**asked)  # refuses before the scores are read
    targets.check_time_limit(time_limit)
    names = list(dict.fromkeys(solver or solver_names()))
    if not names:
        raise SolverError("no solver is registered: kvalloc is on the path but not installed")
    options = _options_by_solver(names, solver_option or [])
    solvers = {name: get_solver(name, **options[name]) for name in names}
    profile = targets.load_scores(scores)
    attempts = compare_solvers(
        profile,
        request,
        solvers,
        time_limit=time_limit,
        average=average,  # type: ignore[arg-type]  # solving checks it
        notify=lambda line: note(line, quiet=quiet),
        watch=lambda name: slow(f"solving with {name}", quiet=quiet),
    )
    decided = [
        _Decided(profile=one.profile, row=row(one.profile, one.seconds))
        for one in attempts
        if one.profile is not None
    ]
    done = sorted(decided, key=lambda one: one.rank)
    refused = [one for one in attempts if one.profile is None]
    if json:
        others = [{"solver": one.solver, "reason": one.reason} for one in refused]
        print_json([*({**one.row, "reason": None} for one in done), *others])
        return
    _print_table(done, refused)
    note(f"note: {RETENTION_NOTE}", quiet=quiet)
    if any(one.profile.predicted_loss is not None for one in done):
        note(f"note: {LOSS_NOTE}", quiet=quiet)


def _options_by_solver(names: list[str], given: list[str]) -> dict[str, dict[str, Any]]:
    """The options of each solver from ``NAME:KEY=VALUE`` texts."""
    pairs: dict[str, list[str]] = {name: [] for name in names}
    for text in given:
        name, colon, pair = text.partition(":")
        if not colon or "=" in name:
            raise InputError(f"--solver-option {text!r} is not NAME:KEY=VALUE, such as ilp:gap=0.1")
        if name.strip() not in pairs:
            raise InputError(
                f"--solver-option {text!r} is for a solver that is not compared; choose from "
                f"{', '.join(names)}"
            )
        pairs[name.strip()].append(pair)
    return {name: targets.solver_options(name, own) if own else {} for name, own in pairs.items()}


def _print_table(done: list[_Decided], refused: list[Attempt]) -> None:
    first = done[0]
    print(f"{request_text(first.profile)}, {first.profile.level} level")
    if (granted := requested_bytes(first.profile)) is not None:
        print(f"granted {size(granted)} of {size(first.profile.full_bytes)}")
    print()
    columns = [_cells(outcome) for outcome in done]
    if all(column["loss"] == "?" for column in columns):
        for column in columns:
            del column["loss"]
    rows = [list(column.values()) for column in columns]
    print_table(list(columns[0]), rows, optional=("tokens", "share"))
    if refused:
        print()
        indent = max(len(outcome.solver) for outcome in refused) + 2
        for outcome in refused:
            reason = outcome.reason.removeprefix(f"{outcome.solver} ")
            print(f"{outcome.solver:<{indent}}{hanging(reason, indent)}")


def _cells(outcome: _Decided) -> dict[str, str]:
    """What is shown of a solver, by column."""
    decided = outcome.profile
    asked = decided.requested
    own = "weighted" if asked.get("weights") else ""
    own = "worst samples" if asked.get("workloads") else own
    extra = {"worst": "worst unit", "mean": own}.get(str(asked.get("objective")), "")
    return {
        "solver": solver_text(decided),
        "retention": number_text(decided.retention, ".4f", "?"),
        **({extra: f"{decided.objective:.4f}"} if extra and decided.sense == "max_value" else {}),
        "loss": number_text(decided.predicted_loss, ".4f", "?"),
        "tokens": f"{decided.retained_tokens / decided.budgets.size:,.0f}",
        "bytes": size(decided.retained_bytes),
        "share": f"{decided.retained_bytes / decided.full_bytes:.1%}",
        "bound": _bound(decided),
        "gap": gap_text(decided.gap),
        "seconds": f"{outcome.row['seconds']:.3f}",
        "ended": f"over by {size(outcome.over_bytes)}"
        if outcome.over_bytes
        else ended_text(decided),
    }


def _bound(decided: BudgetProfile) -> str:
    if decided.bound is None:
        return "unknown"
    if decided.sense == "min_cost":
        return size(decided.bound)
    is_loss = decided.requested.get("objective") == "loss"
    return f"{abs(decided.bound) if is_loss else decided.bound:.4f}"
