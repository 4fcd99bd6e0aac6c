"""Equal budgets everywhere, as in SnapKV, H2O and StreamingLLM."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.problem import Aggregate, AllocationProblem, SideConstraint
from kvalloc.problem.arrays import EVERY_KIND
from kvalloc.solvers._rules import Rule, SharingRule


class Uniform(SharingRule):
    """Every unit keeps the same number of entries.

    It is the largest that fits, within caps too, or the smallest that meets the target. Entries
    that do not divide evenly stay unspent.

    References
    ----------
    SnapKV, H2O and StreamingLLM give every layer and head the same budget.
    """

    name: ClassVar[str] = "uniform"
    summary: ClassVar[str] = "the same budget for every unit"
    reference: ClassVar[str] = "SnapKV, H2O, StreamingLLM"
    needs_one_step: ClassVar[bool] = False
    handles: ClassVar[frozenset[type[SideConstraint]]] = EVERY_KIND
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset(Aggregate)

    def rule(self, problem: AllocationProblem, deadline: float) -> tuple[Rule, int]:
        """Return the common budgets by their tokens."""

        def same(tokens: int) -> IntArray:
            return problem.options_within(np.full(problem.n_units, tokens))

        return same, problem.context_tokens

    def describe(self, problem: AllocationProblem, choice: IntArray) -> str:
        """Return the common budget."""
        return f"{int(problem.chosen_tokens(choice).max())} tokens for every unit"
