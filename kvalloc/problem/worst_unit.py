"""Maximising the worst unit: exact by bisection, because each unit can be judged on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.problem.dual import DualBound

if TYPE_CHECKING:
    from kvalloc.problem.arrays import AllocationProblem


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
    if problem.is_rising:
        return _first_reaching(problem, level)
    first = np.zeros(problem.n_units, dtype=np.int64)
    # One unit at a time: problems can have a hundred million options.
    for unit, count in enumerate(problem.option_counts.tolist()):
        reaches = problem.weights[unit] * problem.values[unit, :count] >= level
        first[unit] = np.argmax(reaches)
        if not reaches[first[unit]]:
            return None
    return first


def _first_reaching(problem: AllocationProblem, level: float) -> IntArray | None:
    """The same where values never fall: by bisection in every row at once."""
    units, last = np.arange(problem.n_units), problem.last_options
    if np.any(problem.weights * problem.values[units, last] < level):
        return None
    low, high = np.zeros(problem.n_units, dtype=np.int64), last
    for _ in range(int(high.max()).bit_length()):
        middle = (low + high) >> 1
        reaches = problem.weights * problem.values[units, middle] >= level
        high = np.where(reaches, middle, high)
        low = np.where(reaches, low, np.minimum(middle + 1, high))
    return high


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
    best = _affordable(problem, problem.max_value)
    if best is None:
        best = _highest_affordable(problem)
    return DualBound(bound=problem.objective_value(best), multiplier=0.0, choice=best)


def _affordable(problem: AllocationProblem, level: float) -> IntArray | None:
    """The cheapest choice of a level, if there is one within the capacity."""
    choice = cheapest_reaching(problem, level)
    if choice is None or problem.cost(choice) > problem.spendable_bytes:
        return None
    return choice


def _highest_affordable(problem: AllocationProblem) -> IntArray:
    """The cheapest choice of the highest level there is money for.

    What a level costs changes only where it is the value of some option, so halving the interval
    between a level that is affordable and one that is not, down to neighbouring numbers, ends at
    the largest such value. A choice is worth at least the level that it was asked for: what it is
    worth is the next level known to be affordable.
    """
    best = np.zeros(problem.n_units, dtype=np.int64)
    low, high = problem.objective_value(best), problem.max_value
    while True:
        middle = low + 0.5 * (high - low)
        if not low < middle < high:
            break
        choice = _affordable(problem, middle)
        if choice is None:
            high = middle
        else:
            best, low = choice, problem.objective_value(choice)
    return best
