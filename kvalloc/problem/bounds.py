"""Bounds computed without a solver.

*Sums.* At a price of a byte, the units' best options sum to a bound. The best price gives the
tightest (Fisher, 1981), exact on the costs' grain for separable concave problems of equal steps.

*The worst unit.* Exact by bisection of the level: units can be judged separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.accounting.rounding import round_up_to_grain
from kvalloc.problem.arrays import (
    BOUND,
    Aggregate,
    AllocationProblem,
    first_where,
)

PRICE_ROUNDS = 100
"""Prices tried; about ten are needed for 640 units of 64 options, and any price gives a bound."""

NOISE = 1e-13
"""Rounding error of a sum of a few thousand terms of size one; less counts as 0."""


@dataclass(frozen=True, kw_only=True)
class DualBound:
    """A bound and the price that proves it.

    Attributes
    ----------
    bound : float
        Upper on the value, or lower on the cost in bytes.
    multiplier : float
        Value of a byte; 0 for the worst unit.
    choice : ndarray of int64, (n_units,)
        A best response, within the capacity or meeting the target.
    """

    bound: float
    multiplier: float
    choice: IntArray


def dual_bound(problem: AllocationProblem) -> DualBound:
    """Return the Lagrangian dual on the costs' grain; of a worst unit, the optimum.

    It holds with all side constraints, but only caps on a maximised worst unit count.

    Raises
    ------
    InfeasibleError
        If no choice meets the capacity or the target.
    """
    if BOUND not in problem.__dict__:  # a solver has computed it, as a rule
        bound_of = _worst_bound if problem.aggregate is Aggregate.WORST else _sum_bound
        problem.check_feasible()
        problem.__dict__[BOUND] = bound_of(problem)
    bound: DualBound = problem.__dict__[BOUND]
    return bound


def bound_at(problem: AllocationProblem, price: float, *cap_prices: float) -> float:
    """Return a sum's dual function: a bound, for any prices.

    Parameters
    ----------
    problem : AllocationProblem
    price : float
        Weighted value per byte of capacity (or for the target), at least 0.
    *cap_prices : float
        Likewise for each `GroupCap`, in order; all or none.

    Returns
    -------
    float
        Upper bound on the value, or lower bound on the cost.
    """
    caps = problem.caps if cap_prices else ()
    prices = np.full(problem.n_units, float(price))
    for cap, cap_price in zip(caps, cap_prices, strict=True):
        prices[list(cap.units)] += cap_price
    response = best_response(problem, prices)
    unspent = 0.0
    for cap, cap_price in zip(caps, cap_prices, strict=True):
        floors = problem.cost(np.zeros_like(response), cap.units)
        room = cap.capacity_bytes - floors
        room -= room % problem.lattice_bytes
        unspent += cap_price * (room - (problem.cost(response, cap.units) - floors))
    return _bound_with(problem, price, response, unspent)


def _bound_with(
    problem: AllocationProblem, price: float, response: IntArray, unspent: float = 0.0
) -> float:
    """Return a best response's bound; ``unspent`` prices the caps' unused bytes."""
    value, cost = problem.objective_value(response) + unspent, problem.cost(response)
    if problem.target is None:
        return value + price * (problem.spendable_bytes - cost)
    if price <= 0.0:
        return float(problem.min_cost_bytes)
    relaxed = cost + (problem.lowest_accepted_value - value) / price
    floors = problem.min_cost_bytes
    return float(floors + round_up_to_grain(relaxed - floors, problem.lattice_bytes))


def best_response(
    problem: AllocationProblem,
    price: float | FloatArray,
    *,
    low: IntArray | None = None,
    high: IntArray | None = None,
) -> IntArray:
    """Return each unit's best option at one price of a byte, or at ``(n_units,)`` prices.

    Ties go to the smallest; ``low`` and ``high`` are best options at a higher and a lower price.
    """
    if problem.is_concave and problem.step_bytes is not None:
        return steps_above(problem, price * problem.step_bytes, low=low, high=high)
    prices = np.broadcast_to(price, problem.n_units)
    best = np.zeros(problem.n_units, dtype=np.int64) if low is None else low.copy()
    last = problem.last_options if high is None else high
    buffers = np.empty((2, problem.n_options))
    for unit in np.flatnonzero(best < last).tolist():  # row by row: all may be gigabytes
        between = slice(best[unit], last[unit] + 1)
        worth, paid = buffers[:, : last[unit] + 1 - best[unit]]
        np.multiply(problem.values[unit, between], problem.weights[unit], out=worth)
        np.multiply(problem.costs[unit, between], prices[unit], out=paid)
        best[unit] += np.argmax(np.subtract(worth, paid, out=worth))
    return best


def steps_above(
    problem: AllocationProblem,
    price: float | FloatArray,
    *,
    units: IntArray | None = None,
    low: IntArray | None = None,
    high: IntArray | None = None,
) -> IntArray:
    """Return each unit's number of steps that gain more than the price, ``(n,)``.

    Gains fall along a row, so bisection takes O(n_units log n_options).

    Parameters
    ----------
    problem : AllocationProblem
        Concave, with one cost step.
    price : float, or ndarray of float64, (n,)
        Weighted gain per step.
    units : ndarray of int64, (n,), optional
    low, high : ndarray of int64, (n,), optional
        Limits of the search.
    """
    last = problem.last_options if units is None else problem.last_options[units]

    def too_little(steps: IntArray) -> BoolArray:
        return problem.gains(steps, np.minimum(steps + 1, last), units) <= price

    return first_where(
        too_little, np.zeros_like(last) if low is None else low, last if high is None else high
    )


def next_gain(problem: AllocationProblem, choice: IntArray) -> float:
    """Return a byte's largest gain by a next option within all caps."""
    step = problem.step_bytes
    if step is None:
        return 0.0  # one option each
    gains = problem.gains(choice, np.minimum(choice + 1, problem.last_options))
    for cap in problem.caps:
        if problem.cost(choice, cap.units) + step > cap.capacity_bytes:
            gains[list(cap.units)] = 0.0
    return max(0.0, float(gains.max())) / step


