"""TOVA: the attention of the last token, one ranking for all heads of a layer."""

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
    """Attention of the last token alone, mean over all query heads of the layer.

    All KV heads of a layer share the score, so they keep the same tokens if their budgets are
    equal. (The same row for each head separately is ``xkv`` with window 1 and pool 1.)

    Parameters
    ----------
    window : int
        Last tokens that are never evicted. The method protects only the last one.

    References
    ----------
    Transformers are Multi-State RNNs (Oren et al., 2024): TOVA, token omission via attention, with
    the mean over the heads of a layer.
    """

    name = "tova"
    summary = "attention of the last token, one ranking for a whole layer"
    reference = "TOVA, Transformers are Multi-State RNNs (Oren et al., 2024)"

    window: Positive = 1

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return the scores of one layer's entries; see `Scorer.score`."""
        batch, n_kv_heads, n_tokens, _ = states.keys.shape
        shared = window_attention(states, 1)[:, :, :, 0].mean(dim=(1, 2))
        scores = shared[:, None].expand(batch, n_kv_heads, n_tokens).clone()
        return self.without_protected(scores, states, sinks=sinks)

    def query_rows(self, n_tokens: int) -> int:
        """Return 1: the last query."""
        return 1
