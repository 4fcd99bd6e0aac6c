"""Lookahead: the queries of a short draft of the answer vote, beside those of the window."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.errors import InputError
from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.scorers.attention_rows import attention_rows, window_attention
from kvalloc.scorers.later_pass import Later, LaterStep
from kvalloc.scorers.parameters import Count, OddWidth, Positive
from kvalloc.scorers.pooled import PooledScorer, Reduction

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Lookahead(PooledScorer):
    """Attention of the first tokens that the model itself would say, and of the prompt's last ones.

    After the prompt the model drafts `tokens` tokens greedily with the full cache. How much their
    queries, and those of the last `votes` tokens of the prompt, attend to each entry is its
    score. The draft is taken away again before entries are evicted.

    Parameters
    ----------
    tokens : int
        Length of the draft, tokens: as many forwards of one token. Its queries up to that of its
        end-of-turn token vote. 0 drafts nothing, and the prompt is not held for it.
    window : int
        Last tokens of the prompt that are never evicted, tokens.
    votes : int
        Last tokens of the prompt whose queries vote, too; the window by default, may be more than
        it, or 0.
    pool : int
        Odd width of the average pooling, tokens; 1 turns it off.
    row_reduce, group_reduce : {"mean", "max"}
        How the votes of the queries, and then of the query heads that share a KV head, are
        reduced.

    References
    ----------
    Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query (Wang et al.,
    2025, arXiv 2505.20334): LAQ lets the queries of a draft vote, LAQ++ the window's, too. There
    the draft is made with a cache that a window has already reduced; here with the full one,
    which has to be held in any case.
    """

    name = "lookahead"
    summary = "attention of the window and of 8 tokens that the model drafts"
    reference = "Lookahead Q-Cache (Wang et al., 2025); full cache while drafting"

    tokens: Count = 8
    window: Positive = 8
    votes: Count = None  # type: ignore[assignment]  # as long as the window
    pool: OddWidth = 7
    row_reduce: Reduction = "mean"
    group_reduce: Reduction = "mean"

    def __post_init__(self) -> None:
        """Let the window vote where `votes` is not given, and check; see `Scorer`."""
        votes: int | None = self.votes
        if votes is None:
            object.__setattr__(self, "votes", self.window)
        super().__post_init__()
        if not self.tokens and not self.votes:
            raise InputError(
                "scorer lookahead: votes is 0, expected a number >= 1 where tokens is 0, so that "
                "some query votes"
            )

    @property
    def later(self) -> Later | None:
        """The draft, if any."""
        return Later(kind="draft", tokens=self.tokens) if self.tokens else None

    @property
    def later_key(self) -> Hashable:
        """How long, and how the queries are reduced."""
        return (self.name, self.tokens, self.row_reduce)

    def observe_later(self, states: AttentionStates, step: LaterStep, *, sinks: int) -> Observed:
        """The draft's votes, sums or maxima over its queries; see `Scorer.observe_later`."""
        import torch

        rows = min(self.tokens, int(states.queries.shape[2]))
        weights = attention_rows(states, 0, rows)[..., : step.n_prompt]
        batch = weights.shape[0]
        counts = step.counts
        if counts is None:
            counts = torch.ones(batch, rows, dtype=torch.bool, device=weights.device)
        counts = counts[:, :rows].to(weights.device).expand(batch, rows)
        # weights are >= 0, so that a row of 0 takes nothing from a sum or a maximum
        weights = weights * counts[:, None, None, :, None]
        votes = weights.sum(dim=3) if self.row_reduce == "mean" else weights.amax(dim=3)
        return Observed(
            n_tokens=rows, columns=votes.flatten(1, 2), totals={"rows": counts.sum(dim=1)}
        )

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Scores of one layer's entries; see `Scorer.score`."""
        import torch

        batch, n_kv_heads, n_tokens, _ = states.keys.shape
        group = states.queries.shape[1] // n_kv_heads
        votes = states.keys.new_zeros(batch, n_kv_heads, group, n_tokens, dtype=torch.float32)
        n_rows = votes.new_zeros(batch)
        if self.tokens:
            noted = self.later_notes(states)
            assert noted.columns is not None  # `observe_later` made it
            votes += noted.columns.view(votes.shape)
            n_rows += noted.totals["rows"]
        if self.votes:
            rows = window_attention(states, self.votes)
            if self.row_reduce == "mean":
                votes = votes + rows.sum(dim=3)
            else:
                votes = torch.maximum(votes, rows.amax(dim=3))
            n_rows += rows.shape[3]
        if self.row_reduce == "mean":
            votes = votes / n_rows.clamp(min=1)[:, None, None, None]
        return self.pooled(votes, states, sinks=sinks)

    def query_rows(self, n_tokens: int) -> int:
        """Those that vote."""
        return self.votes
