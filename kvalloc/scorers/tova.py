"""TOVA, the scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates
from kvalloc.scorers.attention_rows import window_attention
from kvalloc.scorers.base import Positive, Scorer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TOVA(Scorer):
    """Mean attention of the last token over all query heads.

    The same row for each KV head is ``xkv`` with window 1 and pool 1.

    Parameters
    ----------
    window : int
        The method protects only the last token.

    References
    ----------
    TOVA, Transformers are Multi-State RNNs (Oren et al., 2024).
    """

    name = "tova"
    summary = "attention of the last token, one ranking for a whole layer"
    reference = "TOVA, Transformers are Multi-State RNNs (Oren et al., 2024)"

    window: Positive = 1

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`."""
        batch, n_kv_heads, n_tokens, _ = states.keys.shape
        shared = window_attention(states, 1)[:, :, :, 0].mean(dim=(1, 2))
        scores = shared[:, None].expand(batch, n_kv_heads, n_tokens).clone()
        return self.without_protected(scores, states, sinks=sinks)

    def query_rows(self, n_tokens: int) -> int:
        """Return 1."""
        return 1
