"""Lagrangian relaxation with repair."""

from __future__ import annotations

from typing import ClassVar

from kvalloc.accounting import IntArray
from kvalloc.errors import SolverError
from kvalloc.problem import AllocationProblem, GroupCap, SideConstraint, Solution
from kvalloc.solvers._coarse import ByParts
from kvalloc.solvers._prices import Prices, best_known, best_prices, rule_choices


class Lagrangian(ByParts):
    """Lagrangian dual of the multiple-choice knapsack, then repair; near-optimal, with a bound.

    At a price of a byte each unit chooses alone, ``argmax_k v_uk - price * c_uk``; the sum bounds
    the optimum. A secant search over the dual's breakpoints finds the best price. The choice on its
    feasible side is repaired by the best change of one unit, then the best exchange between two,
    until none improves. Options that the bound excludes are not tried.

    Each cap has a price, from the dual of the linear relaxation. Optimal is claimed only if the
    bound meets the objective.

    References
    ----------
    Fisher: The Lagrangian relaxation method for solving integer programming problems (1981).
    Geoffrion: Lagrangean relaxation for integer programming (1974). Kellerer et al. 2004, ch. 11.
    """

    name: ClassVar[str] = "lagrangian"
    summary: ClassVar[str] = "best price of a byte, then repair; any values and costs, with a bound"
    reference: ClassVar[str] = "Fisher 1981; Kellerer et al. 2004, ch. 11"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset({GroupCap})

    def solve_whole(self, problem: AllocationProblem, deadline: float) -> Solution:
        """Return a near-optimal choice and the dual bound."""
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
        """Return the best choice by repair, or a better known one, if any."""
        return best_known(problem, prices, deadline, *known)
