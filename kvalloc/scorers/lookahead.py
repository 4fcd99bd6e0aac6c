"""Lookahead: the prompt's last queries vote from behind its end, as later ones will."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates
from kvalloc.scorers.attention_rows import states_behind, window_maxima, window_votes
from kvalloc.scorers.parameters import Count, OddWidth, Positive
from kvalloc.scorers.pooled import PooledScorer, Reduction

if TYPE_CHECKING:
    from torch import Tensor

LATEST_VOTES, AHEAD_TOKENS = 128, 8
"""Latest tokens whose queries vote among what is kept and what followed, and how far behind the
end they are put: in their own places they look at their neighbours, and at 5 bits in 20% of the
bytes lose four times as much (SmolLM2-135M: KL .0230 and .0057)."""

TURN_VOTES = 256
"""Latest tokens whose queries vote when a turn is settled: of a longer turn than `LATEST_VOTES` the
first ones would have no say in what the next answers find of it."""


@dataclass(frozen=True, kw_only=True)
class Lookahead(PooledScorer):
    """Attention of the prompt's last tokens to each entry, as if they stood behind the end.

    Parameters
    ----------
    window : int
        Last tokens of the prompt that are never evicted, tokens.
    votes : int
        Last tokens of the prompt whose queries vote; may be more than the window, or fewer.
    ahead : int
        How many positions behind the end the queries of these tokens are rotated to, where they see
        every entry; 0 leaves them in their own places. A query in its own place votes for its
        neighbours, which later queries do not have. On SmolLM2-135M, at 5 bits in 20% of the
        bytes, evicted after every 64 decoded tokens, 8 loses a quarter of what 0 does.
    pool : int
        Odd width of the average pooling, tokens; 1 turns it off.
    row_reduce, group_reduce : {"mean", "max"}
        How the votes of the queries, and then of the query heads that share a KV head, are
        reduced.
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

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return the scores of one layer's entries; see `Scorer.score`."""
        voting = states
        if self.ahead:
            voting = states_behind(
                states,
                self.votes,
                self.ahead,
                who="the scorer lookahead",
                instead="leave them in their places (ahead=0)",
            )
        if self.row_reduce == "max":
            votes = window_maxima(voting, self.votes)
        else:
            votes = window_votes(voting, self.votes, lambda rows: rows.mean(dim=3))
        return self.pooled(votes, states, sinks=sinks)

    def query_rows(self, n_tokens: int) -> int:
        """Return the number of voting queries."""
        return self.votes


def latest_votes(*, window: int, rotates: bool) -> Lookahead:
    """Return the votes of the latest queries.

    Parameters
    ----------
    window : int
        Last tokens that are never evicted.
    rotates : bool
        Whether the model's queries can be put behind the end.
    """
    return Lookahead(window=window, ahead=AHEAD_TOKENS if rotates else 0)
