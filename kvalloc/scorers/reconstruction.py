"""Reconstruction (KVzip), the scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.scorers.attention_rows import attention_logits, attention_softmax, row_blocks
from kvalloc.scorers.base import Above0, Count, OddWidth, Positive
from kvalloc.scorers.later_pass import SMALLEST_CHUNK, Later, LaterStep
from kvalloc.scorers.lookahead import with_votes
from kvalloc.scorers.pooled import PooledScorer, Reduction

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_ELEMENTS = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Reconstruction(PooledScorer):
    """Largest attention to an entry while the model repeats the prompt, teacher-forced.

    It comes in pieces. The maximum is over queries of the entry's repeated piece and the KV head's
    query heads. The softmax is over the piece's entries, sinks and later tokens so far.

    Parameters
    ----------
    chunk : int
        Longest piece, tokens.
    nearby : int or None
        See `Later`; None as in the method. 0 takes linear time.
    window, pool : int
        See `Scorer` and `PooledScorer`.
    group_reduce : {"max", "mean"}
    votes, votes_weight : int, float
        As in `Surrogate`; no votes in the method.

    References
    ----------
    KVzip (Kim et al., 2025, arXiv 2505.23416): pieces of 2,048 tokens, softmax over the piece,
    maximum over queries and group. Its words "Repeat the previous context exactly" are left out
    (benchmarks/studies/fitted-values.md).
    """

    name = "reconstruction"
    summary = "largest attention while the model repeats the prompt (KVzip)"
    reference = "KVzip (Kim et al., 2025)"
    holds_queries = False
    across_layers = False  # each has its notes

    chunk: Annotated[int, Field(ge=SMALLEST_CHUNK)] = 2048
    nearby: Count | None = None
    window: Positive = 8
    pool: OddWidth = 1
    group_reduce: Reduction = "max"
    votes: Count = 0
    votes_weight: Above0 = 2.0

    @property
    def rotates(self) -> bool:  # type: ignore[override]
        """Whether queries vote."""
        return self.votes > 0

    @property
    def later(self) -> Later:
        """The repetition."""
        return Later(tokens=self.chunk, nearby=self.nearby)

    def observe_later(self, states: AttentionStates, step: LaterStep, *, sinks: int) -> Observed:
        """Return the largest weights so far, (batch, n_query_heads, n_prompt)."""
        import torch

        device, places = states.keys.device, step.repeated.to(states.keys.device)
        prompt = [part for part in (step.repeated, step.leading) if part is not None]
        later = torch.arange(step.n_shown, states.keys.shape[2], device=device)
        columns = torch.cat([*(step.places(part).to(device) for part in prompt), later])
        keys = states.keys.index_select(2, columns)
        batch, n_query_heads, n_rows, _ = states.queries.shape
        best = keys.new_zeros(batch, n_query_heads, places.numel(), dtype=torch.float32)
        row = batch * n_query_heads * columns.numel()
        for first, end in row_blocks(0, n_rows, row, _BLOCK_ELEMENTS):
            seen = columns.numel() - (n_rows - end)
            logits = attention_logits(states, keys[:, :, :seen], first, end)
            causal = torch.ones(end - first, end - first, dtype=torch.bool, device=keys.device)
            logits[..., first - end :].masked_fill_(causal.triu_(1), float("-inf"))
            weights = attention_softmax(logits, states.sink_logits)[..., : places.numel()]
            torch.maximum(best, weights.amax(dim=3).flatten(1, 2), out=best)
        largest = None if states.observed is None else states.observed.columns
        if largest is None:
            largest = keys.new_zeros(batch, n_query_heads, step.n_prompt, dtype=torch.float32)
        return Observed(n_tokens=n_rows, columns=largest.index_copy(2, places, best))

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`."""
        largest = self.later_notes(states).columns
        assert largest is not None  # `observe_later` made it
        of_groups = largest.view(len(largest), states.keys.shape[1], -1, states.keys.shape[2])
        scores = self.pooled(of_groups, states, sinks=sinks)
        if self.votes:
            scores = with_votes(
                scores,
                states,
                votes=self.votes,
                weight=self.votes_weight,
                window=self.window,
                sinks=sinks,
            )
        return scores

    def query_rows(self, n_tokens: int) -> int:
        """See `Scorer.query_rows`."""
        return self.votes
