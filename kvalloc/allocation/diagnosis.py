"""Why nothing can work, and the nearest thing that can: one constraint relaxed at a time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    MaxDistinct,
    RankBalance,
    Sense,
    SideConstraint,
)
from kvalloc.problem.registry import get_solver

PATIENCE_SECONDS = 10.0
"""Longest search for what is nearest; what was found by then is told as what it is."""

TOLERANCE_GRID = 1000
"""Rank tolerances are looked for in steps of one part in so many."""


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """One side constraint, and how far it has to give way for the problem to have a solution.

    Attributes
    ----------
    index : int
        Which of the problem's constraints.
    constraint : SideConstraint
        As it was.
    relaxed : SideConstraint or None
        The tightest one of its kind with which there is a solution; None where only leaving it
        out helps.
    exact : bool
        Whether anything tighter was proven not to work (a rank tolerance: on a grid of 0.001).
    """

    index: int
    constraint: SideConstraint
    relaxed: SideConstraint | None
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What stands in the way of an infeasible problem.

    Attributes
    ----------
    nearest : float or int or None
        The largest target, or the smallest capacity in bytes, that all constraints together leave
        possible; None where there is none, or none was found in time.
    hopeless : bool
        Whether the constraints were proven to leave no choice at all, whatever the goal.
    bound : float or None
        Nothing beyond this is possible; equal to ``nearest`` where that is exact.
    relaxations : tuple of Relaxation
        The side constraints of which each alone, relaxed, makes the problem feasible.
    """

    nearest: float | int | None
    bound: float | None
    hopeless: bool
    relaxations: tuple[Relaxation, ...]

    @property
    def exact(self) -> bool:
        """Whether nothing nearer is possible."""
        return self.nearest == self.bound and (self.nearest is not None or self.hopeless)


def diagnose(
    problem: AllocationProblem, *, time_limit_seconds: float = PATIENCE_SECONDS
) -> Diagnosis | None:
    """Find out why a problem has no solution, and what is nearest to it.

    Parameters
    ----------
    problem : AllocationProblem
        Of either sense, with any side constraints.
    time_limit_seconds : float
        For the whole search.

    Returns
    -------
    Diagnosis or None
        None where the problem has a solution, or none was found and none was ruled out.
    """
    asker = _Asker(time.monotonic() + time_limit_seconds)
    if asker.solve(problem) is not False:
        return None
    nearest, bound, hopeless = asker.reach(problem)
    relaxations = []
    for index, constraint in enumerate(problem.constraints):
        relaxed = asker.relax(problem, index, constraint)
        if relaxed is not None:
            relaxations.append(relaxed)
    return Diagnosis(
        nearest=nearest, bound=bound, hopeless=hopeless, relaxations=tuple(relaxations)
    )


def is_solvable(problem: AllocationProblem, *, time_limit_seconds: float) -> bool | None:
    """Whether a problem has a solution; None where neither was shown in time."""
    answer = _Asker(time.monotonic() + time_limit_seconds).solve(problem)
    return answer if answer is None else answer is not False


def least_that_works(
    low: int, high: int, works: Callable[[int], int | bool | None]
) -> tuple[int, bool]:
    """The least whole number above ``low`` that works, ``high`` being known to.

    Parameters
    ----------
    low, high : int
        What is known not to work and to work.
    works : callable
        ``works(n)`` is False, or None where it is not known, or True; or the least number that
        the solution found for ``n`` needs, which saves steps.

    Returns
    -------
    (int, bool)
        The number, and whether everything below was ruled out.
    """
    exact = True
    while high - low > 1:
        middle = (low + high) // 2
        answer = works(middle)
        if answer is None:
            exact = False
        if answer is None or answer is False:
            low = middle
        else:
            high = middle if answer is True else max(low + 1, min(middle, answer))
    return high, exact


