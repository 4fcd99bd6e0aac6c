"""Kernels of `kvalloc.runtime.attention.triton`, imported only where Triton is installed.

With ``TRITON_INTERPRET=1`` the same kernels run on the CPU, where they are tested.

A softmax over what was read so far is, for each query row, the largest logit ``most``, the sum of
``exp(logit - most)`` ``total``, and the values weighted by the same, ``summed``. Entries are added
a block of columns at a time, and read from memory once: as numbers, or as the codes that are
stored at fewer bits, which become numbers in registers. Triton has no records, so its functions
take every tensor by itself.

Query row r of a KV head is new token ``r % n_new`` of the head's query head ``r // n_new``.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_tiles", "read_tile"]

# Lengths change with every token: whether they are 1 or divide by 16 must compile nothing anew.
_LENGTHS = ("n_tiles", "following_tiles", "tile", "n_following")


@triton.jit(do_not_specialize=_LENGTHS)  # type: ignore[untyped-decorator, unused-ignore]
def read_tile(  # type: ignore[no-untyped-def]
    queries,
    kept_keys,
    kept_values,
    key_scales,
    value_scales,
    bias,
    tiles,
    keys,
    values,
    visible,
    partial,
    n_tiles,
    following_tiles,
    tile,
    n_following,
    n_rows,
    n_new,
    n_kv_heads,
    group,
    scaling,
    softcap,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    visible_row,
    visible_token,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The softmax of one block of query rows over one tile, kept or of those that followed.

    Parts of ``partial`` are (n_rows, VALUE_DIM + 2): summed, most, total. First come those of the
    ``n_tiles`` of ``tiles`` (segment, start, end, first key scale), then ``following_tiles`` of
    each segment, ``tile`` entries each.
    """
    part = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims, value_dims = tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    is_kept = part < n_tiles
    own = tiles + part * 4
    start = tl.load(own + 1, mask=is_kept, other=0)
    end = tl.load(own + 2, mask=is_kept, other=0)
    later = part - n_tiles  # negative for what is kept
    divisor = tl.maximum(following_tiles, 1)
    segment = tl.where(is_kept, tl.load(own, mask=is_kept, other=0), later // divisor)
    batch_row, head = segment // n_kv_heads, segment % n_kv_heads
    asking = batch_row * query_row + (head * group + row // n_new) * query_head
    asking += (row % n_new) * query_token
    asked = tl.load(
        queries + asking[:, None] + dims[None, :],
        mask=(row[:, None] < n_rows) & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    summed = tl.zeros([ROWS, VALUE_BLOCK], dtype=tl.float32)
    scale = tl.load(own + 3, mask=is_kept, other=0)
    most, total, summed = _add_entries(
        asked, kept_keys, kept_values, key_scales, value_scales, bias, start, end, scale,
        HEAD_DIM, VALUE_DIM, most, total, summed, scaling, softcap,
        row, end, 0,  # place and padding, which nothing asks for
        HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, COLUMNS, CHANNELS,
        KEY_BITS, VALUE_BITS, BIASED, False, CAPPED, False, PRECISION,
    )  # fmt: skip
    start = tl.where(is_kept, 0, (later % divisor) * tile)
    end = tl.where(is_kept, 0, tl.minimum(start + tile, n_following))
    most, total, summed = _add_entries(
        asked,
        keys + batch_row * key_row + head * key_head,
        values + batch_row * value_row + head * value_head,
        key_scales, value_scales, bias, start, end, 0,
        key_token, value_token, most, total, summed, scaling, softcap,
        n_following - n_new + row % n_new, visible + batch_row * visible_row, visible_token,
        HEAD_DIM, VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, COLUMNS, CHANNELS,
        16, 16, False, PADDED, CAPPED, True, PRECISION,
    )  # fmt: skip
    out = partial + (part * n_rows + row) * (VALUE_DIM + 2)
    tl.store(
        out[:, None] + value_dims[None, :],
        summed,
        mask=(row[:, None] < n_rows) & (value_dims[None, :] < VALUE_DIM),
    )
    tl.store(out + VALUE_DIM, most, mask=row < n_rows)
    tl.store(out + VALUE_DIM + 1, total, mask=row < n_rows)


@triton.jit(do_not_specialize=_LENGTHS[:2])  # type: ignore[untyped-decorator, unused-ignore]
def add_tiles(  # type: ignore[no-untyped-def]
    partial,
    first_tiles,
    sinks,
    output,
    n_tiles,
    following_tiles,
    n_rows,
    n_new,
    n_kv_heads,
    group,
    sink_stride,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One segment's answer from the softmaxes of its tiles, where the model wants it.

    ``output`` is (batch, n_new, n_kv_heads * group, VALUE_DIM).
    """
    segment = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    value_dims = tl.arange(0, VALUE_BLOCK)
    inside = row < n_rows
    batch_row, head = segment // n_kv_heads, segment % n_kv_heads
    member = head * group + row // n_new
    most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    summed = tl.zeros([ROWS, VALUE_BLOCK], dtype=tl.float32)
    if SINKS:
        most = tl.load(sinks + member * sink_stride, mask=inside, other=0.0).to(tl.float32)
        total += 1.0
    first, n_kept = tl.load(first_tiles + segment), tl.load(first_tiles + segment + 1)
    n_kept -= first
    for number in range(0, n_kept + following_tiles):
        later = n_tiles + segment * following_tiles + number - n_kept
        part = tl.where(number < n_kept, first + number, later)
        own = partial + (part * n_rows + row) * (VALUE_DIM + 2)
        found = tl.load(
            own[:, None] + value_dims[None, :],
            mask=inside[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        own_most = tl.load(own + VALUE_DIM, mask=inside, other=float("-inf"))
        most, finite, factor = _raised(most, own_most)
        weight = tl.exp(own_most - finite)
        total = total * factor + weight * tl.load(own + VALUE_DIM + 1, mask=inside, other=0.0)
        summed = summed * factor[:, None] + found * weight[:, None]
    place = (batch_row * n_new + row % n_new) * n_kv_heads * group + member
    tl.store(
        output + place[:, None] * VALUE_DIM + value_dims[None, :],
        summed / tl.where(inside, total, 1.0)[:, None],
        mask=inside[:, None] & (value_dims[None, :] < VALUE_DIM),
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_entries(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    bias,
    start,
    end,
    scale,
    key_token,
    value_token,
    most,
    total,
    summed,
    scaling,
    softcap,
    place,
    visible,
    visible_token,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BIASED: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the entries from start to end to a softmax.

    At fewer than 16 bits ``COLUMNS`` tokens share a key scale, of which ``scale`` is the first's;
    ``CHANNELS`` channels share a value scale. The numbers are those of
    `kvalloc.runtime.quantization.from_codes`, in the queries' type.
    """
    KEY_BYTES: tl.constexpr = HEAD_DIM * KEY_BITS // 8
    VALUE_BYTES: tl.constexpr = VALUE_DIM * VALUE_BITS // 8
    BLOCKS: tl.constexpr = VALUE_BLOCK // CHANNELS
    N_SCALES: tl.constexpr = (VALUE_DIM + CHANNELS - 1) // CHANNELS * 2
    ROW_BYTES: tl.constexpr = VALUE_BYTES + 2 * N_SCALES
    dims, value_dims = tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    blocks = tl.arange(0, BLOCKS)
    for first in range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < end
        if KEY_BITS == 16:
            key = tl.load(
                keys + column[None, :] * key_token + dims[:, None],
                mask=inside[None, :] & (dims[:, None] < HEAD_DIM),
                other=0.0,
            )
        else:
            own = key_scales + (scale + (first - start) // COLUMNS) * 2 * HEAD_DIM + dims
            step = tl.load(own, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
            least = tl.load(own + HEAD_DIM, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
            codes = _codes(keys, column, inside, KEY_BYTES, KEY_BYTES, HEAD_BLOCK, KEY_BITS)
            key = tl.trans((codes * step[None, :] + least[None, :]).to(queries.dtype))
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
                real = tl.load(visible + column * visible_token, mask=inside, other=0) != 0
                shown = shown & (real[None, :] | (column[None, :] == place[:, None]))
        logits = tl.where(shown, logits, float("-inf"))
        most, finite, factor = _raised(most, tl.max(logits, 1))
        weights = tl.exp(logits - finite[:, None])
        if VALUE_BITS == 16:
            value = tl.load(
                values + column[:, None] * value_token + value_dims[None, :],
                mask=inside[:, None] & (value_dims[None, :] < VALUE_DIM),
                other=0.0,
            )
        else:  # of each token, behind its codes: scale and minimum of each block of channels
            pair = value_scales + column[:, None] * (ROW_BYTES // 2) + VALUE_BYTES // 2
            pair += 2 * blocks[None, :]
            there = inside[:, None] & (2 * blocks[None, :] < N_SCALES)
            step = tl.load(pair, mask=there, other=0.0).to(tl.float32)
            least = tl.load(pair + 1, mask=there, other=0.0).to(tl.float32)
            codes = _codes(values, column, inside, ROW_BYTES, VALUE_BYTES, VALUE_BLOCK, VALUE_BITS)
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
    """The codes of some rows, float32, (COLUMNS, BLOCK); the first is in the lowest bits.

    Those of 5 or 3 bits may begin in one byte and end in the next.
    """
    if BITS == 8 or BITS == 4:
        packed = _bytes(rows, column, inside, tl.arange(0, BLOCK * BITS // 8), ROW_BYTES, N_BYTES)
        if BITS == 4:
            packed = tl.interleave(packed & 15, packed >> 4)
    else:
        place = tl.arange(0, BLOCK) * BITS
        low = _bytes(rows, column, inside, place // 8, ROW_BYTES, N_BYTES).to(tl.int32)
        high = _bytes(rows, column, inside, place // 8 + 1, ROW_BYTES, N_BYTES).to(tl.int32)
        packed = ((low | (high << 8)) >> (place % 8)[None, :]) & ((1 << BITS) - 1)
    return packed.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _bytes(  # type: ignore[no-untyped-def]
    rows, column, inside, byte, ROW_BYTES: tl.constexpr, N_BYTES: tl.constexpr
):
    """These bytes of some rows, 0 behind a row's ``N_BYTES``."""
    return tl.load(
        rows + column[:, None] * ROW_BYTES + byte[None, :],
        mask=inside[:, None] & (byte[None, :] < N_BYTES),
        other=0,
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _raised(most, other):  # type: ignore[no-untyped-def]
    """The larger of two largest logits, what to take off logits, and the factor on older sums."""
    highest = tl.maximum(most, other)
    # a row that has seen nothing yet: -inf minus -inf is not a number
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, finite, tl.exp(most - finite)
