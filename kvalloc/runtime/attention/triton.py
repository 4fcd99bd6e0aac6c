"""Attention over entries of different number in one pass on CUDA, written in Triton.

Imported only where Triton is installed, which torch brings along on CUDA. With
``TRITON_INTERPRET=1`` the same kernel runs on the CPU, where it is tested.

One program reads, for one row and KV head, all query rows of a block of them; a long segment is
split over several programs, whose partial softmaxes are added afterwards. Whole blocks come first,
then the rest, then the tokens that followed; the last split reads the last two. Entries at 8 or 4
bits are read as they are stored.

A softmax over what was read so far is, for each query row, the largest logit ``most``, the sum of
``exp(logit - most)`` ``total``, and the values weighted by the same, ``summed``. Entries are added
a block of columns at a time, and read from memory once: as numbers, or as the codes that are
stored at 8 or 4 bits, which become numbers in registers. Triton has no records, so its functions
take every tensor by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, VALUE_BLOCK_CHANNELS
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.kept import FlatEntries

__all__ = ["triton_attention"]

_COLUMNS = KEY_BLOCK_TOKENS  # so that a block of columns has one key scale
_LEAST_ROWS = 16
_MOST_ROWS = 64
_MOST_SPLITS = 64


def triton_attention(
    call: AttentionCall, kept: FlatEntries, *, splits: int | None = None
) -> Tensor:
    """Attention of the new tokens over kept entries and what followed.

    Parameters
    ----------
    call : AttentionCall
    kept : FlatEntries
        At fewer bits packed rows of values have an even number of bytes.
    splits : int, optional
        Programs that share one segment; by default as many as fill the device.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
    """
    batch, n_query_heads, n_new, _ = call.queries.shape
    n_kv_heads, value_dim = call.keys.shape[1], call.values.shape[-1]
    sinks = None
    if call.sink_logits is not None:
        sinks = call.sink_logits.float().view(1, n_kv_heads, -1, 1)
        sinks = sinks.expand(batch, -1, -1, n_new).reshape(1, batch * n_kv_heads, -1)
    # Triton launches on the current device, which need not be this layer's
    with torch.cuda.device_of(call.queries):  # type: ignore[no-untyped-call]
        parts = _partial(call, kept, splits)
    result = _joined(*parts, sinks)
    shaped = result.to(call.queries.dtype).view(batch, n_query_heads, n_new, value_dim)
    return shaped.transpose(1, 2).contiguous()


def _partial(
    call: AttentionCall, kept: FlatEntries, splits: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each split's softmax: most, total, (splits, n_segments, n_rows), and summed values."""
    queries, keys, values, visible = call.queries, call.keys, call.values, call.visible
    head_dim, value_dim = queries.shape[-1], values.shape[-1]
    n_segments, n_following = keys.shape[0] * keys.shape[1], keys.shape[2]
    n_rows = queries.numel() // (n_segments * head_dim)
    rows = min(max(triton.next_power_of_2(n_rows), _LEAST_ROWS), _MOST_ROWS)
    row_blocks = triton.cdiv(n_rows, rows)
    if splits is None:
        splits = _splits(kept, n_segments * row_blocks, keys.device)
    most = keys.new_empty(splits, n_segments, n_rows, dtype=torch.float32)
    total, summed = torch.empty_like(most), most.new_empty(*most.shape, value_dim)
    value_block = max(triton.next_power_of_2(value_dim), 16)
    nothing = most  # stands for an argument that is not read
    _read_segment[(n_segments, row_blocks, splits)](
        queries.reshape(n_segments, n_rows, head_dim).contiguous(),
        kept.keys,
        kept.values,
        nothing if kept.key_scales is None else kept.key_scales,
        nothing if kept.bits == 16 else kept.values.view(torch.float16),
        nothing if kept.first_scales is None else kept.first_scales,
        nothing if kept.bias is None else kept.bias,
        kept.spans,
        keys.reshape(n_segments, n_following, head_dim).contiguous(),
        values.reshape(n_segments, n_following, value_dim).contiguous(),
        nothing if visible is None else visible.to(torch.uint8).contiguous(),
        *(most, total, summed),
        *(n_segments, n_rows, queries.shape[2], n_following, keys.shape[1]),
        *(call.scaling, call.softcap or 0.0),
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        HEAD_BLOCK=max(triton.next_power_of_2(head_dim), 16),
        VALUE_BLOCK=value_block,
        ROWS=rows,
        COLUMNS=_COLUMNS,
        SPLITS=splits,
        CHANNELS=min(VALUE_BLOCK_CHANNELS, value_block),
        BITS=kept.bits,
        BIASED=kept.bias is not None,
        PADDED=visible is not None,
        CAPPED=call.softcap is not None,
        PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
    )
    return most, total, summed