class _Asker:
    """Solves variants of a problem until a deadline; False is a proof that there is no choice."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._solver = get_solver("auto")

    def solve(self, problem: AllocationProblem) -> CheckedSolution | bool | None:
        """The solution, False where there is none, None where neither was shown in time."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            return solve_problem(problem, self._solver, time_limit_seconds=left)
        except InfeasibleError:
            return False
        except SolverError:
            return None

    def reach(self, problem: AllocationProblem) -> tuple[float | int | None, float | None, bool]:
        """The best goal that the side constraints leave, its bound, and whether there is none."""
        if problem.sense is Sense.MIN_COST:
            answer = self.solve(problem.with_capacity(problem.max_cost_bytes))
        else:
            answer = self.solve(problem.with_target(_below_everything(problem)))
        if not isinstance(answer, CheckedSolution):
            return None, None, answer is False
        bound = None if answer.bound is None else float(answer.bound)
        if problem.sense is Sense.MIN_COST:
            return answer.value, bound, False
        return answer.cost_bytes, bound, False

    def relax(
        self, problem: AllocationProblem, index: int, constraint: SideConstraint
    ) -> Relaxation | None:
        """How far one constraint has to give way; None where that alone does not help."""
        others = problem.constraints[:index] + problem.constraints[index + 1 :]

        def under(one: SideConstraint | None) -> CheckedSolution | bool | None:
            changed = problem.constraints[:index] + (one,) + problem.constraints[index + 1 :]
            kept = others if one is None else tuple(c for c in changed if c is not None)
            return self.solve(problem.replace(constraints=kept))

        free = under(None)
        if not isinstance(free, CheckedSolution):
            return None
        relaxed, exact = None, True
        if isinstance(constraint, GroupCap):
            relaxed, exact = _larger_cap(problem, constraint, free, under)
        elif isinstance(constraint, MaxDistinct):
            relaxed, exact = _more_distinct(problem, constraint, free, under)
        elif isinstance(constraint, RankBalance):
            relaxed, exact = _wider_balance(problem, constraint, under)
        return Relaxation(index=index, constraint=constraint, relaxed=relaxed, exact=exact)


_Under = Callable[[SideConstraint | None], CheckedSolution | bool | None]


def _below_everything(problem: AllocationProblem) -> float:
    """A target that any choice meets."""
    least = problem.values if problem.scenarios is None else problem.scenarios.min(axis=0)
    worth = problem.weights[:, None] * least
    if problem.aggregate is Aggregate.WORST:
        return float(worth.min()) - 1.0
    return math.fsum(worth.min(axis=1)) - 1.0


def _larger_cap(
    problem: AllocationProblem, cap: GroupCap, free: CheckedSolution, under: _Under
) -> tuple[SideConstraint, bool]:
    """The smallest cap of these units that works, on the grain of the costs."""
    units = np.asarray(cap.units, dtype=np.int64)
    floors, grain = int(problem.costs[units, 0].sum()), problem.lattice_bytes

    def stored(answer: CheckedSolution) -> int:
        return int(problem.costs[units, answer.choice[units]].sum() - floors) // grain

    def widened(grains: int) -> GroupCap:
        return dataclasses.replace(cap, capacity_bytes=floors + grains * grain)

    def works(grains: int) -> int | bool | None:
        answer = under(widened(grains))
        return stored(answer) if isinstance(answer, CheckedSolution) else answer

    known = max(-1, (cap.capacity_bytes - floors) // grain)
    least, exact = least_that_works(known, stored(free), works)
    return widened(least), exact


def _more_distinct(
    problem: AllocationProblem, few: MaxDistinct, free: CheckedSolution, under: _Under
) -> tuple[SideConstraint, bool]:
    def distinct(answer: CheckedSolution) -> int:
        return int(np.unique(problem.chosen_tokens(answer.choice)).size)

    def works(most: int) -> int | bool | None:
        answer = under(MaxDistinct(most=most))
        return distinct(answer) if isinstance(answer, CheckedSolution) else answer

    most, exact = least_that_works(few.most, distinct(free), works)
    return MaxDistinct(most=most), exact


def _wider_balance(
    problem: AllocationProblem, balance: RankBalance, under: _Under
) -> tuple[SideConstraint | None, bool]:
    """The smallest tolerance that works, in steps of one part in `TOLERANCE_GRID`."""

    def widened(steps: int) -> RankBalance:
        return dataclasses.replace(balance, tolerance=steps / TOLERANCE_GRID)

    def works(steps: int) -> int | bool | None:
        answer = under(widened(steps))
        if not isinstance(answer, CheckedSolution) or answer.ranks is None:
            return answer if isinstance(answer, bool) else None
        loads = balance.loads(problem, answer.choice, answer.ranks)
        over = float(loads.max()) * balance.n_ranks / max(1, int(loads.sum())) - 1.0
        return max(0, math.ceil(over * TOLERANCE_GRID - 1e-9))

    most = (balance.n_ranks - 1) * TOLERANCE_GRID  # everything on one rank
    known = math.floor(balance.tolerance * TOLERANCE_GRID)
    answer = works(most)
    if answer is None or answer is False:
        return None, answer is False
    high = most if answer is True else answer
    least, exact = least_that_works(known, max(known + 1, high), works)
    return widened(least), exact
