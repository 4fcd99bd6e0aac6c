"""Lagrangian relaxation with repair: near-optimal, with a bound to show for it."""

from __future__ import annotations

from typing import ClassVar

from kvalloc.accounting import IntArray
from kvalloc.errors import SolverError
from kvalloc.problem import AllocationProblem, GroupCap, SideConstraint, Solution
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._coarse import ByParts
from kvalloc.solvers._prices import Prices, best_prices
from kvalloc.solvers._repair import best_known, rule_picks


class Lagrangian(ByParts):
    """Multiple-choice knapsack by its Lagrangian dual, then repair.

    With a price on every byte each unit chooses on its own, ``argmax_k v_uk - price * c_uk``; the
    sum bounds the optimum. The best price is found by a secant search over the breakpoints of the
    dual function. The choice on the feasible side of it is then repaired: what is left of the
    capacity is spent (or what the target does not need is given back) by the best change of one
    unit, then by the best exchange between two, until none improves. Only options that the bound
    leaves open are looked at.

    Values may be of any shape and costs unequal. Caps on groups of units each get a price of their
    own, from the dual of the linear relaxation. Optimal is claimed only when the bound meets the
    objective.

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
        choices = Choices.of(problem)
        prices, bound, detail = self.prices_of(problem, choices, deadline)
        picked = self.pick(choices, prices, deadline, *rule_picks(choices))
        if picked is None:
            raise SolverError(
                f"{self.name} found no choice that meets the target, and cannot say that there is "
                "none; use ilp"
            )
        return Solution.of(
            problem,
            picked,
            bound=bound,
            prices=(prices.per_byte, *prices.per_cap),
            detail=detail,
            deadline=deadline,
        )

    def pick(
        self, choices: Choices, prices: Prices, deadline: float, *others: IntArray
    ) -> IntArray | None:
        """Return the best pick that is reached, or one of the others; None if there is none."""
        return best_known(choices, prices, deadline, *others)

    def prices_of(
        self, problem: AllocationProblem, choices: Choices, deadline: float
    ) -> tuple[Prices, float, str]:
        """Return the prices to repair from, a bound, and a line on them."""
        prices = best_prices(choices, deadline)
        return prices, prices.bound, f"price {prices.per_byte:.6g} of value per byte"
