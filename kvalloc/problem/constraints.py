"""Side constraints of engines beside capacities: few different budgets; and the tree of caps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, SolverError
from kvalloc.problem.arrays import AllocationProblem, GroupCap, SideConstraint


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


MODEL = "model"
"""The root of a tree of caps."""

EVERY_KIND: frozenset[type[SideConstraint]] = frozenset({GroupCap, MaxDistinct})
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
            outer = (caps[at] for at in around if isinstance(at, int))
            other = next(one for one in outer if not {*cap.units} <= {*one.units})
            raise SolverError(
                f"flow needs caps that nest, and {other.name} and {cap.name} overlap; use "
                "lagrangian or ilp"
            )
        tree.add_edges_from((outer, place) for outer in around)
        inner |= dict.fromkeys(cap.units, place)
    return tree
