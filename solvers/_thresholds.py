"""Largest gains of concave units, found by a threshold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.problem import AllocationProblem, Sense, steps_above

SORTED_CANDIDATES = 4096
"""Number of steps between two thresholds below which they are sorted."""

THRESHOLD_RESOLUTION = 1e-20
"""Gains closer than this are equal: a billion of them do not add up to a rounding error."""


def largest_gains(
    problem: AllocationProblem,
    steps: int,
    units: IntArray,
    limits: IntArray,
    floors: IntArray | None = None,
) -> IntArray:
    """Return each unit's number of steps among the ``steps`` largest gains, ``(n,)``.

    The problem is concave, with one cost step; ties go to the lower unit. Each unit takes at most
    ``limits`` and at least ``floors``, no more than ``steps`` in all.
    """
    if int(limits.sum()) <= steps:
        return limits.copy()

    def fits(choice: IntArray) -> bool:
        return int(choice.sum()) <= steps

    floors = np.zeros_like(limits) if floors is None else floors
    inside, order = _bracket(problem, fits, units, limits, floors)
    return _add(inside, order[: steps - int(inside.sum())])


def greedy_choice(problem: AllocationProblem, limits: IntArray) -> IntArray:
    """Take the largest gains within limits, up to the capacity or the target."""
    if problem.sense is Sense.MAX_VALUE:
        return largest_gains(problem, problem.spendable_steps, problem.units, limits)
    return _fewest_gains(problem, limits)


def _fewest_gains(problem: AllocationProblem, limits: IntArray) -> IntArray:

    def falls_short(choice: IntArray) -> bool:
        return not problem.meets_target(problem.objective_value(choice))

    floors = np.zeros_like(limits)
    if not falls_short(floors):
        return floors
    inside, order = _bracket(problem, falls_short, problem.units, limits, floors)
    fewer = range(1, order.size)
    enough = bisect_left(fewer, True, key=lambda n: not falls_short(_add(inside, order[:n])))
    return _add(inside, order[: 1 + enough])


def _bracket(
    problem: AllocationProblem,
    accepted: Callable[[IntArray], bool],
    units: IntArray,
    limits: IntArray,
    floors: IntArray,
) -> tuple[IntArray, IntArray]:
    """Return steps surely taken, ``(n,)``, and units of undecided ones, ``(n_candidates,)``.

    ``accepted`` holds for a choice below the target, and for fewer steps. Undecided steps go by
    falling gain, ties by lower index.
    """
    high = 1.0 + problem.largest_gain
    low = -1.0
    inside, outside = floors, limits
    # Gains that are exactly zero are common (entries without any score): look there first.
    middle = 0.0
    while low < middle < high:
        choice = steps_above(problem, middle, units=units, low=inside, high=outside)
        if accepted(choice):
            high, inside = middle, choice
        else:
            low, outside = middle, choice
        counts = outside - inside
        if int(counts.sum()) <= SORTED_CANDIDATES:
            places = np.repeat(np.arange(units.size), counts)
            steps = np.arange(places.size) + np.repeat(
                inside - (np.cumsum(counts) - counts), counts
            )
            gains = problem.gains(steps, steps + 1, units[places])
            return inside, places[np.argsort(-gains, kind="stable")]
        if high - low <= THRESHOLD_RESOLUTION:
            break
        # Gains span many orders of magnitude: halve the steps that are left, not the interval.
        middle = _median_gain(problem, units, inside, counts)
        if not low < middle < high:  # many equal gains, or rounding
            middle = 0.5 * (low + high)
    return inside, np.repeat(np.arange(units.size), outside - inside)


def _median_gain(
    problem: AllocationProblem, units: IntArray, inside: IntArray, counts: IntArray
) -> float:
    """Return a gain with a quarter or more of the undecided steps on either side, ties on both.

    It is the median of the units' middle gains, weighted by undecided steps (Frederickson and
    Johnson, 1982: selection in sorted rows).
    """
    places = np.flatnonzero(counts)
    left = counts[places]
    steps = inside[places] + (left >> 1)
    gains = problem.gains(steps, steps + 1, units[places])
    order = np.argsort(gains)
    upto = np.cumsum(left[order])
    return float(gains[order[np.searchsorted(upto, upto[-1] / 2)]])


def _add(inside: IntArray, places: IntArray) -> IntArray:
    return inside + np.bincount(places, minlength=inside.size)
