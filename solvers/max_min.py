"""PrefixKV: one level of retention for all, the highest that the bytes allow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate, AllocationProblem, Sense, SideConstraint, first_where
from kvalloc.problem.constraints import GroupCap, SameBudget
from kvalloc.problem.solver import Solution, Solver
from kvalloc.solvers._choices import Choices

MOST_LEVELS = 1_000_000
"""Options up to which all levels are sorted once, instead of halving towards the right one."""

HALVINGS = 128
"""Halvings of the level; float64 rarely has digits for more, and what is left is looked up."""


class MaxMin(Solver):
    """Every unit keeps its fewest entries that reach one common level p.

    ``n_l = min{n : R_l(n) >= p}``, with p found by bisection: the highest that fits in the
    capacity, or the lowest that meets the target. A unit that cannot reach p keeps its best
    option. Bytes that are left go, one better option at a time, to the lowest unit that can use
    them (the lower index among equals); entries that are worth nothing stay unspent.

    Where the problem asks for the worst unit this is exact: whatever has a worst unit of level p
    gives every unit at least ``n_l``, so nothing cheaper reaches p. It stays exact with side
    capacities and equal budgets, which are checked on the cheapest choice of a level. Where the
    problem asks for the sum it is the published rule and proves nothing: R is then each unit's
    value as a share of its best (or, where values are below zero, its place between worst and
    best), whatever its weight.

    References
    ----------
    PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need for
    Efficient Generation: binary search of the prefix configuration.
    """

    name: ClassVar[str] = "max_min"
    summary: ClassVar[str] = "one retention level for all, by bisection; exact for the worst unit"
    reference: ClassVar[str] = "PrefixKV, binary search of the prefix configuration"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset({GroupCap, SameBudget})
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset({Aggregate.SUM, Aggregate.WORST})

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """The common level; see the class. The time limit is never needed."""
        worst = problem.aggregate is Aggregate.WORST
        # Capacity or target are this file's business; the rows are the same for both.
        capacity = problem.capacity_bytes
        rows = Choices.of(
            problem.with_capacity(problem.max_cost_bytes if capacity is None else capacity)
        )
        filling = _Filling(rows, rows.worth if worst else _shares(rows))
        if problem.sense is Sense.MAX_VALUE:
            picked = filling.fill()
        elif worst:
            picked = filling.lowest_for(problem.lowest_accepted_value)
        else:
            picked = filling.fewest_meeting(
                lambda pick: problem.meets_target(problem.objective_value(rows.expand(pick)))
            )
        choice = rows.expand(picked)
        if not problem.meets_target(problem.objective_value(choice)):
            reached = problem.objective_value(choice)
            raise InfeasibleError(
                f"{'no choice' if worst else 'max_min'} reaches more than {reached:.6g} within "
                f"the side constraints, below the target of {problem.target:g}; ask for at most "
                f"that{'' if worst else ', or use ilp'}",
                nearest=reached,
            )
        level = float(filling.levels[rows.index, picked].min())
        detail = f"every unit at level {level:.6g} or above"
        bound = problem.objective(choice) if worst else None
        return Solution.of(problem, choice, bound=bound, detail=detail)


def _shares(rows: Choices) -> FloatArray:
    """Each option's worth as a share of its row's best, 0..1, ``(n_rows, n_columns)``."""
    best = rows.worth.max(axis=1, keepdims=True)
    least = np.where(rows.exists, rows.worth, np.inf).min(axis=1, keepdims=True)
    if float(least.min()) >= 0.0:
        least = np.zeros_like(least)
    spread = best - least
    flat = spread <= 0.0
    shares: FloatArray = (rows.worth - least) / np.where(flat, 1.0, spread)
    return np.where(flat & rows.exists, 1.0, shares)


class _Filling:
    """Rows that rise together, like water, until something is full.

    Parameters
    ----------
    rows : Choices
    levels : ndarray of float64, (n_rows, n_columns)
        What is levelled; -inf where there is no option.
    """

    def __init__(self, rows: Choices, levels: FloatArray) -> None:
        self.rows = rows
        # An option that is worth less than a cheaper one is never the first to reach a level.
        self.levels: FloatArray = np.maximum.accumulate(levels, axis=1)
        self.top: FloatArray = self.levels[:, -1]

    def at(self, level: float) -> IntArray:
        """First column of each row that reaches the level, or its best, ``(n_rows,)``."""
        wanted = np.minimum(level, self.top)
        low = np.zeros(self.rows.n_rows, dtype=np.int64)
        return first_where(
            lambda columns: self.levels[self.rows.index, columns] >= wanted,
            low,
            low + self.rows.n_columns - 1,
        )

    def fits(self, picked: IntArray) -> bool:
        """Whether capacity and caps hold."""
        rows = self.rows
        if rows.capacity_bytes is not None and rows.cost(picked) > rows.capacity_bytes:
            return False
        return rows.satisfies_caps(picked)

    def fill(self, enough: Callable[[IntArray], bool] | None = None) -> IntArray:
        """The highest level that fits, then the rows that still can rise, until none can.

        With ``enough`` it stops as soon as that holds.
        """
        picked = self.rows.floors.copy()
        active = np.ones(self.rows.n_rows, dtype=np.bool_)
        while np.any(active):
            frozen = picked

            def rise(level: float, still: IntArray = frozen) -> IntArray:
                return np.where(active, np.maximum(self.at(level), still), still)

            low, high = self._highest(rise, self.fits)
            picked = rise(low)
            if high is None or (enough is not None and enough(picked)):
                break
            if not self._step(picked, active, enough):
                break
        return picked

    def lowest_for(self, level: float) -> IntArray:
        """The cheapest pick at a level, or the highest that fits where it does not."""
        picked = self.at(level)
        return picked if self.fits(picked) else self.fill()

    def fewest_meeting(self, enough: Callable[[IntArray], bool]) -> IntArray:
        """The lowest level that is enough, its last rows raised one after the other."""
        if enough(self.rows.floors):
            return self.rows.floors
        low, high = self._highest(self.at, lambda picked: not enough(picked))
        if high is None or not self.fits(self.at(high)):
            return self.fill(enough)
        picked, ceiling = self.at(low), self.at(high)
        order = np.flatnonzero(ceiling > picked)
        for row in order[np.argsort(self.levels[order, picked[order]], kind="stable")]:
            picked[row] = ceiling[row]
            if enough(picked):
                break
        return picked

    def _highest(
        self, pick: Callable[[float], IntArray], accepted: Callable[[IntArray], bool]
    ) -> tuple[float, float | None]:
        """The highest level accepted and the lowest that is not; None when all are.

        Picks grow with the level, and the lowest level of all is taken to be accepted.
        """
        low, high = float(self.levels[:, 0].min()), float(self.top.max())
        if accepted(pick(high)):
            return high, None
        candidates = self._sorted_levels
        if candidates is None:
            for _ in range(HALVINGS):
                middle = low + 0.5 * (high - low)
                if not low < middle < high:
                    return low, high
                low, high = (middle, high) if accepted(pick(middle)) else (low, middle)
            candidates = np.unique(self.levels[(self.levels > low) & (self.levels < high)])
        first, last = np.searchsorted(candidates, (low, high)).tolist()
        between = [low, *candidates[first:last].tolist(), high]  # low is accepted, high is not
        inner = range(1, len(between) - 1)
        last = 1 + bisect_left(inner, True, key=lambda at: not accepted(pick(between[at])))
        return between[last - 1], between[last]

    @cached_property
    def _sorted_levels(self) -> FloatArray | None:
        """All levels, or None where there are too many."""
        return np.unique(self.levels) if self.levels.size <= MOST_LEVELS else None

    def _step(
        self,
        picked: IntArray,
        active: BoolArray,
        enough: Callable[[IntArray], bool] | None,
    ) -> bool:
        """Raise each active row by one better option where it fits; the others become inactive.

        Returns False when nothing is left to do.
        """
        heights = self.levels[self.rows.index, picked]
        moving = np.flatnonzero(active)
        for row in moving[np.argsort(heights[moving], kind="stable")].tolist():
            before = int(picked[row])
            after = int(np.searchsorted(self.levels[row], heights[row], side="right"))
            if after >= self.rows.n_columns:
                active[row] = False
                continue
            picked[row] = after
            if not self.fits(picked):
                picked[row], active[row] = before, False
            elif enough is not None and enough(picked):
                return False
        return True
