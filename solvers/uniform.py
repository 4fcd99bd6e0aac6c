"""Equal budgets, as in SnapKV, H2O and StreamingLLM."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.problem import Aggregate, AllocationProblem, SideConstraint
from kvalloc.problem.arrays import EVERY_KIND
from kvalloc.solvers._rules import Rule, SharingRule


class Uniform(SharingRule):
    """Equal entries for every unit: the most that fit, also in caps, or the fewest for a target."""

    name: ClassVar[str] = "uniform"
    summary: ClassVar[str] = "the same budget for every unit"
    reference: ClassVar[str] = "SnapKV, H2O, StreamingLLM"
    needs_one_step: ClassVar[bool] = False
    handles: ClassVar[frozenset[type[SideConstraint]]] = EVERY_KIND
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset(Aggregate)

    def rule(self, problem: AllocationProblem, deadline: float) -> tuple[Rule, int]:
        """Return common budgets by their tokens."""

        def same(tokens: int) -> IntArray:
            return problem.options_within(np.full(problem.n_units, tokens))

        return same, problem.context_tokens

    def describe(self, problem: AllocationProblem, choice: IntArray) -> str:
        """Return the common budget."""
        return f"{int(problem.chosen_tokens(choice).max())} tokens for every unit"
