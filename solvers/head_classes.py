"""DuoAttention and RazorAttention: retrieval heads and streaming heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError
from kvalloc.problem import AllocationProblem, Sense
from kvalloc.solvers._rules import Rule, SharingRule, parse_numbers


class HeadClasses(SharingRule):
    """Retrieval heads keep everything, streaming heads sinks and recent entries.

    The heads with the largest losses as streaming heads become retrieval heads, up to the capacity
    or until the target is met. If streaming saves equal bytes in every head, this is the best
    choice of two classes. Otherwise heads go by loss per byte, and one that does not fit is passed
    over.

    Losses are by a head's best n entries, an upper limit for sinks and recent ones. DuoAttention's
    trained gates, or RazorAttention's echo and induction scores, can be the ``importance``.

    Parameters
    ----------
    recent_tokens : int
        128 or 256 in the papers.
    sink_tokens : int
        A streaming head's budget is the smallest that holds both.
    importance : sequence of float or str, optional
        Of each head, layer by layer, in place of its loss; also text, ``"0.5,0.2,0.3"``.

    Raises
    ------
    InputError
        If a number is below zero or not finite.

    References
    ----------
    DuoAttention: Retrieval and Streaming Heads. RazorAttention: KV Cache Compression Through
    Retrieval Heads.
    """

    name: ClassVar[str] = "head_classes"
    summary: ClassVar[str] = "retrieval heads keep everything, streaming heads sinks and recent"
    reference: ClassVar[str] = "DuoAttention, RazorAttention"
    needs_heads: ClassVar[bool] = True
    needs_one_step: ClassVar[bool] = False

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
            None
            if importance is None
            else parse_numbers(importance, what="head_classes: importance")
        )

    def refusal(self, problem: AllocationProblem) -> str:
        """Refuse a wrong number of weights, and a capacity below all streaming heads."""
        if self.importance is not None and self.importance.size != problem.n_units:
            return (
                f"head_classes got {self.importance.size} numbers as importance, expected "
                f"{problem.n_units}, one per head; give as many, or use greedy, which needs none"
            )
        lowest_cost = problem.cost(self._streaming(problem))
        if problem.capacity_bytes is not None and lowest_cost > problem.capacity_bytes:
            return (
                f"head_classes keeps {self._streaming_tokens} tokens in every head, more than "
                "fits; lower recent_tokens, or use greedy"
            )
        return ""

    def rule(self, problem: AllocationProblem, deadline: float) -> tuple[Rule, int]:
        """Return choices by the number of retrieval heads."""
        streaming, last = self._streaming(problem), problem.last_options
        extra = self._extra_bytes(problem)
        left = problem.spendable_bytes - problem.cost(streaming)
        order: list[int] = []
        for unit in self._order(problem, streaming, extra).tolist():
            if problem.sense is Sense.MIN_COST or extra[unit] <= left:
                left -= int(extra[unit])
                order.append(unit)

        def classes(n_retrieval: int) -> IntArray:
            choice = streaming.copy()
            choice[order[:n_retrieval]] = last[order[:n_retrieval]]
            return choice

        return classes, len(order)

    def describe(self, problem: AllocationProblem, choice: IntArray) -> str:
        """Return the number of retrieval heads, and whether this is the best choice."""
        retrieval = int((choice > self._streaming(problem)).sum())
        extra = self._extra_bytes(problem)
        same = np.unique(extra[extra > 0]).size <= 1 and self.importance is None
        return (
            f"{retrieval} retrieval heads of {problem.n_units}, the others keep "
            f"{self._streaming_tokens} tokens{'; best of all two-class choices' if same else ''}"
        )

    @property
    def _streaming_tokens(self) -> int:
        return self.recent_tokens + self.sink_tokens

    def _extra_bytes(self, problem: AllocationProblem) -> IntArray:
        return (
            problem.costs[problem.units, problem.last_options]
            - (problem.costs[problem.units, self._streaming(problem)])
        )

    def _streaming(self, problem: AllocationProblem) -> IntArray:
        too_small = (problem.tokens < self._streaming_tokens) & problem.exists
        streaming: IntArray = np.minimum(too_small.sum(axis=1), problem.last_options)
        return streaming

    def _order(self, problem: AllocationProblem, streaming: IntArray, extra: IntArray) -> IntArray:
        loss = problem.gains(streaming, problem.last_options)
        rank = loss / np.maximum(extra, 1) if self.importance is None else self.importance
        able = np.flatnonzero((extra > 0) & (loss > 0))
        order: IntArray = able[np.argsort(-rank[able], kind="stable")]
        return order
