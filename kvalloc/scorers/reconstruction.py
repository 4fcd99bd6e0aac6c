"""Reconstruction (KVzip): the model's attention while it repeats the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.scorers.attention_rows import attention_logits, attention_softmax, row_blocks
from kvalloc.scorers.base import Count, OddWidth, Positive
from kvalloc.scorers.later_pass import SMALLEST_CHUNK, Later, LaterStep
from kvalloc.scorers.pooled import PooledScorer, Reduction

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_ELEMENTS = 1 << 23


@dataclass(frozen=True, kw_only=True)
class Reconstruction(PooledScorer):
    """Largest attention that an entry gets while the model repeats the prompt, teacher-forced.

    The prompt comes a second time, in pieces of `chunk` tokens, over its full cache. The score of
    an entry is the largest weight from a query of its repeated piece. The maximum is over these
    queries and the query heads of the KV head. The softmax is over the piece's entries, the
    prompt's sinks and the later tokens so far, not over the whole prompt.

    Parameters
    ----------
    chunk : int
        Longest piece.
    nearby : int or None
        Tokens before and after a piece that its repetition sees, besides the piece and the prompt's
        first tokens; None for the whole prompt, as in the method. With 0 the time is proportional
        to the prompt, and on SmolLM2-135M the kept entries serve as well.
    window : int
        Last tokens of the prompt that are never evicted. The method has no window.
    pool : int
        Odd width of an average pooling, tokens; the method has none: 1.
    group_reduce : {"max", "mean"}
        Reduction over the query heads of a KV head, after the maximum over the queries.

    References
    ----------
    KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction (Kim et al., 2025, arXiv
    2505.23416). Pieces of 2,048 tokens, softmax over the piece, maximum over queries and group.
    There the words "Repeat the previous context exactly" ask for the repetition. Here nothing does,
    which serves as well (benchmarks/studies/fitted-values.md) and needs no tokenizer.
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
        """Return the scores of one layer's entries; see `Scorer.score`."""
        largest = self.later_notes(states).columns
        assert largest is not None  # `observe_later` made it
        of_groups = largest.view(len(largest), states.keys.shape[1], -1, states.keys.shape[2])
        return self.pooled(of_groups, states, sinks=sinks)
