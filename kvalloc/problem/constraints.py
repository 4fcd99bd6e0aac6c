"""Side constraints of engines beyond one capacity: caps, equal budgets, few sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, SolverError
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


def caps_of(problem: AllocationProblem) -> list[GroupCap]:
    """Return the caps among the side constraints, in their order."""
    return [one for one in problem.constraints if isinstance(one, GroupCap)]


MODEL = "model"
"""The root of a tree of caps."""

EVERY_KIND: frozenset[type[SideConstraint]] = frozenset({GroupCap, SameBudget, MaxDistinct})
"""All kinds of side constraints that kvalloc itself has."""


def cap_tree(caps: Sequence[GroupCap]) -> Any:
    """Return the tree of some caps: each hangs on the smallest cap around it.

    Returns
    -------
    networkx.DiGraph
        From `MODEL` through each cap, named by its place, outermost first.

    Raises
    ------
    SolverError
        If two caps overlap and neither is inside the other; names them.
    """
    import networkx as nx

    inner: dict[int, int | str] = {}  # the innermost cap of each unit so far
    tree = nx.DiGraph()
    tree.add_node(MODEL)
    for place in sorted(range(len(caps)), key=lambda at: -len(caps[at].units)):
        cap, around = caps[place], {inner.get(unit, MODEL) for unit in caps[place].units}
        if len(around) > 1:
            others = (caps[at] for at in around if isinstance(at, int))
            other = next(one for one in others if not {*cap.units} <= {*one.units})
            raise SolverError(
                f"flow needs caps that nest, and {other.name} and {cap.name} overlap; use "
                "lagrangian or ilp"
            )
        tree.add_edges_from((outer, place) for outer in around)
        inner |= dict.fromkeys(cap.units, place)
    return tree
