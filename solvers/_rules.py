"""Base of budget rules, and the numbers that their options take."""

from __future__ import annotations

import time
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InfeasibleError, InputError, SolverError
from kvalloc.problem import AllocationProblem, Sense, Solution, Solver, deadline_after

Rule = Callable[[int], IntArray]
"""Returns the rule's choice for each number, ``(n_units,)``; a larger number costs more."""


class SharingRule(Solver):
    """A row of ever more expensive choices: the largest that fits, or the smallest for a target."""

    needs_one_step: ClassVar[bool] = True

    @abstractmethod
    def rule(self, problem: AllocationProblem, deadline: float) -> tuple[Rule, int]:
        """Return the choices by number, from 0 on, and the largest number.

        A slow rule raises a `SolverError` past the deadline of ``time.monotonic()``.
        """

    def describe(self, problem: AllocationProblem, choice: IntArray) -> str:
        """Return one line on the choice; empty by default."""
        return ""

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Return the rule's choice, or once the time is up the best known one."""
        deadline = deadline_after(time_limit_seconds)
        rule, largest = self.rule(problem, deadline)
        maximise = problem.sense is Sense.MAX_VALUE

        def is_beyond(number: int) -> bool:
            if number < largest and time.monotonic() > deadline:
                return maximise  # ends at the best number that is known to be allowed
            choice = rule(number)
            if maximise:
                over = problem.cost(choice) > problem.spendable_bytes
                return over or problem.side_fault(choice) is not None
            return problem.meets_target(problem.objective_value(choice))

        number = largest
        if is_beyond(largest):
            number = bisect_left(range(largest), True, key=is_beyond) - int(maximise)
        elif not maximise:
            best = problem.objective_value(rule(largest))
            raise InfeasibleError(
                f"{self.name} reaches {best:.15g} at most, below the target of "
                f"{problem.target:.15g}; use auto",
                nearest=best,
            )
        choice = rule(max(number, 0))
        if fault := problem.side_fault(choice):
            raise SolverError(f"{self.name} knows no budgets that fit: {fault}; use ilp")
        detail = self.describe(problem, choice)
        return Solution.of(problem, choice, detail=detail, deadline=deadline)


def mean_budget_tokens(problem: AllocationProblem, steps: int) -> float:
    """Return a unit's mean budget in tokens after ``steps`` option steps."""
    return float(problem.tokens[:, 0].mean()) + steps / problem.n_units * tokens_per_step(problem)


def tokens_per_step(problem: AllocationProblem) -> int:
    """Return the tokens between neighbouring options: 1, or a page."""
    widest = problem.tokens[np.argmax(problem.option_counts)]
    return int(widest[1] - widest[0]) if problem.n_options > 1 else 1


def parse_numbers(text: Sequence[float] | str, *, what: str) -> FloatArray:
    """Return the numbers >= 0 of a solver's option, ``(n,)``; ``what`` names it in an error.

    Examples
    --------
    >>> parse_numbers("0.5, 0.25", what="demo: weights").tolist()
    [0.5, 0.25]
    """
    try:
        parts = text.replace(",", " ").split() if isinstance(text, str) else text
        values = np.asarray([float(part) for part in parts], dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(
            f"{what} are {str(text)[:80]!r}, expected numbers such as 0.5,0.3"
        ) from None
    if values.size == 0 or not np.all(np.isfinite(values)) or float(values.min()) < 0:
        raise InputError(f"{what} must be finite numbers >= 0, at least one")
    return values
