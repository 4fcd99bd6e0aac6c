"""The mean of the worst workloads: cutting planes on the scenarios' weights, then repair."""

from __future__ import annotations

from typing import ClassVar

from kvalloc.errors import SolverError
from kvalloc.problem import Aggregate, AllocationProblem, Solution, Solver, deadline_after
from kvalloc.problem.bounds import tail_bound
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._prices import tail_prices
from kvalloc.solvers._repair import best_known, equal_budgets


class CVaR(Solver):
    """Most retention in the worst share of the workloads, or the fewest bytes that reach it there.

    The mean of the worst share a of S workloads is ``min_p sum_s p_s f_s(x)`` over weights within
    ``0 <= p_s <= 1 / (a S)``, ``sum p = 1``. With weights and a price on every byte each unit
    chooses on its own, ``argmax_k sum_s p_s v_suk - price * c_uk``, and the sum bounds the optimum.
    Weights and price are found by cutting planes: a linear program over them, with one row for
    each option that was a best response so far (`kvalloc.problem.tail_bound`). What the best
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
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset({Aggregate.TAIL})

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """Return True for the tail of several workloads without side constraints."""
        if problem.aggregate is not Aggregate.TAIL:
            return (
                "cvar is for the worst share of several workloads, and this problem has one; use "
                "greedy, max_min or ilp"
            )
        return super().can_solve(problem)

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Return a near-optimal choice and the dual bound.

        Raises
        ------
        InfeasibleError
            If no choice meets the target.
        SolverError
            If repair finds no choice that meets the target.
        """
        deadline = deadline_after(time_limit_seconds)
        bound = tail_bound(problem)
        choices = Choices.of(problem)
        prices = tail_prices(problem, bound)
        picked = best_known(choices, prices, deadline, equal_budgets(choices))
        if picked is None:
            raise SolverError(
                "cvar found no choice that meets the target in the worst workloads, and cannot "
                "say that there is none; use ilp"
            )
        shares = ", ".join(f"{weight:.3g}" for weight in bound.weights[:8])
        more = ", ..." if bound.weights.size > 8 else ""
        detail = f"weights of the workloads {shares}{more}"
        choice = choices.expand(picked)
        return Solution.of(problem, choice, bound=bound.bound, detail=detail, deadline=deadline)
