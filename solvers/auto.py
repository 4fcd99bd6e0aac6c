"""The solver that picks the solver: the cheapest one that is exact for the problem at hand."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from kvalloc.errors import SolverError
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    MaxDistinct,
    RankBalance,
    SameBudget,
    SideConstraint,
    Solution,
    Solver,
)

EXACT_TAIL_OPTIONS = 1500
"""With more options than this, the exact optimum over several workloads takes too long."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A built-in solver, when it is worth asking, and why it is the one.

    Attributes
    ----------
    solver : str
        Its name, which is also its module's.
    fits : callable
        Whether the problem is of the kind that it is meant for.
    why : str
        What the problem is like, as the reason.
    """

    solver: str
    fits: Callable[[AllocationProblem], bool]
    why: str


def _is_worst(problem: AllocationProblem) -> bool:
    return problem.aggregate is Aggregate.WORST


def _is_sum(problem: AllocationProblem) -> bool:
    return problem.aggregate is Aggregate.SUM


def _is_large_tail(problem: AllocationProblem) -> bool:
    tail = problem.aggregate is Aggregate.TAIL and not problem.constraints
    return tail and int(problem.option_counts.sum()) > EXACT_TAIL_OPTIONS


def _is_plain_concave(problem: AllocationProblem) -> bool:
    return _is_sum(problem) and not problem.constraints and problem.is_concave


def _has_nested_caps(problem: AllocationProblem) -> bool:
    # Whether the curves are concave takes longer than whether the caps nest: flow asks that first.
    only_caps = all(isinstance(c, GroupCap) for c in problem.constraints)
    return _is_sum(problem) and only_caps and (bool(problem.constraints) or problem.is_concave)


def _is_one_knapsack(problem: AllocationProblem) -> bool:
    shared = all(isinstance(c, SameBudget) for c in problem.constraints)
    return _is_sum(problem) and shared


def _always(problem: AllocationProblem) -> bool:
    return True


CANDIDATES = (
    Candidate(
        solver="greedy",
        fits=_is_plain_concave,
        why="concave curves and one cost per entry: the largest gains first are the optimum",
    ),
    Candidate(
        solver="max_min", fits=_is_worst, why="the worst unit counts: one level is the optimum"
    ),
    Candidate(
        solver="cvar",
        fits=_is_large_tail,
        why="the worst of several workloads, too many options to search: a bound and repair",
    ),
    Candidate(
        solver="flow",
        fits=_has_nested_caps,
        why="concave curves under nested caps: a minimum-cost flow is the optimum",
    ),
    Candidate(
        solver="dp",
        fits=_is_one_knapsack,
        why="one capacity and few enough totals: a dynamic program over them is the optimum",
    ),
    Candidate(
        solver="ilp", fits=_always, why="nothing cheaper is exact here: an integer program is"
    ),
)
"""From cheap to dear."""


class Auto(Solver):
    """Reads the problem and takes the cheapest built-in solver that is exact for it.

    Worst unit: `max_min`. Several workloads: `cvar`, or `ilp` where there are few options.
    Concave, one cost step, no side constraint: `greedy`. Concave with nested caps: `flow`. One
    capacity, also with shared budgets, and a table of its totals that fits in memory: `dp`.
    Everything else: `ilp`, which starts from the Lagrangian dual. Each is asked whether it can;
    what it answers with, optimal or not, is passed on, with the name and the reason in front of
    its own line. Solvers of other packages are never taken by themselves.

    References
    ----------
    The exactness of each is argued in its own file.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "picks the cheapest solver that is exact for the problem"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset(
        {GroupCap, SameBudget, MaxDistinct, RankBalance}
    )
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset(Aggregate)

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """Whether there is a solver for it: `ilp` takes every kind of problem that it declares."""
        if any(True for _ in self._able(problem)):
            return True
        return super().can_solve(problem)

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """The answer of the solver that was picked; of the next one where that gives up.

        Raises
        ------
        SolverError
            If the last one gives up too.
        """
        deadline = None if time_limit_seconds is None else time.monotonic() + time_limit_seconds
        gave_up: list[str] = []
        for candidate, solver in self._able(problem):
            remaining = None
            if deadline is not None:
                remaining = max(deadline - time.monotonic(), 1e-3)
            try:
                solution = solver.solve(problem, time_limit_seconds=remaining)
            except SolverError as error:
                gave_up.append(str(error))
                continue
            notes = [f"{candidate.solver}: {candidate.why}", *gave_up, solution.detail]
            return dataclasses.replace(
                solution,
                detail="; ".join(note for note in notes if note),
                decided_by=candidate.solver,
            )
        raise SolverError("; ".join(gave_up) or "auto found no solver for this problem")

    def _able(self, problem: AllocationProblem) -> Iterator[tuple[Candidate, Solver]]:
        """The candidates that can solve the problem, from cheap to dear."""
        for candidate in CANDIDATES:
            if candidate.fits(problem):
                solver = _built_in(candidate.solver)
                if solver is not None and solver.can_solve(problem) is True:
                    yield candidate, solver


def _built_in(name: str) -> Solver | None:
    """A solver of this package, imported only now; None where it is not there."""
    found = _class_of(name)
    return None if found is None else found()


@cache
def _class_of(name: str) -> type[Solver] | None:
    path = f"kvalloc.solvers.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
    classes = (c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Solver))
    return next((c for c in classes if getattr(c, "name", None) == name), None)
