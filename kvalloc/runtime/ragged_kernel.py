"""Attention over entries of different number in one pass on CUDA, written in Triton.

Imported only where Triton is installed, which torch brings along on CUDA. With
``TRITON_INTERPRET=1`` the same kernel runs on the CPU, where it is tested.

One program reads, for one row and KV head, all query rows of a block of them; a long segment is
split over several programs, whose partial softmaxes are added afterwards. Whole blocks come first,
then the rest, then the tokens that followed; the last split reads the last two.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvalloc.runtime.ragged import IntArray

__all__ = ["SpannedEntries", "kernel_attention"]

_COLUMNS = 64
_LEAST_ROWS = 16
_MOST_ROWS = 64
_MOST_SPLITS = 64


class SpannedEntries(Protocol):
    """Kept entries as the kernel reads them: flat, and where each segment's are.

    `RaggedEntries` are such, and `EvenEntries`, whose segments have the same number.
    """

    @property
    def keys(self) -> Tensor:
        """(n_entries, head_dim), contiguous."""

    @property
    def values(self) -> Tensor:
        """(n_entries, value_dim), contiguous."""

    @property
    def bias(self) -> Tensor | None:
        """Added to logits, float32, (n_entries,)."""

    @property
    def lengths(self) -> IntArray:
        """Entries of each segment, (batch, n_kv_heads)."""

    @property
    def span_table(self) -> Tensor:
        """Two spans of each segment, int64, (n_segments, 4): start and end, start and end."""


def kernel_attention(
    queries: Tensor,
    entries: SpannedEntries,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """The same as `kvalloc.runtime.ragged_attention.ragged_attention`.

    Parameters
    ----------
    queries, entries, keys, values, scaling, visible, softcap, sink_logits
        As there.
    splits : int, optional
        Programs that share one segment; by default as many as fill the device.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
    """
    batch, n_query_heads, n_new, head_dim = queries.shape
    n_kv_heads, n_following = keys.shape[1], keys.shape[2]
    n_segments = batch * n_kv_heads
    group = n_query_heads // n_kv_heads
    n_rows = group * n_new
    rows = min(max(triton.next_power_of_2(n_rows), _LEAST_ROWS), _MOST_ROWS)
    row_blocks = triton.cdiv(n_rows, rows)
    if splits is None:
        splits = _splits(entries, n_segments * row_blocks, keys.device)
    value_dim = values.shape[-1]
    most = keys.new_empty(splits, n_segments, n_rows, dtype=torch.float32)
    total, summed = torch.empty_like(most), most.new_empty(*most.shape, value_dim)
    nothing = most  # stands for an argument that is not read
    # Triton launches on the current device, which need not be this layer's
    with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
        _read_segment[(n_segments, row_blocks, splits)](
            queries.reshape(n_segments, n_rows, head_dim).contiguous(),
            entries.keys,
            entries.values,
            nothing if entries.bias is None else entries.bias,
            entries.span_table,
            keys.reshape(n_segments, n_following, head_dim).contiguous(),
            values.reshape(n_segments, n_following, value_dim).contiguous(),
            nothing if visible is None else visible.to(torch.uint8).contiguous(),
            most,
            total,
            summed,
            n_segments,
            n_rows,
            n_new,
            n_following,
            n_kv_heads,
            scaling,
            0.0 if softcap is None else softcap,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            HEAD_BLOCK=max(triton.next_power_of_2(head_dim), 16),
            VALUE_BLOCK=max(triton.next_power_of_2(value_dim), 16),
            ROWS=rows,
            COLUMNS=_COLUMNS,
            SPLITS=splits,
            BIASED=entries.bias is not None,
            PADDED=visible is not None,
            CAPPED=softcap is not None,
            PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
        )
    if sink_logits is not None:
        own = sink_logits.float().view(1, n_kv_heads, group, 1)
        own = own.expand(batch, -1, -1, n_new).reshape(1, n_segments, n_rows)
        most, total = torch.cat([most, own]), torch.cat([total, torch.ones_like(own)])
        summed = torch.cat([summed, summed.new_zeros(1, *summed.shape[1:])])
    factor = (most - most.amax(dim=0)).exp()
    result = (summed * factor.unsqueeze(-1)).sum(dim=0)
    result = result / (total * factor).sum(dim=0).unsqueeze(-1)
    shaped = result.to(queries.dtype).view(batch, n_query_heads, n_new, value_dim)
    return shaped.transpose(1, 2).contiguous()


def _splits(entries: SpannedEntries, programs: int, device: torch.device) -> int:
    """Enough programs for two on each multiprocessor, none with less than a few blocks to read."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    useful = int(entries.lengths.max()) // (4 * _COLUMNS)
    return int(max(1, min(triton.cdiv(wanted, programs), useful, _MOST_SPLITS)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    bias,
    start,
    end,
    most,
    total,
    summed,
    scaling,
    softcap,
    place,
    visible,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the entries from start to end to a softmax, a block of columns at a time."""
    dims, value_dims = tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    for first in range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < end
        key = tl.load(
            keys + column[None, :] * HEAD_DIM + dims[:, None],
            mask=inside[None, :] & (dims[:, None] < HEAD_DIM),
            other=0.0,
        )
        logits = tl.dot(queries, key, input_precision=PRECISION) * scaling
        if CAPPED:
            # tanh by exponentials, of the absolute value so that they cannot overflow
            small = tl.exp(-2.0 * tl.abs(logits) / softcap)
            turned = (1.0 - small) / (1.0 + small)
            logits = softcap * tl.where(logits < 0, -turned, turned)
        if BIASED:
            logits += tl.load(bias + column, mask=inside, other=0.0)[None, :]
        shown = inside[None, :]
        if CAUSAL:
            shown = shown & (column[None, :] <= place[:, None])
            if PADDED:
                real = tl.load(visible + column, mask=inside, other=0) != 0
                shown = shown & (real[None, :] | (column[None, :] == place[:, None]))
        logits = tl.where(shown, logits, float("-inf"))
        highest = tl.maximum(most, tl.max(logits, 1))
        # a row that has seen nothing yet: -inf minus -inf is not a number
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(logits - finite[:, None])
        factor = tl.exp(most - finite)
        value = tl.load(
            values + column[:, None] * VALUE_DIM + value_dims[None, :],
            mask=inside[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        total = total * factor + tl.sum(weights, 1)
        summed = summed * factor[:, None]
        summed += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        most = highest
    return most, total, summed


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read_segment(  # type: ignore[no-untyped-def]
    queries,
    kept_keys,
    kept_values,
    bias,
    spans,
    keys,
    values,
    visible,
    most_out,
    total_out,
    summed_out,
    n_segments,
    n_rows,
    n_new,
    n_following,
    n_kv_heads,
    scaling,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The softmax of one segment's share over one block of query rows."""
    segment = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    dims, value_dims = tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    asked = tl.load(
        queries + (segment * n_rows + row[:, None]) * HEAD_DIM + dims[None, :],
        mask=(row[:, None] < n_rows) & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    summed = tl.zeros([ROWS, VALUE_BLOCK], dtype=tl.float32)
    place = n_following - n_new + row % n_new
    start, end = tl.load(spans + segment * 4), tl.load(spans + segment * 4 + 1)
    rest, rest_end = tl.load(spans + segment * 4 + 2), tl.load(spans + segment * 4 + 3)
    share = tl.cdiv(tl.cdiv(end - start, SPLITS), COLUMNS) * COLUMNS
    own = start + split * share
    most, total, summed = _read(
        asked, kept_keys, kept_values, bias, own, tl.minimum(own + share, end),
        most, total, summed, scaling, softcap, place, visible,
        HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, COLUMNS,
        BIASED, False, CAPPED, False, PRECISION,
    )  # fmt: skip
    if split == SPLITS - 1:
        most, total, summed = _read(
            asked, kept_keys, kept_values, bias, rest, rest_end,
            most, total, summed, scaling, softcap, place, visible,
            HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, COLUMNS,
            BIASED, False, CAPPED, False, PRECISION,
        )  # fmt: skip
        most, total, summed = _read(
            asked,
            keys + segment * n_following * HEAD_DIM,
            values + segment * n_following * VALUE_DIM,
            bias, 0, n_following,
            most, total, summed, scaling, softcap, place,
            visible + (segment // n_kv_heads) * n_following,
            HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, COLUMNS,
            False, PADDED, CAPPED, True, PRECISION,
        )  # fmt: skip
    place_out = (split * n_segments + segment) * n_rows + row
    tl.store(most_out + place_out, most, mask=row < n_rows)
    tl.store(total_out + place_out, total, mask=row < n_rows)
    tl.store(
        summed_out + place_out[:, None] * VALUE_DIM + value_dims[None, :],
        summed,
        mask=(row[:, None] < n_rows) & (value_dims[None, :] < VALUE_DIM),
    )
