"""The best scores stay, and everything else goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import RankedPolicy
from kvalloc.runtime.selection import keep_best

if TYPE_CHECKING:
    from torch import Tensor


class Score(RankedPolicy):
    """Sinks, window, and each KV head's best entries by the profile's scorer.

    With the scorers of this package this is SnapKV, XKV, H2O, TOVA, StreamingLLM and so on.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction for Long-Context LLM Inference, Algorithm 2.
    """

    name: ClassVar[str] = "score"
    summary: ClassVar[str] = "the best entries by the profile's scorer"
    reference: ClassVar[str] = "XKV, Algorithm 2; the method is the scorer's"

    def scores(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """The scorer's scores of one layer, (batch, n_kv_heads, n_tokens)."""
        return self.scorer.score(states, sinks=sinks)

    def rankings(
        self, states: AttentionStates, *, sinks: int, window: int, valid: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The scores; see `RankedPolicy.rankings`."""
        return (self.scores(states, sinks=sinks),)

    def keep_ranked(
        self,
        rankings: tuple[Tensor, ...],
        states: AttentionStates,
        budgets: Tensor,
        *,
        sinks: int,
        window: int,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Choose the best; see `RankedPolicy.keep_ranked`."""
        return keep_best(rankings[0], budgets, sinks=sinks, window=window, valid=valid)
