"""The square-root rule: what one package needs to add a solver to kvalloc."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.problem import AllocationProblem, Sense, Solution, Solver


class SquareRoot(Solver):
    """Budgets in proportion to the square root of what a unit has to lose.

    If unit u loses ``a_u / n`` with n entries, the best n is proportional to ``sqrt(a_u)``. Here
    ``a_u`` is the area above its curve: its best value less its value, over all options.

    Parameters
    ----------
    offset : float
        Added to every area, so that no unit is left with nothing; at least 0.

    Raises
    ------
    InputError
        If the offset is negative.
    """

    name: ClassVar[str] = "square_root"
    summary: ClassVar[str] = "budgets by the square root of the area above each curve"
    reference: ClassVar[str] = "Neyman 1934, optimum allocation"

    def __init__(self, offset: float = 0.0) -> None:
        if not offset >= 0:
            raise InputError(f"square_root: offset is {offset:g}, expected >= 0")
        self.offset = offset

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """True where all entries cost the same."""
        refusal = super().can_solve(problem)
        if refusal is True and problem.n_options > 1 and problem.step_bytes is None:
            return "square_root shares out entries of one size, and these units differ; use ilp"
        return refusal

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Budgets for all the capacity, or the fewest entries that meet the target."""
        last = problem.last_options
        exists = np.arange(problem.n_options)[None, :] <= last[:, None]
        values = np.where(exists, problem.values, -np.inf)
        above = np.where(exists, values.max(axis=1, keepdims=True) - problem.values, 0.0)
        roots = np.sqrt(problem.weights * above.sum(axis=1) + self.offset)
        shares = roots / roots.sum() if roots.sum() > 0 else np.full(roots.size, 1 / roots.size)

        def rule(steps: int) -> IntArray:
            return apportion(steps * shares, steps, maximum=last)

        if problem.sense is Sense.MAX_VALUE:
            choice = rule(problem.spendable_steps)
        else:
            choice = _fewest(problem, rule)
        return Solution.of(problem, choice, detail=f"offset {self.offset:g}")


def _fewest(problem: AllocationProblem, rule: Callable[[int], IntArray]) -> IntArray:
    for steps in range(int(problem.last_options.sum()) + 1):
        choice = rule(steps)
        if problem.meets_target(problem.objective_value(choice)):
            return choice
    raise InfeasibleError(f"square_root cannot reach {problem.target:g}; use greedy")
