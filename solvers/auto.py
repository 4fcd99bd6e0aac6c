"""Choice of the solver: the cheapest one that is exact for the problem."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

from kvalloc.errors import SolverError
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap, SideConstraint
from kvalloc.problem.arrays import EVERY_KIND
from kvalloc.problem.registry import get_solver
from kvalloc.problem.solver import Solution, Solver, deadline_after


class Candidate(NamedTuple):
    """A built-in solver, the condition for it, and the reason.

    Attributes
    ----------
    solver : str
        Its name.
    fits : callable
        Returns whether the problem is of the kind that it is meant for.
    why : str
        Kind of the problem, as the reason.
    """

    solver: str
    fits: Callable[[AllocationProblem], bool]
    why: str


def _is_sum(problem: AllocationProblem, *sides: type[SideConstraint]) -> bool:
    """Return whether the sum counts, with no side constraints but those."""
    plain = problem.aggregate is Aggregate.SUM
    return plain and all(isinstance(c, sides) for c in problem.constraints)


_GREEDY = "concave curves and one cost per entry: the largest gains first are the optimum"
_LEVEL = "the worst unit counts: one level is the optimum"
_NESTED = "concave curves under nested caps: a minimum-cost flow is the optimum"
_TABLE = "one capacity and few enough totals: a dynamic program over them is the optimum"
_PROGRAM = "nothing cheaper is exact here: an integer program is"

CANDIDATES = (
    Candidate("greedy", _is_sum, _GREEDY),
    Candidate("max_min", lambda p: p.aggregate is Aggregate.WORST, _LEVEL),
    Candidate("flow", lambda p: bool(p.constraints) and _is_sum(p, GroupCap), _NESTED),
    Candidate("dp", _is_sum, _TABLE),
    Candidate("ilp", lambda p: True, _PROGRAM),
)
"""Candidates, the cheapest first."""


class Auto(Solver):
    """Reads the problem and takes the cheapest built-in solver that is exact for it.

    Worst unit: `max_min`. Concave, one cost step, no side constraint: `greedy`. Concave with nested
    caps: `flow`. One capacity, and a table of its totals that fits in memory: `dp`. Otherwise:
    `ilp`, which starts from the Lagrangian dual. Each is asked whether it can; its answer, optimal
    or not, is passed on, with the name and the reason before its own line. Solvers of other
    packages are never picked.

    References
    ----------
    The exactness of each is argued in its own file.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "picks the cheapest solver that is exact for the problem"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = EVERY_KIND
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset(Aggregate)

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """Return whether a solver takes it; `ilp` takes all kinds of problems that it declares."""
        if any(True for _ in self._able(problem)):
            return True
        return super().can_solve(problem)

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Return the answer of the picked solver; of the next one if that gives up.

        Raises
        ------
        SolverError
            If the last one gives up too.
        """
        deadline = deadline_after(time_limit_seconds)
        gave_up: list[str] = []
        for candidate, solver in self._able(problem):
            left = max(deadline - time.monotonic(), 1e-3)
            try:
                solution = solver.solve(problem, time_limit_seconds=left)
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
        """Yield the candidates that can solve the problem, from cheap to expensive."""
        for candidate in CANDIDATES:
            if candidate.fits(problem):
                solver = get_solver(candidate.solver)
                if solver.can_solve(problem) is True:
                    yield candidate, solver
