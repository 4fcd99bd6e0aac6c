"""The mean of the worst workloads: cutting planes on the scenarios' weights, then repair."""

from __future__ import annotations

from typing import ClassVar

from kvalloc.problem import Aggregate, AllocationProblem, SideConstraint
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._prices import Prices, tail_prices
from kvalloc.solvers.lagrangian import Lagrangian


class CVaR(Lagrangian):
    """Most retention in the worst share of the workloads, or the fewest bytes that reach it there.

    The mean of the worst share a of S workloads is ``min_p sum_s p_s f_s(x)`` over weights within
    ``0 <= p_s <= 1 / (a S)``, ``sum p = 1``. With weights and a price on every byte each unit
    chooses on its own, ``argmax_k sum_s p_s v_suk - price * c_uk``, and the sum bounds the optimum.
    Weights and price are found by cutting planes: a linear program over them, with one row for
    each option that was a best response so far (`kvalloc.problem.dual_bound`). What the best
    weights choose is then repaired: moves of one unit, then of two at once, each judged by what
    it does to the worst share itself, until none improves.

    Values may be of any shape and costs unequal. Optimal is claimed only when the bound meets the
    objective; with many fine options the two are close, not equal.

    References
    ----------
    Rockafellar and Uryasev: Optimization of conditional value-at-risk (2000). Kelley: The
    cutting-plane method for solving convex programs (1960). Fisher: The Lagrangian relaxation
    method for solving integer programming problems (1981).
    """

    name: ClassVar[str] = "cvar"
    summary: ClassVar[str] = "worst share of several workloads, by cutting planes; with a bound"
    reference: ClassVar[str] = "Rockafellar and Uryasev 2000; Kelley 1960"
    takes_bits: ClassVar[bool] = False
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset()
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset({Aggregate.TAIL})

    def prices_of(
        self, problem: AllocationProblem, choices: Choices, deadline: float
    ) -> tuple[Prices, float, str]:
        """Return the prices at the best weights of the workloads, a bound, and those weights."""
        prices, tail = tail_prices(problem)
        shares = ", ".join(f"{weight:.3g}" for weight in tail.weights[:8])
        more = ", ..." if tail.weights.size > 8 else ""
        return prices, tail.bound, f"weights of the workloads {shares}{more}"
