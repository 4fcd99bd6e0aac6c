"""A problem as rows of options, one a unit, with weighted values and what repairs ask of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.accounting.rounding import round_up_to_grain
from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap, Sense

CAP_DIGITS = np.iinfo(np.int64).max // 4
"""Cost of an option that does not exist: above any capacity, far from overflow."""


@dataclass(frozen=True, kw_only=True)
class Cap:
    """A capacity of some rows beside the main one.

    Attributes
    ----------
    name : str
        How messages call it.
    rows : ndarray of int64, (n_members,)
        Rows that draw on it.
    costs : ndarray of int64, (n_members, n_columns)
        Bytes that each of their options draws.
    capacity_bytes : int
        Most bytes in all.
    """

    name: str
    rows: IntArray
    costs: IntArray
    capacity_bytes: int

    def load(self, picked: IntArray) -> int:
        """Return the bytes drawn by a pick of one column per row."""
        return int(self.costs[np.arange(self.rows.size), picked[self.rows]].sum())


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Rows of options, one for each unit.

    Attributes
    ----------
    problem : AllocationProblem
        Where they come from.
    worth : ndarray of float64, (n_rows, n_columns)
        Weighted value of each option; -inf where a row has no such option.
    costs, tokens : ndarray of int64, (n_rows, n_columns)
        Bytes and budget of each option, rising along a row.
    caps : tuple of Cap
        Side capacities.
    minimise : bool
        Minimise the cost for ``target``, or maximise the worth within ``capacity_bytes``.
    capacity_bytes : int or None
        Bytes that can be spent.
    target : float or None
        Least worth that is accepted.
    grain : int
        Every cost is the cheapest one plus a multiple of so many bytes.
    """

    problem: AllocationProblem
    worth: FloatArray
    costs: IntArray
    tokens: IntArray
    caps: tuple[Cap, ...]
    minimise: bool
    capacity_bytes: int | None
    target: float | None
    grain: int

    @classmethod
    def of(cls, problem: AllocationProblem) -> Choices:
        """Return the rows of a problem.

        Raises
        ------
        InfeasibleError
            If the floors are beyond the capacity or a cap, or the target beyond the best options.
        """
        worth, costs = problem.weights[:, None] * problem.values, problem.costs
        if not np.all(problem.exists):
            worth = np.where(problem.exists, worth, -np.inf)
            costs = np.where(problem.exists, costs, CAP_DIGITS // problem.n_units)
        choices = cls(
            problem=problem,
            worth=worth,
            costs=costs,
            tokens=problem.tokens,
            caps=tuple(_cap(problem, cap) for cap in problem.caps),
            minimise=problem.sense is Sense.MIN_COST,
            capacity_bytes=problem.capacity_bytes,
            target=None if problem.target is None else problem.lowest_accepted_value,
            grain=problem.lattice_bytes,
        )
        choices.check_feasible()
        return choices

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return int(self.worth.shape[0])

    @property
    def n_columns(self) -> int:
        """Number of option columns."""
        return int(self.worth.shape[1])

    @cached_property
    def index(self) -> IntArray:
        """``arange(n_rows)``."""
        return np.arange(self.n_rows, dtype=np.int64)

    @cached_property
    def exists(self) -> BoolArray:
        """Which options exist, ``(n_rows, n_columns)``."""
        exists: BoolArray = np.isfinite(self.worth)
        return exists

    @cached_property
    def floors(self) -> IntArray:
        """Column of each row's cheapest option, ``(n_rows,)``."""
        floors: IntArray = np.argmax(self.exists, axis=1).astype(np.int64)
        return floors

    @cached_property
    def floor_bytes(self) -> int:
        """Cost of the cheapest pick."""
        return self.cost(self.floors)

    @cached_property
    def budget_bytes(self) -> int:
        """The capacity, rounded down to what a pick can really cost."""
        if self.capacity_bytes is None:
            raise ValueError("these choices have a target, not a capacity")
        most = int(np.where(self.exists, self.costs, 0).max(axis=1).sum())
        room = min(self.capacity_bytes, most) - self.floor_bytes
        return self.floor_bytes + room // self.grain * self.grain

    @property
    def target_value(self) -> float:
        """The target, which has to be there."""
        if self.target is None:
            raise ValueError("these choices have a capacity, not a target")
        return self.target

    def cost(self, picked: IntArray) -> int:
        """Return the bytes of a pick."""
        return int(self.costs[self.index, picked].sum())

    def value(self, picked: IntArray) -> float:
        """Worth of a pick, summed without loss."""
        return math.fsum(self.worth[self.index, picked])

    def objective(self, picked: IntArray) -> float:
        """Return what is optimised: the worth, or the cost in bytes."""
        return float(self.cost(picked)) if self.minimise else self.value(picked)

    def satisfies(self, picked: IntArray) -> bool:
        """Whether a pick keeps the capacity, the target and the caps."""
        if not bool(np.all(self.exists[self.index, picked])):
            return False
        if self.capacity_bytes is not None and self.cost(picked) > self.capacity_bytes:
            return False
        if self.target is not None and self.value(picked) < self.target:
            return False
        return self.satisfies_caps(picked)

    def satisfies_caps(self, picked: IntArray) -> bool:
        """Whether a pick keeps the caps."""
        return all(cap.load(picked) <= cap.capacity_bytes for cap in self.caps)

    def better(self, first: float, second: float) -> bool:
        """Whether the first objective beats the second."""
        return first < second if self.minimise else first > second

    def rounded_up(self, relaxed_bytes: float) -> float:
        """Return the smallest cost of a pick that is not below a relaxed one."""
        floor = self.floor_bytes
        return float(floor + round_up_to_grain(relaxed_bytes - floor, self.grain))

    def tighter(self, *bounds: float) -> float:
        """Return the tightest of some bounds."""
        return max(bounds) if self.minimise else min(bounds)

    def looser(self, *bounds: float) -> float:
        """Return the loosest of some bounds."""
        return min(bounds) if self.minimise else max(bounds)

    def n_levels(self, picked: IntArray) -> int:
        """Return the number of different budgets in a pick."""
        return int(np.unique(self.tokens[self.index, picked]).size)

    def with_capacity(self, capacity_bytes: int) -> Choices:
        """Return the same rows with the most worth within a capacity as the goal."""
        return dataclasses.replace(self, minimise=False, capacity_bytes=capacity_bytes, target=None)

    def restricted(self, allowed: BoolArray) -> Choices:
        """Return the same rows with only the allowed options.

        Raises
        ------
        InfeasibleError
            If nothing is left that can work.
        """
        less = dataclasses.replace(self, worth=np.where(allowed, self.worth, -np.inf))
        less.check_feasible()
        return less

    def cap_rows(self, kept: BoolArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield for each cap its places among the kept options, and the bytes that those draw."""
        place = np.full(self.worth.shape, -1, dtype=np.int64)
        place[kept] = np.arange(int(kept.sum()))
        for cap in self.caps:
            where = place[cap.rows]
            yield where[where >= 0], cap.costs[where >= 0]

    def check_feasible(self) -> None:
        """Raise when capacity, target or one cap alone cannot be met."""
        if not np.all(self.exists.any(axis=1)):
            raise InfeasibleError("a unit has none of the options that are left")
        if self.capacity_bytes is not None and self.floor_bytes > self.capacity_bytes:
            raise InfeasibleError(
                f"a capacity of {self.capacity_bytes:,} bytes is below the {self.floor_bytes:,} "
                "bytes of the smallest budgets; ask for at least that",
                nearest=self.floor_bytes,
            )
        bests = self.worth.max(axis=1)
        worst = self.problem.aggregate is Aggregate.WORST
        best = float(bests.min()) if worst else math.fsum(bests)
        if self.target is not None and best < self.target:
            raise InfeasibleError(
                f"a target of {self.problem.target:.15g} cannot be met with these options: the "
                f"most is {best:.15g}; ask for at most that",
                nearest=best,
            )
        for cap in self.caps:
            floors = cap.load(self.floors)
            if floors > cap.capacity_bytes:
                raise InfeasibleError(
                    f"no choice can work: the cap of {cap.name}, {cap.capacity_bytes:,} bytes, is "
                    f"below its floors of {floors:,} bytes; raise it or lower the floors"
                )


def _cap(problem: AllocationProblem, cap: GroupCap) -> Cap:
    """Return a cap with what each option of its units draws."""
    units = np.asarray(cap.units, dtype=np.int64)
    costs = np.where(problem.exists[units], problem.costs[units], CAP_DIGITS // problem.n_units)
    return Cap(name=cap.name, rows=units, costs=costs, capacity_bytes=cap.capacity_bytes)
