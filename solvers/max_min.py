"""PrefixKV: one level of retention for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.errors import InfeasibleError
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    Sense,
    SideConstraint,
    first_where,
)
from kvalloc.problem.solver import Solution
from kvalloc.solvers._coarse import ByParts


class MaxMin(ByParts):
    """Every unit's fewest entries that reach one common level p.

    ``n_l = min{n : R_l(n) >= p}``, with p found by bisection: the highest that fits in the
    capacity, or the lowest that meets the target. A unit that cannot reach p keeps its best option.
    Unspent bytes go, by single options, to the lowest unit that can use them, ties to the lower
    index.

    For the worst unit this is exact, with caps too: a choice of level p gives every unit at least
    ``n_l``, so nothing cheaper reaches p. For the sum it is the published rule without a proof. R
    is then a unit's value as a share of its best (with values below zero, its place between worst
    and best), and weights do not count.

    References
    ----------
    PrefixKV: Adaptive Prefix KV Cache.
    """

    name: ClassVar[str] = "max_min"
    summary: ClassVar[str] = "one retention level for all, by bisection; exact for the worst unit"
    reference: ClassVar[str] = "PrefixKV, binary search of the prefix configuration"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset({GroupCap})
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset({Aggregate.SUM, Aggregate.WORST})

    def solve_whole(self, problem: AllocationProblem, deadline: float) -> Solution:
        """Return the choice of the common level."""
        worst = problem.aggregate is Aggregate.WORST
        levels = problem.worth if worst else _shares(problem)
        filling = _WaterFilling(problem, levels, deadline)
        if problem.sense is Sense.MAX_VALUE:
            picked = filling.fill()
        elif worst:
            picked = filling.lowest_for(problem.lowest_accepted_value)
        else:
            picked = filling.fill(lambda pick: problem.meets_target(problem.objective_value(pick)))
        reached = problem.objective_value(picked)
        if not problem.meets_target(reached):
            raise InfeasibleError(
                f"{'no choice' if worst else 'max_min'} reaches more than {reached:.15g} within "
                f"the side constraints, below the target of {problem.target:.15g}; ask for at most "
                f"that{'' if worst else ', or use ilp'}",
                nearest=reached,
            )
        level = float(filling.levels[problem.units, picked].min())
        detail = f"every unit at level {level:.6g} or above"
        bound = problem.objective(picked) if worst else None
        return Solution.of(problem, picked, bound=bound, detail=detail, deadline=deadline)


def _shares(problem: AllocationProblem) -> FloatArray:
    """Return values as shares of the unit's best, ``(n_units, n_options)``."""
    best = problem.worth.max(axis=1, keepdims=True)
    worst = np.where(problem.exists, problem.worth, np.inf).min(axis=1, keepdims=True)
    if float(worst.min()) >= 0.0:
        worst = np.zeros_like(worst)
    spread = best - worst
    flat = spread <= 0.0
    shares: FloatArray = (problem.worth - worst) / np.where(flat, 1.0, spread)
    return np.where(flat & problem.exists, 1.0, shares)


class _WaterFilling:
    """Highest common level within limits, then single units raised while bytes and time last.

    ``levels``, (n_units, n_options), are -inf in the padding.
    """

    def __init__(self, problem: AllocationProblem, levels: FloatArray, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        # An option that is worth less than a cheaper one is never the first to reach a level.
        self.levels: FloatArray = np.maximum.accumulate(levels, axis=1)
        self.top: FloatArray = self.levels[:, -1]

    def at(self, level: float) -> IntArray:
        """Return each unit's first option that reaches the level, or its best."""
        goal, last = np.minimum(level, self.top), self.problem.last_options

        def reaches(options: IntArray) -> BoolArray:
            return self.levels[self.problem.units, options] >= goal

        return first_where(reaches, np.zeros_like(last), last)

    def fill(self, is_enough: Callable[[IntArray], bool] = lambda picked: False) -> IntArray:
        """Return the pick of the highest level that fits, with units raised."""
        picked = np.zeros(self.problem.n_units, dtype=np.int64)
        active = np.ones(self.problem.n_units, dtype=np.bool_)
        while np.any(active) and not is_enough(picked):
            picked = self._at_highest_level(picked, active, is_enough)
            if time.monotonic() > self.deadline:
                break
            self._step(picked, active, is_enough)
        return picked

    def lowest_for(self, level: float) -> IntArray:
        """Return the cheapest pick at a level, or the highest that fits."""
        picked = self.at(level)
        return picked if self.problem.fits(picked) else self.fill()

    def _at_highest_level(
        self, start: IntArray, active: BoolArray, is_enough: Callable[[IntArray], bool]
    ) -> IntArray:
        """Return the active units at the highest level that fits and is not enough yet."""
        low, high = float(self.levels[:, 0].min()), float(self.top.max())
        level, best = high, start.copy()
        while low < high:
            columns = self.at(level)
            picked = np.where(active, np.maximum(columns, start), start)
            if self.problem.fits(picked) and not is_enough(picked):
                best, reached = picked, self.levels[self.problem.units, columns]
                low = float(reached[reached >= level].min())
            else:
                missed = self.levels[self.problem.units, np.maximum(columns - 1, 0)]
                high = float(missed[missed < level].max())
            level = low + 0.5 * (high - low)
            if not low < level:
                level = high
        return best

    def _step(
        self,
        picked: IntArray,
        active: BoolArray,
        is_enough: Callable[[IntArray], bool],
    ) -> None:
        """Raise each active unit by one better option, or make it inactive."""
        heights = self.levels[self.problem.units, picked]
        moving = np.flatnonzero(active)
        for unit in moving[np.argsort(heights[moving], kind="stable")].tolist():
            before = int(picked[unit])
            after = int(np.searchsorted(self.levels[unit], heights[unit], side="right"))
            if after > self.problem.last_options[unit]:
                active[unit] = False
                continue
            picked[unit] = after
            if not self.problem.fits(picked):
                picked[unit], active[unit] = before, False
            elif is_enough(picked):
                return
