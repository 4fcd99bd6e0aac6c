"""Side constraints of engines beyond one capacity: caps, equal budgets, few sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError
from kvalloc.problem.arrays import AllocationProblem, SideConstraint


@dataclass(frozen=True, kw_only=True)
class GroupCap(SideConstraint):
    """A capacity of its own for some units: a layer, a rank, a device.

    Caps may nest (model, rank, layer) or overlap (several resources at once).

    Attributes
    ----------
    name : str
        How messages call it, such as ``"device 0"``.
    units : tuple of int
        Unit indices.
    capacity_bytes : int
        Most bytes those units may take together.
    """

    keyword: ClassVar[str] = "cap"

    name: str
    units: tuple[int, ...]
    capacity_bytes: int

    def __post_init__(self) -> None:
        if len(self.units) != len(set(self.units)):
            raise InputError(f"the cap of {self.name} names a unit twice; name it once")

    def stated(self) -> tuple[str, str]:
        """See the base class."""
        return f"cap of {self.name}", f"{self.capacity_bytes:,} bytes"

    def members(self) -> tuple[int, ...]:
        """See the base class."""
        return self.units

    def fault(self, problem: AllocationProblem, choice: IntArray) -> str | None:
        """See the base class."""
        units = np.asarray(self.units, dtype=np.int64)
        cost = int(problem.costs[units, choice[units]].sum())
        if cost > self.capacity_bytes:
            return f"{self.name} takes {cost:,} bytes of {self.capacity_bytes:,}"
        return None

    def floor_fault(self, problem: AllocationProblem) -> str | None:
        """See the base class."""
        floors = int(problem.costs[np.asarray(self.units, dtype=np.int64), 0].sum())
        if floors > self.capacity_bytes:
            return (
                f"the cap of {self.name}, {self.capacity_bytes:,} bytes, is below its floors of "
                f"{floors:,} bytes"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class SameBudget(SideConstraint):
    """The units of each group take the same number of tokens.

    Attributes
    ----------
    groups : tuple of tuple of int
        Disjoint groups of unit indices, such as the KV heads of a layer, or adjacent layers that
        share one set of kept indices (MPCache, Sec. 4.3).
    """

    keyword: ClassVar[str] = "equal_heads"
    compares_tokens: ClassVar[bool] = True

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        members = self.members()
        if len(members) != len(set(members)):
            raise InputError("groups with the same budget must not share units")

    def stated(self) -> tuple[str, str]:
        """See the base class."""
        return "same budgets", f"in each of {len(self.groups)} groups"

    def members(self) -> tuple[int, ...]:
        """See the base class."""
        return tuple(unit for group in self.groups for unit in group)

    def fault(self, problem: AllocationProblem, choice: IntArray) -> str | None:
        """See the base class."""
        tokens = problem.chosen_tokens(choice)
        for group in self.groups:
            chosen = {int(tokens[unit]) for unit in group}
            if len(chosen) > 1:
                return f"units {list(group)} must share one budget and have {sorted(chosen)}"
        return None


@dataclass(frozen=True, kw_only=True)
class MaxDistinct(SideConstraint):
    """A limit on the number of different budgets in the whole model.

    Attributes
    ----------
    most : int
        Number of different budgets in tokens, at least 1.
    """

    keyword: ClassVar[str] = "max_distinct"
    compares_tokens: ClassVar[bool] = True

    most: int

    def __post_init__(self) -> None:
        if self.most < 1:
            raise InputError(f"at most {self.most} different budgets is not possible; ask for 1")

    def stated(self) -> tuple[str, str]:
        """See the base class."""
        return "different budgets", f"at most {self.most}"

    def fault(self, problem: AllocationProblem, choice: IntArray) -> str | None:
        """See the base class."""
        distinct = np.unique(problem.chosen_tokens(choice)).size
        if distinct > self.most:
            return f"{distinct} different budgets, at most {self.most} are allowed"
        return None


EVERY_KIND: frozenset[type[SideConstraint]] = frozenset({GroupCap, SameBudget, MaxDistinct})
"""All kinds of side constraints that kvalloc itself has."""
