"""Exact solver for concave problems."""

from __future__ import annotations

from typing import ClassVar

from kvalloc.problem import AllocationProblem, Solution, Solver
from kvalloc.solvers._thresholds import greedy_choice


class Greedy(Solver):
    """The largest gains first, within the capacity or until the target is met.

    With concave values and one cost step, these are the M largest gains of all units. Bisection
    finds their threshold, with a binary search in every curve.

    Exactly optimal for XKV's Eq. 17 (most value within a capacity) and Eq. 18 (fewest bytes for a
    target), floors included. Ties go to the lower unit.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction, Algorithm 1.
    """

    name: ClassVar[str] = "greedy"
    summary: ClassVar[str] = "largest marginal gain first, by threshold; exact on concave curves"
    reference: ClassVar[str] = "XKV, Algorithm 1, Eq. 17 and 18"
    takes_bits: ClassVar[bool] = True
    needs_one_step: ClassVar[bool] = True
    needs_concave: ClassVar[bool] = True

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Return the optimum."""
        choice = greedy_choice(problem, problem.last_options)
        optimum = problem.objective(choice)
        return Solution.of(problem, choice, bound=optimum, detail="threshold on the marginal gain")
