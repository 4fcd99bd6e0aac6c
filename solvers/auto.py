"""Choice of the solver."""

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
    fits : callable
    why : str
    """

    solver: str
    fits: Callable[[AllocationProblem], bool]
    why: str


def _is_sum(problem: AllocationProblem, *sides: type[SideConstraint]) -> bool:
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
    """The cheapest solver of this package that is exact for the problem, as its file argues.

    Worst unit: `max_min`. Concave, one cost step, no side constraint: `greedy`. Concave with nested
    caps: `flow`. One capacity, and a table of its totals that fits in memory: `dp`. Otherwise:
    `ilp`. Its answer, optimal or not, is passed on with its name and the reason.
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "picks the cheapest solver that is exact for the problem"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = EVERY_KIND
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset(Aggregate)

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """Return whether a candidate can, else the refusal."""
        if any(True for _ in self._able(problem)):
            return True
        return super().can_solve(problem)

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Return the answer of the first candidate that can and does not give up."""
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
        for candidate in CANDIDATES:
            if candidate.fits(problem):
                solver = get_solver(candidate.solver)
                if solver.can_solve(problem) is True:
                    yield candidate, solver
