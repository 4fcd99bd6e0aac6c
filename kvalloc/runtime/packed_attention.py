"""Attention over entries at fewer bits.

A kernel reads what is stored, where there is one (`kvalloc.runtime.kernels`). Without it, one
decoded token on the CPU is answered from the codes (`kvalloc.runtime.packed_decoding`). For all
else some heads at a time become numbers again, at most `SCRATCH_NUMBERS` of one layer, or one head
of one row where that has more; what was read is freed before the next heads are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.kernels import KERNEL_TYPES, Kernel, Packing, kernel_for
from kvalloc.runtime.packed import PackedEntries, PackedHeads
from kvalloc.runtime.packed_decoding import packed_decoding
from kvalloc.runtime.ragged import RaggedEntries
from kvalloc.runtime.ragged_attention import ragged_attention

__all__ = [
    "SCRATCH_NUMBERS",
    "Asked",
    "entries_attention",
    "kernel_part",
    "packed_attention",
    "unpacked_attention",
]

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
    asked = Asked(
        queries=queries,
        keys=keys,
        values=values,
        scaling=scaling,
        visible=visible,
        softcap=softcap,
        sink_logits=sink_logits,
    )
    if len(entries.parts) == 1:
        return _part_attention(asked, entries.parts[0])
    output = queries.new_empty(
        queries.shape[0], queries.shape[2], queries.shape[1], values.shape[-1]
    )
    by_head = torch.arange(queries.shape[1], device=queries.device).view(keys.shape[1], -1)
    for part in entries.parts:
        heads = torch.tensor(part.heads, device=queries.device)
        asking = by_head.index_select(0, heads).view(-1)
        output.index_copy_(2, asking, _part_attention(asked.of(heads, asking), part))
    return output


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What attention over the heads of one width is given beside them; as for `ragged_attention`.

    Attributes
    ----------
    queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
    keys, values : Tensor, (batch, n_kv_heads, n_following, head_dim)
    scaling : float
    visible : Tensor of bool, (batch, n_following), or None
    softcap : float or None
    sink_logits : Tensor, (n_query_heads,), or None
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    visible: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @property
    def plain(self) -> bool:
        """One new token that sees all there is, and nothing is done to logits."""
        options = (self.visible, self.softcap, self.sink_logits)
        return self.queries.shape[2] == 1 and all(option is None for option in options)

    def of(self, heads: Tensor, asking: Tensor) -> Asked:
        """The same of some KV heads, and of the query heads that ask them."""
        sinks = self.sink_logits
        return replace(
            self,
            queries=self.queries.index_select(1, asking),
            keys=self.keys.index_select(1, heads),
            values=self.values.index_select(1, heads),
            sink_logits=None if sinks is None else sinks.index_select(0, asking),
        )

    def cut(self, rows: slice, heads: slice, asking: slice) -> Asked:
        """The same of some rows and heads that stand together."""
        return replace(
            self,
            queries=self.queries[rows, asking],
            keys=self.keys[rows, heads],
            values=self.values[rows, heads],
            visible=None if self.visible is None else self.visible[rows],
            sink_logits=None if self.sink_logits is None else self.sink_logits[asking],
        )


def _part_attention(asked: Asked, part: PackedHeads) -> Tensor:
    """Attention to the heads of one width, on the shortest way that there is."""
    queries = asked.queries
    if part.bits == 16:
        return _number_attention(asked, part.codes)
    if queries.dtype == part.like[0].dtype:
        kernel = kernel_for(queries, asked.keys, asked.values)
        if kernel is not None and (part.aligned or not queries.is_cuda):
            return kernel_part(asked, part, kernel)
        if queries.device.type == "cpu" and queries.dtype in KERNEL_TYPES and asked.plain:
            return packed_decoding(queries, part, asked.keys, asked.values, scaling=asked.scaling)
    return unpacked_attention(asked, part)


def kernel_part(asked: Asked, part: PackedHeads, kernel: Kernel) -> Tensor:
    """Attention to the heads of one width by a kernel, which reads them as they are stored.

    Parameters
    ----------
    asked : Asked
        In the type that the entries had before they were rounded: float32, float16 or bfloat16.
    part : PackedHeads
        At 8 or 4 bits; `aligned` if the kernel is that of CUDA.
    kernel : Kernel

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
    """
    assert part.key_scales is not None
    return kernel(
        asked.queries,
        part.codes,
        asked.keys,
        asked.values,
        scaling=asked.scaling,
        visible=asked.visible,
        softcap=asked.softcap,
        sink_logits=asked.sink_logits,
        packing=Packing(bits=part.bits, key_scales=part.key_scales, first_scales=part.first_scales),
    )


def unpacked_attention(asked: Asked, part: PackedHeads) -> Tensor:
    """Attention to the heads of one width, some of which at a time become numbers.

    Parameters
    ----------
    asked : Asked
    part : PackedHeads

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
    """
    batch, n_query_heads, n_new, _ = asked.queries.shape
    n_kv_heads, group = len(part.heads), n_query_heads // len(part.heads)
    output = asked.queries.new_empty(batch, n_new, n_query_heads, asked.values.shape[-1])
    for rows, places in part.runs(SCRATCH_NUMBERS):
        asking = slice(places.start * group, places.stop * group)
        some = asked.cut(rows, places, asking)
        found = _number_attention(some, part.numbers(rows, places))
        if places.stop - places.start == n_kv_heads and rows.stop - rows.start == batch:
            return found
        output[rows, :, asking] = found
    return output


def _number_attention(asked: Asked, entries: RaggedEntries) -> Tensor:
    return ragged_attention(
        asked.queries,
        entries,
        asked.keys,
        asked.values,
        scaling=asked.scaling,
        visible=asked.visible,
        softcap=asked.softcap,
        sink_logits=asked.sink_logits,
    )
