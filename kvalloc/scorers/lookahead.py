"""Lookahead: the queries of the first tokens after the prompt vote, beside those of the window."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.errors import InputError
from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.scorers.attention_rows import (
    attention_rows,
    states_behind,
    window_maxima,
    window_votes,
)
from kvalloc.scorers.later_pass import Later, LaterStep
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
    """Attention of the tokens that follow the prompt, and of the prompt's last ones.

    The cache holds the prompt until `tokens` tokens have followed it: an answer, greedy or sampled,
    a question, a turn of a chat. How much their queries, and those of the last `votes` tokens of
    the prompt, attend to each entry is its score.

    Parameters
    ----------
    tokens : int
        How many have to follow. Of more, such as a long question, the last `tokens` vote. 0 waits
        for none, and the prompt is not held for it.
    window : int
        Last tokens of the prompt that are never evicted, tokens.
    votes : int
        Last tokens of the prompt whose queries vote, too; the window by default, may be more than
        it, or 0.
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

    References
    ----------
    Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query (Wang et al.,
    2025, arXiv 2505.20334): LAQ lets the queries of a draft vote, LAQ++ the window's, too. There
    the draft is made with a reduced cache and thrown away; here the tokens are those that follow,
    from the full cache, and stay.
    """

    name = "lookahead"
    summary = "attention of the window and of the first 8 tokens after the prompt"
    reference = "Lookahead Q-Cache (Wang et al., 2025); the tokens that follow instead of a draft"

    tokens: Count = 8
    window: Positive = 8
    votes: Count = None  # type: ignore[assignment]  # as long as the window
    ahead: Count = 0
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
        """The tokens that follow, if any are waited for."""
        return Later(kind="following", tokens=self.tokens) if self.tokens else None

    @property
    def later_key(self) -> Hashable:
        """How many, and how the queries are reduced."""
        return (self.name, self.tokens, self.row_reduce)

    def observe_later(self, states: AttentionStates, step: LaterStep, *, sinks: int) -> Observed:
        """Return sums or maxima over the queries of the last tokens; see `Scorer.observe_later`."""
        batch, n_heads, n_queries = states.queries.shape[:3]
        rows = min(self.tokens, n_queries)
        if rows:
            weights = attention_rows(states, n_queries - rows, n_queries)[..., : step.n_prompt]
            votes = weights.sum(dim=3) if self.row_reduce == "mean" else weights.amax(dim=3)
            votes = votes.flatten(1, 2)
        else:  # nothing has followed yet
            votes = states.keys.new_zeros(batch, n_heads, step.n_prompt).float()
        return Observed(
            n_tokens=rows, columns=votes, totals={"rows": votes.new_full((batch,), rows)}
        )

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return the scores of one layer's entries; see `Scorer.score`."""
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
            voting = self._voting_states(states)
            if self.row_reduce == "mean":
                votes = votes + window_votes(voting, self.votes, lambda rows: rows.sum(dim=3))
            else:
                votes = torch.maximum(votes, window_maxima(voting, self.votes))
            n_rows += min(self.votes, states.queries.shape[2])
        if self.row_reduce == "mean":
            votes = votes / n_rows.clamp(min=1)[:, None, None, None]
        return self.pooled(votes, states, sinks=sinks)

    def _voting_states(self, states: AttentionStates) -> AttentionStates:
        """Return the states whose last queries vote."""
        if not self.ahead:
            return states
        who, instead = "the scorer lookahead", "leave them in their places (ahead=0)"
        return states_behind(states, self.votes, self.ahead, who=who, instead=instead)

    def query_rows(self, n_tokens: int) -> int:
        """Return the number of voting queries."""
        return self.votes


def latest_votes(*, window: int, rotates: bool) -> Lookahead:
    """Return the votes of the latest queries, by which what followed a prompt is chosen.

    Parameters
    ----------
    window : int
        Last tokens that are never evicted.
    rotates : bool
        Whether the model's queries can be put behind the end.
    """
    return Lookahead(
        tokens=0,
        window=window,
        votes=LATEST_VOTES,
        ahead=AHEAD_TOKENS if rotates else 0,
        pool=1,
        row_reduce="max",
        group_reduce="max",
    )
