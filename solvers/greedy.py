"""The exact solver for concave problems: one threshold on the marginal gain."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.problem import AllocationProblem, Sense, Solution, Solver, steps_above

SORTED_CANDIDATES = 4096
"""Once so few steps are left between two thresholds, they are sorted."""

THRESHOLD_RESOLUTION = 1e-20
"""Gains closer than this are equal: a billion of them do not add up to a rounding error."""


class Greedy(Solver):
    """Give each next step to the unit that gains most from it, until the target is met.

    With concave values and one cost step for all, the steps that greedy takes are the M largest
    gains of all units, so taking them one by one (a heap) and finding the M-th largest gain (a
    partition) end at the same budgets. The gains of a unit fall along its curve, so even the
    partition is not needed: the threshold is found by bisection over the gains that are left, with
    a binary search in every curve at once, and the gains are never formed.

    Exactly optimal for XKV's Eq. 17 (most value within a capacity) and Eq. 18 (fewest bytes for a
    target value), floors included: they are the first option of every unit. Ties go to the lower
    unit.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction, Algorithm 1, Eq. 17 and Eq. 18.
    """

    name: ClassVar[str] = "greedy"
    summary: ClassVar[str] = "largest marginal gain first, by threshold; exact on concave curves"
    reference: ClassVar[str] = "XKV, Algorithm 1, Eq. 17 and 18"
    takes_bits: ClassVar[bool] = True

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """True for concave values with one cost step; else what to use instead."""
        refusal = super().can_solve(problem)
        if refusal is not True:
            return refusal
        if problem.n_options > 1 and problem.step_bytes is None:
            return "greedy needs one cost step for all units; use ilp, which takes unequal costs"
        if not problem.is_concave:
            return "greedy is only exact on concave curves and these are not; use ilp"
        return True

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """The optimum; see the class. The time limit is never needed."""
        if problem.n_options == 1:
            choice = np.zeros(problem.n_units, dtype=np.int64)
        elif problem.sense is Sense.MAX_VALUE:
            choice = _most_value(problem)
        else:
            choice = _fewest_steps(problem)
        optimum = problem.objective(choice)
        return Solution.of(problem, choice, bound=optimum, detail="threshold on the marginal gain")


def _most_value(problem: AllocationProblem) -> IntArray:
    """The M largest gains, M being the steps that fit in the capacity."""
    steps = problem.spendable_steps
    if steps >= int(problem.last_options.sum()):
        return problem.last_options.copy()

    def fits(choice: IntArray) -> bool:
        return int(choice.sum()) <= steps

    inside, order = _bracket(problem, fits)
    return _add(inside, order[: steps - int(inside.sum())])


def _fewest_steps(problem: AllocationProblem) -> IntArray:
    """The largest gains until their sum reaches the target."""

    def falls_short(choice: IntArray) -> bool:
        return not problem.meets_target(problem.objective_value(choice))

    floors = np.zeros(problem.n_units, dtype=np.int64)
    if not falls_short(floors):
        return floors
    inside, order = _bracket(problem, falls_short)
    fewer = range(1, order.size)
    enough = bisect_left(fewer, True, key=lambda n: not falls_short(_add(inside, order[:n])))
    return _add(inside, order[: 1 + enough])


def _bracket(
    problem: AllocationProblem, accepted: Callable[[IntArray], bool]
) -> tuple[IntArray, IntArray]:
    """Steps that are surely taken, and the few around the threshold in the order of their gain.

    Parameters
    ----------
    problem : AllocationProblem
    accepted : callable
        Whether a choice is still on the near side of the target; fewer steps are, more are not.

    Returns
    -------
    inside : ndarray of int64, (n_units,)
        Steps of each unit whose gains are above the threshold.
    order : ndarray of int64, (n_candidates,)
        Unit of each step that is left to decide, largest gain first, ties by lower unit.
    """
    dear = 1.0 + problem.largest_gain
    cheap = -1.0
    inside = np.zeros(problem.n_units, dtype=np.int64)
    outside = problem.last_options
    # Gains that are exactly zero are common (entries without any score): look there first.
    middle = 0.0
    while cheap < middle < dear:
        choice = steps_above(problem, middle, low=inside, high=outside)
        if accepted(choice):
            dear, inside = middle, choice
        else:
            cheap, outside = middle, choice
        if int((outside - inside).sum()) <= SORTED_CANDIDATES:
            return inside, _by_gain(problem, inside, outside)
        if dear - cheap <= THRESHOLD_RESOLUTION:
            break
        # Gains span many orders of magnitude: halve the steps that are left, not the interval.
        middle = _median_gain(problem, inside, outside)
        if not cheap < middle < dear:  # many equal gains, or rounding
            middle = 0.5 * (cheap + dear)
    return inside, np.repeat(np.arange(problem.n_units), outside - inside)


def _median_gain(problem: AllocationProblem, inside: IntArray, outside: IntArray) -> float:
    """A gain with at least a quarter of the steps left on either side, equal ones on both.

    The median of the units' middle gains, each counted as often as the unit has steps left
    (Frederickson and Johnson, 1982: selection in sorted rows).
    """
    units = np.flatnonzero(outside > inside)
    counts = (outside - inside)[units]
    steps = inside[units] + (counts >> 1)
    gains = problem.weights[units] * (
        problem.values[units, steps + 1] - problem.values[units, steps]
    )
    order = np.argsort(gains)
    upto = np.cumsum(counts[order])
    return float(gains[order[np.searchsorted(upto, upto[-1] / 2)]])


def _by_gain(problem: AllocationProblem, inside: IntArray, outside: IntArray) -> IntArray:
    counts = outside - inside
    units = np.repeat(np.arange(problem.n_units), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    steps = inside[units] + np.arange(units.size) - first
    gains = problem.values[units, steps + 1] - problem.values[units, steps]
    return units[np.argsort(-problem.weights[units] * gains, kind="stable")]


def _add(inside: IntArray, units: IntArray) -> IntArray:
    return inside + np.bincount(units, minlength=inside.size)
