"""Lagrangian relaxation with repair: near-optimal, with a bound."""

from __future__ import annotations

from typing import ClassVar

from kvalloc.accounting import IntArray
from kvalloc.errors import SolverError
from kvalloc.problem import AllocationProblem, GroupCap, SideConstraint, Solution
from kvalloc.solvers._coarse import ByParts
from kvalloc.solvers._prices import Prices, best_known, best_prices, rule_choices


class Lagrangian(ByParts):
    """Multiple-choice knapsack by its Lagrangian dual, then repair.

    With a price on every byte each unit chooses alone, ``argmax_k v_uk - price * c_uk``; the sum
    bounds the optimum. The best price is found by a secant search over the breakpoints of the dual
    function. The choice on the feasible side of it is then repaired: unspent capacity is used, or
    bytes that the target does not need are given back. That takes the best change of one unit, then
    the best exchange between two, until none improves. Only options that the bound leaves open are
    tried.

    Caps on groups of units each get their own price, from the dual of the linear relaxation.
    Optimal is claimed only if the bound meets the objective.

    References
    ----------
    Fisher: The Lagrangian relaxation method for solving integer programming problems (1981).
    Geoffrion: Lagrangean relaxation for integer programming (1974). Kellerer, Pferschy, Pisinger:
    Knapsack Problems (2004), chapter 11.
    """

    name: ClassVar[str] = "lagrangian"
    summary: ClassVar[str] = "best price of a byte, then repair; any values and costs, with a bound"
    reference: ClassVar[str] = "Fisher 1981; Kellerer et al. 2004, ch. 11"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset({GroupCap})

    def solve_whole(self, problem: AllocationProblem, deadline: float) -> Solution:
        """Return a near-optimal choice and the dual bound; see the base class."""
        prices = best_prices(problem, deadline)
        choice = self.pick(problem, prices, deadline, *rule_choices(problem))
        if choice is None:
            raise SolverError(
                f"{self.name} found no choice that meets the target, and cannot say that there is "
                "none; use ilp"
            )
        return Solution.of(
            problem,
            choice,
            bound=prices.bound,
            prices=(prices.per_byte, *prices.per_cap),
            detail=f"price {prices.per_byte:.6g} of value per byte",
            deadline=deadline,
        )

    def pick(
        self, problem: AllocationProblem, prices: Prices, deadline: float, *known: IntArray
    ) -> IntArray | None:
        """Return the best choice that repair reaches, or a known one; None if there is none."""
        return best_known(problem, prices, deadline, *known)
