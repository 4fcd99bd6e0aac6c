"""Sums of the attention of all rows, for H2O and its descendants.

The rows are recomputed block by block and reduced at once, so memory grows with the prompt, not
with its square. A prompt in chunks gives the same sums: a chunk's rows see the chunk and all
earlier tokens, and the cache stores the sums until the prompt is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.scorers.attention_rows import attention_rows, row_blocks

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_ELEMENTS = 1 << 24


def add_columns(states: AttentionStates, *, forgetting: float = 1.0) -> Observed:
    """Return the attention to each entry from all rows so far, mean over the query heads.

    ``sum over rows q of forgetting ** (last - q) * A[q, column]``

    Parameters
    ----------
    states : AttentionStates
        One layer, the prompt or a chunk of it; ``states.observed`` holds the earlier sums.
    forgetting : float
        Factor a row on all earlier sums; 1 forgets nothing.

    Returns
    -------
    Observed
        Its columns are float32.
    """
    import torch

    states = states.unobserved()
    n_new, n_tokens = states.queries.shape[2], states.keys.shape[2]
    age = torch.arange(n_new - 1, -1, -1, dtype=torch.float32, device="cpu")
    columns = weighted_rows(states, forgetting**age)
    before = states.observed
    if before is not None and before.columns is not None:
        columns[..., : n_tokens - n_new] += before.columns * forgetting**n_new
    seen = n_new + (0 if before is None else before.n_tokens)
    return Observed(n_tokens=seen, columns=columns)


def weighted_rows(states: AttentionStates, weights: Tensor) -> Tensor:
    """Return the weighted sum of the rows' attention to each entry, mean over query heads.

    Parameters
    ----------
    weights : Tensor of float32, (n_new_tokens,)
        Weights of the rows, on the host; rows of weight 0 at both ends are not computed.

    Returns
    -------
    Tensor of float32, (batch, n_kv_heads, n_tokens)
    """
    import torch

    batch, _, n_tokens, _ = states.keys.shape
    n_query_heads = states.queries.shape[1]
    columns = torch.zeros(states.keys.shape[:3], dtype=torch.float32, device=states.keys.device)
    rows = weights.nonzero()
    if not rows.numel():  # also a chunk that is all padding: no rows and no columns
        return columns
    weights = weights.to(columns.device)
    row = batch * n_query_heads * n_tokens
    for first, end in row_blocks(int(rows[0]), int(rows[-1]) + 1, row, _BLOCK_ELEMENTS):
        attention = attention_rows(states, first, end).mean(dim=2)
        block = weights[first:end, None]
        columns[..., : attention.shape[-1]] += (attention * block).sum(dim=2)
    return columns
