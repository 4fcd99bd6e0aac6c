"""What budget rules share: a rule says who gets how much of a total; this finds the total.

And their lists of numbers, from code or from a command line.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.problem import AllocationProblem, Sense, Solution, Solver

Rule = Callable[[int], IntArray]


class SharingRule(Solver):
    """A rule that says who gets how many of some steps; the base finds how many there are.

    It proves nothing: all steps that the capacity holds, or the fewest that meet the target.
    """

    needs_one_step: ClassVar[bool] = True

    @abstractmethod
    def rule(self, problem: AllocationProblem) -> tuple[Rule, str]:
        """Return the option of each unit by the steps they add up to, and a line on the rule."""

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """The rule's choice; see the class.

        Raises
        ------
        InfeasibleError
            If the rule cannot meet the target with all steps.
        """
        rule, detail = self.rule(problem)
        most = int(problem.last_options.sum())
        if problem.sense is Sense.MAX_VALUE:
            steps = min(most, problem.spendable_steps)
        else:
            steps = fewest_for_target(problem, rule, 0, most)
        return Solution.of(problem, rule(steps), detail=detail)


def fewest_for_target(problem: AllocationProblem, rule: Rule, low: int, high: int) -> int:
    """The smallest number for which the rule's choice meets the target, by bisection.

    Raises
    ------
    InfeasibleError
        If not even ``high`` does.
    """

    def meets(number: int) -> bool:
        return problem.meets_target(problem.objective_value(rule(number)))

    if not meets(high):
        best = problem.objective_value(rule(high))
        raise InfeasibleError(
            f"this rule reaches {best:.6g} at most, below the target of {problem.target:g}; use "
            "greedy",
            nearest=best,
        )
    return low + bisect_left(range(low, high), True, key=meets)


def most_within_capacity(problem: AllocationProblem, rule: Rule, low: int, high: int) -> int:
    """The largest number for which the rule's choice fits in the capacity, by bisection."""
    more = range(low + 1, high + 1)
    spendable = problem.spendable_bytes
    return low + bisect_left(more, True, key=lambda n: problem.cost(rule(n)) > spendable)


def mean_budget_tokens(problem: AllocationProblem, steps: int) -> float:
    """Mean budget of a unit in tokens when ``steps`` option steps are handed out."""
    return float(problem.tokens[:, 0].mean()) + steps / problem.n_units * tokens_per_step(problem)


def tokens_per_step(problem: AllocationProblem) -> int:
    """Tokens between neighbouring options: 1, or a page."""
    return int(problem.tokens[0, 1] - problem.tokens[0, 0]) if problem.n_options > 1 else 1


def numbers(given: Sequence[float] | str, *, what: str) -> FloatArray:
    """A list of numbers that an option of a solver holds.

    Parameters
    ----------
    given : sequence of float or str
        Numbers, or a text such as ``"0.5,0.3"``.
    what : str
        How to call it in an error, such as ``"proportional: weights"``.

    Returns
    -------
    ndarray of float64, (n,)

    Raises
    ------
    InputError
        If it is empty, or not all are finite numbers >= 0.

    Examples
    --------
    >>> numbers("0.5, 0.25", what="demo: weights").tolist()
    [0.5, 0.25]
    """
    try:
        parts = given.replace(",", " ").split() if isinstance(given, str) else given
        found = np.asarray([float(part) for part in parts], dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(
            f"{what} are {str(given)[:80]!r}, expected numbers such as 0.5,0.3"
        ) from None
    if found.size == 0 or not np.all(np.isfinite(found)) or float(found.min()) < 0:
        raise InputError(f"{what} must be finite numbers >= 0, at least one")
    return found
