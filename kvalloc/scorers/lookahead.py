"""Lookahead, the scorer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates
from kvalloc.scorers.attention_rows import states_behind, window_maxima, window_votes
from kvalloc.scorers.base import Count, OddWidth, Positive
from kvalloc.scorers.pooled import PooledScorer, Reduction

if TYPE_CHECKING:
    from torch import Tensor

LATEST_VOTES, AHEAD_TOKENS = 128, 8
"""Number of latest queries that rank kept and new entries, and positions from the end to which they
are moved. Unmoved, they lose four times as much (SmolLM2-135M, 20%)."""

TURN_VOTES = 256
"""The same at the end of a turn, which may be longer."""


@dataclass(frozen=True, kw_only=True)
class Lookahead(PooledScorer):
    """Attention of the prompt's last queries to each entry, moved after the end.

    Parameters
    ----------
    window, pool : int
        See `Scorer` and `PooledScorer`.
    votes : int
        Last queries that count, also beyond the window.
    ahead : int
        Positions after the end to which they are rotated, and see every entry. At 0 they attend to
        neighbours.
    row_reduce, group_reduce : {"mean", "max"}
        Reductions over queries, then over a KV head's query heads.
    """

    name = "lookahead"
    summary = "attention of the last 128 tokens, from 8 positions behind the end"
    reference = "ours"

    window: Positive = 8
    votes: Positive = LATEST_VOTES
    ahead: Count = AHEAD_TOKENS
    pool: OddWidth = 1
    row_reduce: Reduction = "max"
    group_reduce: Reduction = "max"

    @property
    def rotates(self) -> bool:  # type: ignore[override]
        """Whether queries are moved."""
        return self.ahead > 0

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`."""
        moved = states
        if self.ahead:
            moved = states_behind(
                states,
                self.votes,
                self.ahead,
                user="the scorer lookahead",
                instead="leave them in their places (ahead=0)",
            )
        if self.row_reduce == "max":
            attention = window_maxima(moved, self.votes)
        else:
            attention = window_votes(moved, self.votes, lambda rows: rows.mean(dim=3))
        return self.pooled(attention, states, sinks=sinks)

    def query_rows(self, n_tokens: int) -> int:
        """Return the number of queries that count."""
        return self.votes


def latest_votes(*, window: int, rotates: bool) -> Lookahead:
    """Return the scorer by attention of the latest queries."""
    return Lookahead(window=window, ahead=AHEAD_TOKENS if rotates else 0)


def with_votes(
    scores: Tensor, states: AttentionStates, *, votes: int, weight: float, window: int, sinks: int
) -> Tensor:
    """Return scores, or the latest queries' weighted attention if larger."""
    import torch

    voting = latest_votes(window=window, rotates=states.rotation.fixed is None)
    largest = replace(voting, votes=votes).score(states, sinks=sinks)
    return torch.maximum(scores, largest.mul_(weight))
