"""DuoAttention and RazorAttention: retrieval heads keep everything, streaming heads keep little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.problem import AllocationProblem, Sense, Solution, Solver
from kvalloc.solvers._rules import numbers


class HeadClasses(Solver):
    """Two classes of heads: retrieval heads keep everything, streaming heads sinks and recent.

    The heads that lose most value as streaming heads become retrieval heads, as many as fit in
    the capacity, or the fewest that the target needs. Where the second class costs every head the
    same this sort is the best choice of two classes; otherwise heads are sorted by the value
    they lose per byte, and one that does not fit any more is passed over.

    What the curves do not say: they hold what a head's best n entries are worth, an upper limit
    on what its sinks and n most recent are. Which head retrieves is DuoAttention's trained gate
    or RazorAttention's echo and induction scores; pass those as ``importance`` to have them.

    Parameters
    ----------
    recent_tokens : int
        Most recent tokens that a streaming head keeps: 128 or 256 in the papers' settings.
    sink_tokens : int
        First tokens that it keeps beside them. Its budget is the smallest one that holds both,
        and never less than the problem's smallest.
    importance : sequence of float or str, optional
        One number per head, layer by layer, in place of the value a head loses; a text such as
        ``"0.5,0.2,0.3"`` on the command line.

    Raises
    ------
    InputError
        If a number is below zero or not finite.

    References
    ----------
    DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads.
    RazorAttention: Efficient KV Cache Compression Through Retrieval Heads.
    """

    name: ClassVar[str] = "head_classes"
    summary: ClassVar[str] = "retrieval heads keep everything, streaming heads sinks and recent"
    reference: ClassVar[str] = "DuoAttention, RazorAttention"
    needs_heads: ClassVar[bool] = True

    def __init__(
        self,
        recent_tokens: int = 128,
        sink_tokens: int = 4,
        importance: Sequence[float] | str | None = None,
    ) -> None:
        if recent_tokens < 0 or sink_tokens < 0:
            raise InputError(
                f"head_classes: recent_tokens {recent_tokens} and sink_tokens {sink_tokens} must "
                "be >= 0"
            )
        self.recent_tokens = recent_tokens
        self.sink_tokens = sink_tokens
        self.importance = (
            None if importance is None else numbers(importance, what="head_classes: importance")
        )

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """True where units are single heads and all of them fit as streaming heads."""
        refusal = super().can_solve(problem)
        if refusal is not True:
            return refusal
        if self.importance is not None and self.importance.size != problem.n_units:
            return (
                f"head_classes got {self.importance.size} numbers as importance, expected "
                f"{problem.n_units}, one per head; give as many, or use greedy, which needs none"
            )
        least = problem.cost(self._streaming(problem))
        if problem.capacity_bytes is not None and least > problem.capacity_bytes:
            return (
                f"head_classes keeps {self._streaming_tokens} tokens in every head, more than "
                "fits; lower recent_tokens, or use greedy"
            )
        return True

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """As many retrieval heads as fit, or the fewest that the target needs."""
        choice = self._streaming(problem)
        units, last = problem.units, problem.last_options
        extra = problem.costs[units, last] - problem.costs[units, choice]
        order = self._order(problem, choice, extra)
        retrieval = 0
        for unit in order.tolist():
            if problem.sense is Sense.MIN_COST:
                if problem.meets_target(problem.objective_value(choice)):
                    break
            elif problem.cost(choice) + int(extra[unit]) > problem.spendable_bytes:
                continue
            choice[unit] = problem.option_counts[unit] - 1
            retrieval += 1
        reached = problem.objective_value(choice)
        if not problem.meets_target(reached):
            raise InfeasibleError(
                f"two classes of heads reach {reached:.6g} at most, below the target of "
                f"{problem.target:g}; use greedy",
                nearest=reached,
            )
        same = np.unique(extra[extra > 0]).size <= 1 and self.importance is None
        detail = (
            f"{retrieval} retrieval heads of {problem.n_units}, the others keep "
            f"{self._streaming_tokens} tokens"
        )
        detail += "; best of all two-class choices" if same else ""
        return Solution.of(problem, choice, detail=detail)

    @property
    def _streaming_tokens(self) -> int:
        return self.recent_tokens + self.sink_tokens

    def _streaming(self, problem: AllocationProblem) -> IntArray:
        """Each head's smallest option that holds sinks and recent, ``(n_units,)``."""
        too_small = (problem.tokens < self._streaming_tokens) & problem.exists
        streaming: IntArray = np.minimum(too_small.sum(axis=1), problem.last_options)
        return streaming

    def _order(self, problem: AllocationProblem, streaming: IntArray, extra: IntArray) -> IntArray:
        """Heads that could become retrieval heads, the most important first; ties to the lower."""
        loss = problem.gains(streaming, problem.last_options)
        rank = loss / np.maximum(extra, 1) if self.importance is None else self.importance
        able = np.flatnonzero((extra > 0) & (loss > 0))
        order: IntArray = able[np.argsort(-rank[able], kind="stable")]
        return order
