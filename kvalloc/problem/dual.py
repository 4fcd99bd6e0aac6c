"""Lagrangian duality for multiple-choice problems: bounds that need no trust in a solver.

For a price of one byte, each unit's best option is found on its own; the sum is a bound on the
whole for every price, and the best price gives the tightest one (Fisher, 1981; for separable
concave problems of equal steps it is exact on the grain of the costs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvalloc.accounting import IntArray

if TYPE_CHECKING:
    from kvalloc.problem.arrays import AllocationProblem


ROUNDS = 200
"""Halvings of the price interval; float64 runs out of digits long before."""


@dataclass(frozen=True, kw_only=True)
class DualBound:
    """A bound and the price that proves it.

    Attributes
    ----------
    bound : float
        No choice is better: an upper bound on the value, or a lower bound on the cost in bytes.
    multiplier : float
        Price of one byte in units of value: the shadow price of the capacity.
    choice : ndarray of int64, (n_units,)
        The cheapest best response at that price that stays on the feasible side of the capacity
        (MAX_VALUE), or that meets the target (MIN_COST).
    """

    bound: float
    multiplier: float
    choice: IntArray


def concave_response(
    problem: AllocationProblem,
    threshold: float,
    *,
    strict: bool,
    at_least: IntArray | None = None,
    at_most: IntArray | None = None,
) -> IntArray:
    """Steps of each unit whose gain is above (strict) or at least the threshold.

    Gains of a concave unit fall along its row, so the count is found by bisection in every row at
    once, without ever forming the gains: O(n_units log n_options).

    Parameters
    ----------
    problem : AllocationProblem
        Concave, with one cost step.
    threshold : float
        Weighted gain per step.
    strict : bool
        Count gains above the threshold, or also equal ones.
    at_least, at_most : ndarray of int64, (n_units,), optional
        Limits already known from other thresholds: the search starts between them.

    Returns
    -------
    ndarray of int64, (n_units,)
        Option indices.
    """
    units = np.arange(problem.n_units)
    last = problem.option_counts - 1
    low = np.zeros(problem.n_units, dtype=np.int64) if at_least is None else at_least
    high = last if at_most is None else at_most
    for _ in range(int((high - low).max()).bit_length()):
        middle = (low + high) >> 1
        after = np.minimum(middle + 1, last)
        gains = problem.weights * (problem.values[units, after] - problem.values[units, middle])
        passes = (gains > threshold) if strict else (gains >= threshold)
        passes &= middle < high
        low = np.where(passes, middle + 1, low)
        high = np.where(passes, high, middle)
    return low


def dense_response(problem: AllocationProblem, multiplier: float) -> IntArray:
    """Each unit's best option at a price per byte, by looking at all of them."""
    net = problem.weights[:, None] * problem.values - multiplier * problem.costs
    if int(problem.option_counts.min()) < problem.n_options:
        net[np.arange(problem.n_options)[None, :] >= problem.option_counts[:, None]] = -np.inf
    best: IntArray = np.argmax(net, axis=1).astype(np.int64)
    return best


def dual_bound(problem: AllocationProblem) -> DualBound:
    """The tightest Lagrangian bound, found by bisecting the price of a byte.

    Parameters
    ----------
    problem : AllocationProblem
        Side constraints are left out: the bound holds with and without them.

    Returns
    -------
    DualBound

    Raises
    ------
    InfeasibleError
        If no choice meets the capacity or the target.
    """
    problem.check_feasible()
    cheap, dear = 0.0, _highest_price(problem)
    free = problem.best_response(0.0)
    if problem.target is None and problem.cost(free) <= problem.spendable_bytes:
        return DualBound(bound=bound_at(problem, 0.0), multiplier=0.0, choice=free)
    for _ in range(ROUNDS):
        middle = 0.5 * (cheap + dear)
        if middle in (cheap, dear):
            break
        if _spends_enough(problem, problem.best_response(middle)):
            cheap = middle
        else:
            dear = middle
    ends = {price: bound_at(problem, price) for price in (cheap, dear)}
    if problem.target is None:
        price = min(ends, key=lambda p: ends[p])
        return DualBound(bound=ends[price], multiplier=price, choice=problem.best_response(dear))
    price = max(ends, key=lambda p: ends[p])
    return DualBound(bound=ends[price], multiplier=price, choice=problem.best_response(cheap))


def _spends_enough(problem: AllocationProblem, choice: IntArray) -> bool:
    if problem.target is None:
        return problem.cost(choice) > problem.spendable_bytes
    return problem.meets_target(problem.objective_value(choice))


def _highest_price(problem: AllocationProblem) -> float:
    """A price at which every unit takes its cheapest option."""
    return 2.0 * (problem.largest_gain + 1e-300) / problem.lattice_bytes


def bound_at(problem: AllocationProblem, price: float) -> float:
    """The dual function at a price: a valid bound for any price, tight for the right one.

    Parameters
    ----------
    problem : AllocationProblem
    price : float
        Weighted value per byte, at least 0.

    Returns
    -------
    float
        An upper bound on the value, or a lower bound on the cost, rounded up to its grain.
    """
    response = problem.best_response(price)
    value, cost = problem.objective_value(response), problem.cost(response)
    if problem.target is None:
        return value + price * (problem.spendable_bytes - cost)
    if price <= 0.0:
        return float(problem.min_cost_bytes)
    relaxed = cost + (problem.lowest_accepted_value - value) / price
    grain = problem.lattice_bytes
    # A cost is a whole number of grains above the floors; a millionth of a grain is rounding.
    grains = math.ceil((relaxed - problem.min_cost_bytes) / grain - 1e-6)
    return float(problem.min_cost_bytes + max(0, grains) * grain)
