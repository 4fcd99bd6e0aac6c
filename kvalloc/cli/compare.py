"""``kvalloc compare``: every solver on the same problem, side by side."""

from __future__ import annotations

import time
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
from kvalloc.errors import InfeasibleError, InputError, KVAllocError, SolverError

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.score_profile import ScoreProfile

EXAMPLES = """\
  kvalloc compare s.safetensors --budget 20%
  kvalloc compare s.safetensors --target-retention 0.9 --level head
  kvalloc compare s.safetensors --memory 64MiB --solver greedy --solver ilp --json
"""


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """A solver that decided, and whether within what was granted."""

    profile: BudgetProfile
    requested_bytes: int | None
    row: dict[str, Any]

    @property
    def over_bytes(self) -> int:
        """Bytes beyond the request: some published rules overspend."""
        if self.requested_bytes is None:
            return 0
        return max(0, self.profile.retained_bytes - self.requested_bytes)

    @property
    def rank(self) -> tuple[bool, float, bool, float]:
        """Sorts the best objective within the request first, then what is proven and quick."""
        better = -1.0 if self.profile.sense == "max_value" else 1.0
        proven = self.profile.termination == "optimal"
        return self.over_bytes > 0, better * self.profile.objective, not proven, self.row["seconds"]


@dataclass(frozen=True, kw_only=True)
class _Refused:
    """A solver that did not decide, and why."""

    solver: str
    reason: str


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
    from kvalloc.problem.registry import get_solver, solver_names

    request = Request.parse(**asked)  # refuses before the scores are read
    targets.check_time_limit(time_limit)
    for name in solver or []:
        get_solver(name)
    names = list(dict.fromkeys(solver)) if solver else solver_names()
    if not names:
        raise SolverError("no solver is registered: kvalloc is on the path but not installed")
    chosen = _options_by_solver(names, solver_option or [])
    profile = targets.load_scores(scores)
    _check_feasible(profile, request)  # what no solver can do is the user's to change
    settings = {"time_limit": time_limit, "average": average, "priced": False}
    outcomes = [
        _try(profile, request, name, {**settings, "solver_options": chosen[name]}, quiet=quiet)
        for name in names
    ]
    done = sorted((o for o in outcomes if isinstance(o, _Decided)), key=lambda o: o.rank)
    refused = [o for o in outcomes if isinstance(o, _Refused)]
    if not done:
        raise _none_decides(profile, request, refused, time_limit)
    if json:
        others = [{"solver": o.solver, "reason": o.reason} for o in refused]
        print_json([*({**o.row, "reason": None} for o in done), *others])
        return
    _print_table(done, refused)
    note(f"note: {RETENTION_NOTE}", quiet=quiet)
    if any(outcome.profile.predicted_loss is not None for outcome in done):
        note(f"note: {LOSS_NOTE}", quiet=quiet)


def _none_decides(
    scores: ScoreProfile, request: Request, refused: list[_Refused], time_limit: float | None
) -> KVAllocError:
    """What to ask for instead, where anything helps; else the reason of every solver."""
    from kvalloc.allocation.infeasibility import advise

    reasons = "; ".join(one.reason for one in refused)
    error = InfeasibleError(reasons)
    advice = advise(scores, request, error, time_limit_seconds=time_limit)
    return SolverError(reasons) if advice is error else advice


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


def _check_feasible(scores: ScoreProfile, request: Request) -> None:
    """Refuse what already the problem itself rules out.

    Raises
    ------
    InfeasibleError
        With what to ask for instead.
    """
    from kvalloc.allocation.formulation import formulate
    from kvalloc.allocation.grouping import settle
    from kvalloc.allocation.infeasibility import advise

    try:
        formulate(scores, settle(scores, request)[0]).check_feasible()
    except InfeasibleError as error:
        if isinstance(request.share_groups, int):
            raise  # there is no problem to look into before the groups are chosen
        advice = advise(scores, request, error)
        if advice is error:
            raise
        raise advice from error


def _try(
    scores: ScoreProfile,
    request: Request,
    name: str,
    settings: dict[str, Any],
    *,
    quiet: bool,
) -> _Decided | _Refused:
    from kvalloc.allocation.decision import decide
    from kvalloc.cli.progress import slow

    start = time.perf_counter()
    try:
        with slow(f"solving with {name}", quiet=quiet):
            decided = decide(scores, request, solver=name, **settings)
    except KVAllocError as error:
        # The problem itself is sound, so this is about what this solver can do or reach.
        return _Refused(solver=name, reason=str(error))
    seconds = time.perf_counter() - start
    return _Decided(
        profile=decided,
        requested_bytes=requested_bytes(decided),
        row=row(decided, scores, seconds),
    )


def _print_table(done: list[_Decided], refused: list[_Refused]) -> None:
    first = done[0]
    print(f"{request_text(first.profile)}, {first.profile.level} level")
    if first.requested_bytes is not None:
        print(f"granted {size(first.requested_bytes)} of {size(first.profile.full_bytes)}")
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
    loss = decided.predicted_loss
    return {
        "solver": solver_text(decided),
        "retention": "?" if decided.retention is None else f"{decided.retention:.4f}",
        **({extra: f"{decided.objective:.4f}"} if extra and decided.sense == "max_value" else {}),
        "loss": "?" if loss is None else f"{loss:.4f}",
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
