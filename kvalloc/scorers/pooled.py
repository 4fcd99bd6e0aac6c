"""Scorers by the pooled attention of a few queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvalloc.models.attention import AttentionStates
from kvalloc.scorers.attention_rows import protected_columns, window_votes
from kvalloc.scorers.base import Scorer

if TYPE_CHECKING:
    from torch import Tensor

Pooling = Literal["avg", "max"]
Reduction = Literal["mean", "max"]


class PooledScorer(Scorer):
    """Attention of the last `window` tokens to earlier ones, pooled, by KV head.

    Steps: causal softmax; mean over the window's rows; sinks set to 0; pooling along the tokens;
    `group_reduce`.

    Attributes
    ----------
    window : int
        Rows that count, and dropped columns.
    pool : int
        Odd pooling width, tokens; 1 turns it off. Zeros beyond the ends count.
    pooling, group_reduce : {"avg", "max"}, {"mean", "max"}
        Pooling, and reduction over a KV head's query heads.
    gamma : float
        Weight of the rows' (unbiased) variance, added to their mean.
    """

    across_layers = True

    pool: int
    pooling: Pooling = "avg"
    group_reduce: Reduction = "mean"
    gamma: float = 0.0

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`."""
        return self.pooled(window_votes(states, self.window, self._reduced), states, sinks=sinks)

    def _reduced(self, rows: Tensor) -> Tensor:
        """Return the attention to each entry, (batch, n_kv_heads, group, n_tokens)."""
        attention = rows.mean(dim=3)
        if self.gamma and rows.shape[3] > 1:
            attention = attention + self.gamma * rows.var(dim=3)
        return attention

    def pooled(self, attention: Tensor, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return scores from query heads' attention; see `Scorer.score`.

        Sinks are set to 0 first: pooling would spread their mass.

        Parameters
        ----------
        attention : Tensor of float32, (batch, n_kv_heads, group, n_tokens)
        """
        from torch.nn import functional

        scores = states.keys.new_zeros(states.keys.shape[:3]).float()
        n_scored = scores.shape[-1] - self.window
        if n_scored <= min(sinks, scores.shape[-1]):
            return scores
        protected = protected_columns(states, sinks=sinks)[..., :n_scored]
        scored = attention[..., :n_scored].masked_fill(protected[:, :, None], 0.0)
        if self.pool > 1:
            pool = functional.avg_pool1d if self.pooling == "avg" else functional.max_pool1d
            flat = scored.flatten(1, 2)
            scored = pool(flat, self.pool, stride=1, padding=self.pool // 2).view(scored.shape)
        reduced = scored.mean(dim=2) if self.group_reduce == "mean" else scored.amax(dim=2)
        scores[..., :n_scored] = reduced.masked_fill_(protected, 0.0)
        return scores