def _joined(most: Tensor, total: Tensor, summed: Tensor, sinks: Tensor | None) -> Tensor:
    """What the splits' softmaxes, (splits, n_segments, n_rows, ...), say together."""
    if sinks is not None:
        most, total = torch.cat([most, sinks]), torch.cat([total, torch.ones_like(sinks)])
        summed = torch.cat([summed, summed.new_zeros(1, *summed.shape[1:])])
    factor = (most - most.amax(dim=0)).exp()
    result = (summed * factor.unsqueeze(-1)).sum(dim=0)
    return result / (total * factor).sum(dim=0).unsqueeze(-1)


def _splits(kept: FlatEntries, programs: int, device: torch.device) -> int:
    """Enough programs for two on each multiprocessor, none with less than a few blocks to read."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    useful = kept.longest // (4 * _COLUMNS)
    return int(max(1, min(triton.cdiv(wanted, programs), useful, _MOST_SPLITS)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read_segment(  # type: ignore[no-untyped-def]
    queries,
    kept_keys,
    kept_values,
    key_scales,
    value_scales,
    first_scales,
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
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
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
    for part in tl.static_range(
        2
    ):  # its share of the whole blocks; of the last split also the rest
        first, last = own, tl.minimum(own + share, end)
        if part == 1:
            first, last = rest, tl.where(split == SPLITS - 1, rest_end, rest)
        if BITS == 16:
            most, total, summed = _add_numbers(
                asked, kept_keys, kept_values, bias, first, last,
                most, total, summed, scaling, softcap,
                end, end,  # place and padding, which nothing asks for
                HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, COLUMNS,
                BIASED, False, CAPPED, False, PRECISION,
            )  # fmt: skip
        else:
            scale = tl.load(first_scales + segment * 2 + part)
            if part == 0:
                scale += (own - start) // COLUMNS
            most, total, summed = _add_packed(
                asked, kept_keys, kept_values, key_scales, value_scales, bias, first, last, scale,
                most, total, summed, scaling, softcap,
                HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, COLUMNS, CHANNELS,
                BITS, BIASED, CAPPED, PRECISION,
            )  # fmt: skip
    if split == SPLITS - 1:
        most, total, summed = _add_numbers(
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


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_numbers(  # type: ignore[no-untyped-def]
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
    """Add the entries from start to end to a softmax."""
    dims, value_dims = tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    for first in range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < end
        key = tl.load(
            keys + column[None, :] * HEAD_DIM + dims[:, None],
            mask=inside[None, :] & (dims[:, None] < HEAD_DIM),
            other=0.0,
        )
        logits = _logits(
            queries, key, bias, column, inside, scaling, softcap, BIASED, CAPPED, PRECISION
        )
        shown = inside[None, :]
        if CAUSAL:
            shown = shown & (column[None, :] <= place[:, None])
            if PADDED:
                real = tl.load(visible + column, mask=inside, other=0) != 0
                shown = shown & (real[None, :] | (column[None, :] == place[:, None]))
        most, factor, weights = _weights(most, tl.where(shown, logits, float("-inf")))
        value = tl.load(
            values + column[:, None] * VALUE_DIM + value_dims[None, :],
            mask=inside[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        total = total * factor + tl.sum(weights, 1)
        summed = summed * factor[:, None]
        summed += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return most, total, summed


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_packed(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    bias,
    start,
    end,
    scale,
    most,
    total,
    summed,
    scaling,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add packed entries from start to end to a softmax.

    ``COLUMNS`` tokens share a key scale, of which ``scale`` is the first's; ``CHANNELS`` channels
    share a value scale. The numbers are those of `kvalloc.runtime.quantization.from_codes`, in the
    queries' type.
    """
    KEY_BYTES: tl.constexpr = HEAD_DIM * BITS // 8
    VALUE_BYTES: tl.constexpr = VALUE_DIM * BITS // 8
    BLOCKS: tl.constexpr = VALUE_BLOCK // CHANNELS
    N_SCALES: tl.constexpr = (VALUE_DIM + CHANNELS - 1) // CHANNELS * 2
    ROW_BYTES: tl.constexpr = VALUE_BYTES + 2 * N_SCALES
    dims, blocks = tl.arange(0, HEAD_BLOCK), tl.arange(0, BLOCKS)
    for first in range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < end
        own = key_scales + (scale + (first - start) // COLUMNS) * 2 * HEAD_DIM + dims
        step = tl.load(own, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        least = tl.load(own + HEAD_DIM, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        codes = _codes(keys, column, inside, KEY_BYTES, KEY_BYTES, HEAD_BLOCK, BITS)
        key = tl.trans((codes * step[None, :] + least[None, :]).to(queries.dtype))
        logits = _logits(
            queries, key, bias, column, inside, scaling, softcap, BIASED, CAPPED, PRECISION
        )
        shown = tl.where(inside[None, :], logits, float("-inf"))
        most, factor, weights = _weights(most, shown)
        # of each token, behind its codes: scale and minimum of each block of channels
        pair = value_scales + column[:, None] * (ROW_BYTES // 2) + VALUE_BYTES // 2
        pair += 2 * blocks[None, :]
        there = inside[:, None] & (2 * blocks[None, :] < N_SCALES)
        step = tl.load(pair, mask=there, other=0.0).to(tl.float32)
        least = tl.load(pair + 1, mask=there, other=0.0).to(tl.float32)
        codes = _codes(values, column, inside, ROW_BYTES, VALUE_BYTES, VALUE_BLOCK, BITS)
        codes = tl.reshape(codes, (COLUMNS, BLOCKS, CHANNELS))
        wide = codes * step[:, :, None] + least[:, :, None]
        value = tl.reshape(wide, (COLUMNS, VALUE_BLOCK)).to(queries.dtype)
        total = total * factor + tl.sum(weights, 1)
        summed = summed * factor[:, None]
        summed += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return most, total, summed


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _codes(  # type: ignore[no-untyped-def]
    rows,
    column,
    inside,
    ROW_BYTES: tl.constexpr,
    N_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    """The codes of some rows, float32, (COLUMNS, BLOCK); at 4 bits the low half comes first."""
    byte = tl.arange(0, BLOCK * BITS // 8)
    packed = tl.load(
        rows + column[:, None] * ROW_BYTES + byte[None, :],
        mask=inside[:, None] & (byte[None, :] < N_BYTES),
        other=0,
    )
    if BITS == 4:
        packed = tl.interleave(packed & 15, packed >> 4)
    return packed.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _logits(  # type: ignore[no-untyped-def]
    queries,
    key,
    bias,
    column,
    inside,
    scaling,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits of a block of columns, whose keys are (HEAD_BLOCK, COLUMNS)."""
    logits = tl.dot(queries, key, input_precision=PRECISION) * scaling
    if CAPPED:
        # tanh by exponentials, of the absolute value so that they cannot overflow
        small = tl.exp(-2.0 * tl.abs(logits) / softcap)
        turned = (1.0 - small) / (1.0 + small)
        logits = softcap * tl.where(logits < 0, -turned, turned)
    if BIASED:
        logits += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    return logits


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weights(most, logits):  # type: ignore[no-untyped-def]
    """The largest logit with a block, the factor on what was summed before, and its weights."""
    highest = tl.maximum(most, tl.max(logits, 1))
    # a row that has seen nothing yet: -inf minus -inf is not a number
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, tl.exp(most - finite), tl.exp(logits - finite[:, None])
