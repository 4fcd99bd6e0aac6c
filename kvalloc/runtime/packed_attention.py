"""Attention over entries at fewer bits: some heads at a time become numbers again, and are read.

Of one layer at a time, and at most `SCRATCH_NUMBERS` of it, or one head of one row where that has
more. What is read is freed before the next heads are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvalloc.attention_hook import AttentionStates
from kvalloc.runtime.packed import PackedEntries
from kvalloc.runtime.ragged import RaggedEntries
from kvalloc.runtime.ragged_attention import ragged_attention

__all__ = ["SCRATCH_NUMBERS", "entries_attention", "packed_attention"]

SCRATCH_NUMBERS = 1 << 23
"""Keys and values that are numbers at the same time."""


def entries_attention(
    entries: RaggedEntries | PackedEntries, states: AttentionStates, visible: Tensor | None
) -> Tensor:
    """Attention of one layer's new tokens over entries and the tokens after them.

    Parameters
    ----------
    entries : RaggedEntries or PackedEntries
    states : AttentionStates
        Its keys and values are those that followed.
    visible : Tensor of bool, (batch, n_following), or None
        False hides padding among them.
    """
    attend = packed_attention if isinstance(entries, PackedEntries) else ragged_attention
    return attend(
        states.queries,
        entries,  # type: ignore[arg-type]  # of the kind that it takes
        states.keys,
        states.values,
        scaling=states.scaling,
        visible=None if visible is None else visible.to(states.keys.device),
        softcap=states.softcap,
        sink_logits=states.sink_logits,
    )


def packed_attention(
    queries: Tensor,
    entries: PackedEntries,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of the new tokens over packed entries and the tokens that followed.

    Parameters
    ----------
    entries : PackedEntries
        What is kept of the prompt, and what followed it longer ago.
    queries, keys, values, scaling, visible, softcap, sink_logits
        As for `ragged_attention`.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
    """
    batch, n_query_heads, n_new, _ = queries.shape
    n_kv_heads = int(keys.shape[1])
    group = n_query_heads // n_kv_heads
    output = queries.new_empty(batch, n_new, n_query_heads, values.shape[-1])
    for part in entries.parts:
        for rows, places in part.runs(SCRATCH_NUMBERS):
            own = torch.tensor(part.heads[places], device=queries.device)
            asking = (own[:, None] * group + torch.arange(group, device=own.device)).flatten()
            found = ragged_attention(
                queries[rows].index_select(1, asking),
                part.numbers(rows, places),
                keys[rows].index_select(1, own),
                values[rows].index_select(1, own),
                scaling=scaling,
                visible=None if visible is None else visible[rows],
                softcap=softcap,
                sink_logits=None if sink_logits is None else sink_logits.index_select(0, asking),
            )
            if own.numel() == n_kv_heads and rows.stop - rows.start == batch:
                return found
            output[rows].index_copy_(2, asking, found)
    return output
