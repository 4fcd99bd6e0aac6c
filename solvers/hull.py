"""Convex hull and marginal greedy."""

from __future__ import annotations

from typing import ClassVar

from kvalloc.accounting import IntArray
from kvalloc.problem import AllocationProblem, SideConstraint
from kvalloc.solvers._prices import Prices, best_of, hull_greedy
from kvalloc.solvers.lagrangian import Lagrangian


class Hull(Lagrangian):
    """Upper convex hull of each unit's curve, then the steepest full segment first.

    A part of the first segment left out would solve the linear relaxation exactly. Its optimum
    equals the Lagrangian dual, and is the bound. See `hull_greedy`.

    References
    ----------
    LU-KV: convex hull of offline utility curves and marginal greedy. Dyer: An O(n) algorithm for
    the multiple-choice knapsack linear program (1984); Zemel (1984); Sinha, Zoltners: The
    multiple-choice knapsack problem (1979).
    """

    name: ClassVar[str] = "hull"
    summary: ClassVar[str] = "convex hull of each curve and marginal greedy, with the LP bound"
    reference: ClassVar[str] = "LU-KV; Dyer 1984; Zemel 1984"
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset()

    def pick(
        self, problem: AllocationProblem, prices: Prices, deadline: float, *known: IntArray
    ) -> IntArray | None:
        """Return the hull greedy's choice, or a better known one."""
        return best_of(problem, hull_greedy(problem), *known)
