"""The best scores stay, and everything else goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvalloc.attention_hook import AttentionStates
from kvalloc.runtime.policies.base import EvictionPolicy
from kvalloc.runtime.selection import keep_best

if TYPE_CHECKING:
    from torch import Tensor


class Score(EvictionPolicy):
    """Sinks, window, and each KV head's best entries by the profile's scorer.

    With the scorers of this package this is SnapKV, XKV, H2O, TOVA, StreamingLLM and so on.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction for Long-Context LLM Inference, Algorithm 2.
    """

    name: ClassVar[str] = "score"
    summary: ClassVar[str] = "the best entries by the profile's scorer"
    reference: ClassVar[str] = "XKV, Algorithm 2; the method is the scorer's"

    def keep(
        self,
        states: AttentionStates,
        budgets: Tensor,
        *,
        sinks: int,
        window: int,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Choose the entries that stay; see `EvictionPolicy.keep`."""
        scores = self.scorer.score(states, sinks=sinks)
        return keep_best(scores, budgets, sinks=sinks, window=window, valid=valid)

    def keep_each(
        self, states: AttentionStates, budgets: Sequence[Tensor], *, sinks: int, window: int
    ) -> list[Tensor]:
        """`keep` at several budgets, from the same scores; see `EvictionPolicy.keep_each`."""
        scores = self.scorer.score(states, sinks=sinks)
        return [keep_best(scores, each, sinks=sinks, window=window) for each in budgets]
