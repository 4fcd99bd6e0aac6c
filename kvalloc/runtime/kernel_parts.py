"""What the kernel of ragged entries is made of: a softmax to which entries are added.

A softmax over what was read so far is, for each query row, the largest logit ``most``, the sum of
``exp(logit - most)`` ``total``, and the values weighted by the same, ``summed``. Entries are added
a block of columns at a time, and read from memory once: as numbers, or as the codes that are
stored at 8 or 4 bits, which become numbers in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_numbers", "add_packed"]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_numbers(  # type: ignore[no-untyped-def]
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
def add_packed(  # type: ignore[no-untyped-def]
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