def best_price(
    under: IntArray,
    over: IntArray,
    *,
    gain: Callable[[IntArray, IntArray], tuple[float, int]],
    respond: Callable[[float, IntArray, IntArray], IntArray],
    is_enough: Callable[[IntArray], bool],
) -> tuple[float, IntArray, IntArray]:
    """Return the price where the best response crosses the goal, and the responses around it.

    Choices are lines, the dual function their upper envelope. The next price is the crossing of a
    line below the goal and one beyond it. If no choice is better there, it is the breakpoint.

    Parameters
    ----------
    under, over : ndarray of int64, (n,)
        Best responses below the goal (high price) and beyond it (low price).
    gain : callable
        Value and bytes between two choices.
    respond : callable
        ``respond(price, low, high)``, as `best_response`.
    is_enough : callable
        Whether a choice is beyond the goal.
    """
    price = 0.0
    for _ in range(PRICE_ROUNDS):
        gained, spent = gain(under, over)
        if spent <= 0:
            break
        price = max(0.0, gained / spent)
        middle = respond(price, under, over)
        value, cost = gain(under, middle)
        if value - price * cost <= NOISE * max(1.0, gained):
            break
        under, over = (under, middle) if is_enough(middle) else (middle, over)
    return price, under, over


def _sum_bound(problem: AllocationProblem) -> DualBound:

    def is_enough(choice: IntArray) -> bool:
        if problem.target is None:
            return problem.cost(choice) > problem.spendable_bytes
        return problem.meets_target(problem.objective_value(choice))

    def gain(before: IntArray, after: IntArray) -> tuple[float, int]:
        return math.fsum(problem.gains(before, after)), problem.cost(after) - problem.cost(before)

    def respond(price: float, low: IntArray, high: IntArray) -> IntArray:
        return best_response(problem, price, low=low, high=high)

    floors, free = np.zeros(problem.n_units, dtype=np.int64), best_response(problem, 0.0)
    if is_enough(floors):  # at this price every unit takes its cheapest option
        price, under, over = 2.0 * problem.largest_gain / problem.lattice_bytes, floors, floors
    elif not is_enough(free):
        price, under, over = 0.0, free, free
    else:
        price, under, over = best_price(
            floors, free, gain=gain, respond=respond, is_enough=is_enough
        )
    response = best_response(problem, price, low=under, high=over)
    bound = _bound_with(problem, price, response)
    choice = under if problem.target is None else over
    return DualBound(bound=bound, multiplier=price, choice=choice)


def cheapest_reaching(problem: AllocationProblem, level: float) -> IntArray | None:
    """Return each unit's cheapest option of a weighted value; None if one has none."""
    last = problem.last_options

    def reaches(options: IntArray) -> BoolArray:
        return problem.weights * problem.best_so_far[problem.units, options] >= level

    return first_where(reaches, np.zeros_like(last), last) if reaches(last).all() else None


def _worst_bound(problem: AllocationProblem) -> DualBound:
    """Return the worst unit's exact optimum, with caps if value is maximised.

    A level's cost changes only at options' values. So bisection down to neighbouring numbers ends
    at the largest affordable value. A choice's value, at least its level, is affordable too.
    """
    if problem.target is not None:
        choice = cheapest_reaching(problem, problem.lowest_accepted_value)
        assert choice is not None  # check_feasible: the target can be reached
        return DualBound(bound=float(problem.cost(choice)), multiplier=0.0, choice=choice)
    best = np.zeros(problem.n_units, dtype=np.int64)
    low, high = problem.objective_value(best), problem.max_value
    level = high
    while True:
        within = cheapest_reaching(problem, level)
        if within is not None and problem.fits(within):
            best, low = within, problem.objective_value(within)
        else:
            high = level
        level = low + 0.5 * (high - low)
        if not low < level < high:
            return DualBound(bound=problem.objective_value(best), multiplier=0.0, choice=best)
