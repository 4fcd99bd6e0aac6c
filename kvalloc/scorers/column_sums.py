"""Sums of all rows' attention, also for a prompt in chunks.

Memory grows with the prompt, not with its square.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.scorers.attention_rows import attention_rows, row_blocks

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_ELEMENTS = 1 << 24


def add_columns(states: AttentionStates, *, forgetting: float = 1.0) -> Observed:
    """Return all rows' attention to each entry so far, float32, mean over query heads.

    ``sum over rows q of forgetting ** (last - q) * A[q, column]``

    Parameters
    ----------
    states : AttentionStates
        The prompt or a chunk of it; ``states.observed`` holds the earlier sums.
    forgetting : float
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
    """Return weighted sums of the rows' attention, mean over query heads.

    Parameters
    ----------
    weights : Tensor of float32, (n_new_tokens,)
        On the host; rows of weight 0 at both ends are not computed.

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
