"""What the scorers compute, the slow way: numpy, float64, the whole attention matrix, loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvalloc.models.attention import AttentionStates
from kvalloc.models.rope import Rotation
from kvalloc.scorers import scorer_names

SCORERS = [name for name in scorer_names() if name not in ("surrogate", "kvpress")]
"""Those that need no file which was fitted to the model and no other package; for these see
test_surrogate.py and test_kvpress.py."""

Array = npt.NDArray[np.float64]


def halves(*frequencies: float) -> Rotation:
    """The rotation of the halves of a head's first dimensions."""
    n = len(frequencies)
    return Rotation(lambda: torch.tensor(frequencies), slice(n), slice(n, 2 * n))


def make_states(
    *,
    batch: int = 1,
    n_kv_heads: int = 2,
    group: int = 3,
    n_tokens: int = 40,
    n_new_tokens: int | None = None,
    head_dim: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    mask: torch.Tensor | None = None,
    hidden_size: int | None = None,
    **more: Any,
) -> AttentionStates:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, head_dim, generator=generator).to(dtype) * 2

    new = n_tokens if n_new_tokens is None else n_new_tokens
    return AttentionStates(
        layer=0,
        queries=normal(n_kv_heads * group, new),
        keys=normal(n_kv_heads, n_tokens),
        values=normal(n_kv_heads, n_tokens),
        scaling=head_dim**-0.5,
        mask=mask,
        output_projection=None
        if hidden_size is None
        else torch.randn(hidden_size, n_kv_heads * group * head_dim, generator=generator),
        **more,
    )


def chunks_of(states: AttentionStates, sizes: list[int]) -> list[AttentionStates]:
    """The same prompt as it would be seen in chunks of these sizes, without padding."""
    assert sum(sizes) == states.queries.shape[2] == states.keys.shape[2]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [
        replace(
            states,
            queries=states.queries[:, :, end - size : end],
            keys=states.keys[:, :, :end],
            values=states.values[:, :, :end],
        )
        for end, size in zip(ends, sizes, strict=True)
    ]


def score_in_chunks(scorer: Any, states: AttentionStates, sizes: list[int], sinks: int) -> Any:
    """The scores when the prompt arrives in chunks, as a cache would go about it."""
    observed, held = None, states.queries[:, :, :0]
    wanted = scorer.query_rows(states.keys.shape[2])
    *earlier, last = chunks_of(states, sizes)
    for chunk in earlier:
        observed = scorer.observe(replace(chunk, observed=observed), sinks=sinks)
        rows = torch.cat([held, chunk.queries], dim=2)
        held = rows[:, :, rows.shape[2] - min(wanted, rows.shape[2]) :]
    rows = torch.cat([held, last.queries], dim=2)
    rows = rows[:, :, -max(wanted, last.queries.shape[2]) :]
    return scorer.score(replace(last, queries=rows, observed=observed), sinks=sinks)


def full_attention(states: AttentionStates) -> Array:
    """(batch, n_query_heads, n_new_tokens, n_tokens)."""
    queries = states.queries.double().numpy()
    keys = states.keys.double().numpy()
    keys = np.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
    logits = queries @ np.swapaxes(keys, 2, 3) * states.scaling
    if states.softcap is not None:
        logits = states.softcap * np.tanh(logits / states.softcap)
    new, n_tokens = logits.shape[2:]
    causal = np.tril(np.ones((new, n_tokens), dtype=bool), n_tokens - new)
    weights = np.where(causal, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if states.sink_logits is not None:
        sinks = states.sink_logits.double().numpy()[None, :, None, None]
        total = total + np.exp(sinks - logits.max(axis=-1, keepdims=True))
    return weights / total


def window_scores(
    states: AttentionStates,
    *,
    window: int,
    sinks: int,
    pool: int,
    pooling: str = "avg",
    group_reduce: str = "mean",
) -> Array:
    """(batch, n_kv_heads, n_tokens)."""
    attention = full_attention(states)
    batch, n_query_heads, _, n_tokens = attention.shape
    n_kv_heads = states.keys.shape[1]
    group = n_query_heads // n_kv_heads
    scores = np.zeros((batch, n_kv_heads, n_tokens))
    last = n_tokens - window
    for row in range(batch):
        for head in range(n_kv_heads):
            votes = []
            for member in range(head * group, (head + 1) * group):
                vote = attention[row, member, -window:, :].mean(axis=0)
                vote = [vote[i] if sinks <= i < last else 0.0 for i in range(max(last, 0))]
                votes.append([_pool(vote, i, pool, pooling) for i in range(len(vote))])
            reduced = np.mean(votes, axis=0) if group_reduce == "mean" else np.max(votes, axis=0)
            scores[row, head, sinks : max(last, sinks)] = reduced[sinks:]
    return scores


def _pool(values: list[float], index: int, pool: int, pooling: str) -> Any:
    half = pool // 2
    near = values[max(index - half, 0) : index + half + 1]
    return sum(near) / pool if pooling == "avg" else max(near)


def column_sums(
    states: AttentionStates,
    *,
    sinks: int,
    window: int,
    forgetting: float = 1.0,
) -> Array:
    """Every row's attention added up, one by one."""
    attention = full_attention(states)
    batch, n_query_heads, n_rows, n_tokens = attention.shape
    n_kv_heads = states.keys.shape[1]
    group = n_query_heads // n_kv_heads
    sums = np.zeros((batch, n_kv_heads, n_tokens))
    for query_head in range(n_query_heads):
        for row in range(n_rows):
            share = forgetting ** (n_rows - 1 - row) / group
            sums[:, query_head // group] += share * attention[:, query_head, row]
    sums[..., :sinks] = 0.0
    sums[..., max(n_tokens - window, 0) :] = 0.0
    return sums
