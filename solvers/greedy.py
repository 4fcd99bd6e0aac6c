"""The exact solver for concave problems: one threshold on the marginal gain."""

from __future__ import annotations

from typing import ClassVar

from kvalloc.problem import AllocationProblem, Solution, Solver
from kvalloc.solvers._thresholds import greedy_choice


class Greedy(Solver):
    """Give each next step to the unit that gains most from it, until the target is met.

    With concave values and one cost step for all, greedy's steps are the M largest gains of all
    units. The gains of a unit fall along its curve, so even the partition is not needed. The
    threshold is found by bisection over the gains, with a binary search in every curve at once, and
    without computing all gains.

    Exactly optimal for XKV's Eq. 17 (most value within a capacity) and Eq. 18 (fewest bytes for a
    target value), floors included: they are the first option of every unit. Ties go to the lower
    unit.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction, Algorithm 1, Eq. 17 and Eq. 18.
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
        """Return the optimum; see the class."""
        choice = greedy_choice(problem, problem.last_options)
        optimum = problem.objective(choice)
        return Solution.of(problem, choice, bound=optimum, detail="threshold on the marginal gain")
