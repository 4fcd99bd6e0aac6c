"""Maximising the worst unit: exact by bisection, because each unit can be judged on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvalloc.dual import DualBound

if TYPE_CHECKING:
    from kvalloc.problem import AllocationProblem

IntArray = npt.NDArray[np.int64]


def cheapest_reaching(problem: AllocationProblem, level: float) -> IntArray | None:
    """Each unit's cheapest option whose weighted value reaches a level.

    Parameters
    ----------
    problem : AllocationProblem
    level : float
        Weighted value that every unit must reach.

    Returns
    -------
    ndarray of int64, (n_units,), or None
        None when some unit reaches it with no option.
    """
    worth = problem.weights[:, None] * problem.values
    reaches = worth >= level
    reaches &= np.arange(problem.n_options)[None, :] < problem.option_counts[:, None]
    if not np.all(reaches.any(axis=1)):
        return None
    first: IntArray = np.argmax(reaches, axis=1).astype(np.int64)
    return first


def worst_unit_bound(problem: AllocationProblem) -> DualBound:
    """The exact optimum of a problem whose objective is its worst unit.

    Parameters
    ----------
    problem : AllocationProblem
        With `Aggregate.WORST`; side constraints are left out, so with them it is a bound.

    Returns
    -------
    DualBound
        Its multiplier is 0: a worst unit has no price that is the same for all.

    Raises
    ------
    InfeasibleError
        If no choice meets the capacity or the target.
    """
    problem.check_feasible()
    if problem.target is not None:
        choice = cheapest_reaching(problem, problem.lowest_accepted_value)
        assert choice is not None  # check_feasible has seen that the target can be reached
        return DualBound(bound=float(problem.cost(choice)), multiplier=0.0, choice=choice)
    levels = np.unique(problem.weights[:, None] * problem.values)
    best = np.zeros(problem.n_units, dtype=np.int64)
    low, high = 0, int(np.searchsorted(levels, problem.max_value, side="right"))
    while low < high:  # the value of a choice is one of the levels: the largest affordable one
        middle = (low + high) // 2
        choice = cheapest_reaching(problem, float(levels[middle]))
        if choice is not None and problem.cost(choice) <= problem.spendable_bytes:
            best, low = choice, middle + 1
        else:
            high = middle
    return DualBound(bound=problem.objective_value(best), multiplier=0.0, choice=best)
