"""The same budget everywhere: what SnapKV, H2O and StreamingLLM do."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.problem import AllocationProblem, Sense, Solution, Solver
from kvalloc.solvers._rules import fewest_for_target, most_within_capacity


class Uniform(Solver):
    """Every unit keeps the same number of entries.

    The largest that fits, or the smallest that meets the target. Entries that do not divide evenly
    stay unspent.

    References
    ----------
    SnapKV, H2O and StreamingLLM give every layer and head the same budget.
    """

    name: ClassVar[str] = "uniform"
    summary: ClassVar[str] = "the same budget for every unit"
    reference: ClassVar[str] = "SnapKV, H2O, StreamingLLM"

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """The largest common budget within the capacity, or the smallest that meets the target."""

        def same(tokens: int) -> IntArray:
            return problem.options_within(np.full(problem.n_units, tokens))

        find = most_within_capacity if problem.sense is Sense.MAX_VALUE else fewest_for_target
        tokens = find(problem, same, int(problem.tokens[:, 0].min()), problem.context_tokens)
        choice = same(tokens)
        most = int(problem.chosen_tokens(choice).max())
        return Solution.of(problem, choice, detail=f"{most} tokens for every unit")
