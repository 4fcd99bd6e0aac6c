"""Kernels of `kvalloc.extensions.triton`.

A softmax has three parts a query row: the largest logit ``largest``, the sum ``total`` of
``exp(logit - largest)``, and ``summed``, values weighted by these. Related arguments are a tuple;
nothing is compiled for None.

Query row r of a KV head is new token ``r % n_new`` of its query head ``r // n_new``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["Sizes", "add_tiles", "read_tile"]

# Lengths change with every token: whether they are 1 or divide by 16 must compile nothing anew.
_LENGTHS = ("n_tiles", "following_tiles", "length", "tile", "n_following", "all_pieces")


class Codes(NamedTuple):
    """Storage of a part of the entries: bits of a number, bytes of an entry.

    `turned`: values are times Hadamard's matrix.
    """

    key_bits: int
    value_bits: int
    key_bytes: int
    value_bytes: int
    turned: bool


class Sizes(NamedTuple):
    """Constants compiled into a kernel, none a length.

    Blocks are dims up to a power of two, except `key_block`: entries that share a key scale. `rows`
    are a program's query rows, `columns` entries read at once. `channels` of a value share a scale.
    `turned`: any part's values are. `precision` of products is Triton's.
    """

    head_dim: int
    value_dim: int
    head_block: int
    value_block: int
    rows: int
    columns: int
    key_block: int
    channels: int
    codes: tuple[Codes, ...]
    turned: bool
    precision: str


@triton.jit(do_not_specialize=_LENGTHS)  # type: ignore[untyped-decorator, unused-ignore]
def read_tile(  # type: ignore[no-untyped-def]
    queries_in,
    kept,
    followed,
    partial,
    n_tiles,
    following_tiles,
    length,
    tile,
    n_following,
    all_pieces,
    counts,
    factors,
    SIZES: tl.constexpr,
):
    """Write the softmax of a block of query rows over a tile of entries.

    ``partial`` is (n_parts, n_rows, value_dim + 2): summed, largest, total. Up to ``n_tiles`` tiles
    of ``length`` kept entries come first, then ``following_tiles`` of each segment, with ``tile``
    of ``n_following`` entries. ``kept`` has `kvalloc.runtime.kept.Work`'s pieces and each part's
    keys, values and scales. ``queries_in`` and ``followed`` have steps between rows, heads and
    tokens.
    """
    queries, query_row, query_head, query_token = queries_in
    pieces = kept[0]
    keys, key_row, key_head, key_token = followed[0]
    values, value_row, value_head, value_token = followed[1]
    n_rows, n_new, n_kv_heads, group, n_pieces = counts
    part = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * SIZES.rows + tl.arange(0, SIZES.rows)
    dims, value_dims = tl.arange(0, SIZES.head_block), tl.arange(0, SIZES.value_block)
    is_kept = part < n_tiles
    later = part - n_tiles  # negative for kept entries
    divisor = tl.maximum(following_tiles, 1)
    piece = _piece_of(part, pieces, tl.where(is_kept, all_pieces, 0))
    if piece == all_pieces:
        return
    segment = tl.where(is_kept, piece // n_pieces, later // divisor)
    batch_row, head = segment // n_kv_heads, segment % n_kv_heads
    asking = batch_row * query_row + (head * group + row // n_new) * query_head
    asking += (row % n_new) * query_token
    query = tl.load(
        queries + asking[:, None] + dims[None, :],
        mask=(row[:, None] < n_rows) & (dims[None, :] < SIZES.head_dim),
        other=0.0,
    )
    largest = tl.full([SIZES.rows], float("-inf"), dtype=tl.float32)
    total = tl.full([SIZES.rows], 0.0, dtype=tl.float32)
    summed = tl.full([SIZES.rows, SIZES.value_block], 0.0, dtype=tl.float32)
    work, softmax = pieces + piece * 5, (largest, total, summed)
    before = (part - _first_tile(work, length)) * length
    start = tl.load(work) + before
    end = tl.where(is_kept, tl.minimum(start + length, tl.load(work + 1)), start)
    first_scale, width = tl.load(work + 2) + before // SIZES.key_block, tl.load(work + 3)
    for number in tl.static_range(len(SIZES.codes)):
        kept_keys, kept_values, scales = kept[number + 1]
        entries = kept_keys, SIZES.head_dim, kept_values, SIZES.value_dim, scales
        span = start, tl.where(width == number, end, start), first_scale
        softmax = _add_entries(
            query, entries, span, None, softmax, factors, SIZES, SIZES.codes[number]
        )
    start = tl.where(is_kept, 0, (later % divisor) * tile)
    end = tl.where(is_kept, 0, tl.minimum(start + tile, n_following))
    keys += batch_row * key_row + head * key_head
    values += batch_row * value_row + head * value_head
    entries, span = (keys, key_token, values, value_token, None), (start, end, 0)
    asking = batch_row, n_following - n_new + row % n_new, followed[2]
    largest, total, summed = _add_entries(
        query, entries, span, asking, softmax, factors, SIZES, None
    )
    out = partial + (part * n_rows + row) * (SIZES.value_dim + 2)
    tl.store(
        out[:, None] + value_dims[None, :],
        summed,
        mask=(row[:, None] < n_rows) & (value_dims[None, :] < SIZES.value_dim),
    )
    tl.store(out + SIZES.value_dim, largest, mask=row < n_rows)
    tl.store(out + SIZES.value_dim + 1, total, mask=row < n_rows)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _piece_of(tile, pieces, all_pieces):  # type: ignore[no-untyped-def]
    count = tl.zeros([], dtype=tl.int64)
    for first in range(0, all_pieces, 64):
        place = first + tl.arange(0, 64)
        inside = place < all_pieces
        ends = tl.load(pieces + place * 5 + 4, mask=inside, other=0)
        count += tl.sum((inside & (ends <= tile)).to(tl.int64))
    return count


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _first_tile(piece, length):  # type: ignore[no-untyped-def]
    return tl.load(piece + 4) - tl.cdiv(tl.load(piece + 1) - tl.load(piece), length)


@triton.jit(do_not_specialize=_LENGTHS[:5])  # type: ignore[untyped-decorator, unused-ignore]
def add_tiles(  # type: ignore[no-untyped-def]
    partial,
    pieces,
    sinks,
    output,
    n_tiles,
    following_tiles,
    length,
    tile,
    n_following,
    counts,
    SIZES: tl.constexpr,
):
    """Write a segment's answer from its tiles' softmaxes.

    Turned values come first; only their sum is turned. ``output`` is (batch, n_new, n_kv_heads *
    group, value_dim); ``sinks`` are the logits and their step.
    """
    n_rows, n_new, n_kv_heads, group, n_pieces = counts
    segment = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * SIZES.rows + tl.arange(0, SIZES.rows)
    value_dims = tl.arange(0, SIZES.value_block)
    inside = row < n_rows
    batch_row, head = segment // n_kv_heads, segment % n_kv_heads
    member = head * group + row // n_new
    largest = tl.full([SIZES.rows], float("-inf"), dtype=tl.float32)
    total = tl.full([SIZES.rows], 0.0, dtype=tl.float32)
    summed = tl.full([SIZES.rows, SIZES.value_block], 0.0, dtype=tl.float32)
    if sinks is not None:
        largest = tl.load(sinks[0] + member * sinks[1], mask=inside, other=0.0).to(tl.float32)
        total += 1.0
    work = pieces + segment * n_pieces * 5
    first, last = _first_tile(work, length), tl.load(work + n_pieces * 5 - 1)
    softmax = (largest, total, summed)
    if SIZES.turned:
        plain = first
        for piece in range(n_pieces):
            width = tl.load(work + piece * 5 + 3)
            is_turned = width < 0
            for number in tl.static_range(len(SIZES.codes)):
                is_turned = is_turned | ((width == number) & SIZES.codes[number].turned)
            plain = tl.where(is_turned, tl.load(work + piece * 5 + 4), plain)
        largest, total, summed = _add_parts(partial, first, plain, n_rows, row, softmax, SIZES)
        turned = _turned(summed, SIZES.rows * SIZES.value_block, SIZES.value_dim)
        softmax = (largest, total, tl.reshape(turned, (SIZES.rows, SIZES.value_block)))
        first = plain
    softmax = _add_parts(partial, first, last, n_rows, row, softmax, SIZES)
    first = n_tiles + segment * following_tiles
    last = first + tl.cdiv(n_following, tile)
    largest, total, summed = _add_parts(partial, first, last, n_rows, row, softmax, SIZES)
    place = (batch_row * n_new + row % n_new) * n_kv_heads * group + member
    tl.store(
        output + place[:, None] * SIZES.value_dim + value_dims[None, :],
        summed / tl.where(inside, total, 1.0)[:, None],
        mask=inside[:, None] & (value_dims[None, :] < SIZES.value_dim),
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_parts(  # type: ignore[no-untyped-def]
    partial, first, last, n_rows, row, softmax, SIZES: tl.constexpr
):
    largest, total, summed = softmax
    value_dims, inside = tl.arange(0, SIZES.value_block), row < n_rows
    for part in range(first, last):
        start = partial + (part * n_rows + row) * (SIZES.value_dim + 2)
        values = tl.load(
            start[:, None] + value_dims[None, :],
            mask=inside[:, None] & (value_dims[None, :] < SIZES.value_dim),
            other=0.0,
        )
        part_largest = tl.load(start + SIZES.value_dim, mask=inside, other=float("-inf"))
        largest, finite, factor = _raised(largest, part_largest)
        weight = tl.exp(part_largest - finite)
        part_total = tl.load(start + SIZES.value_dim + 1, mask=inside, other=0.0)
        total = total * factor + weight * part_total
        summed = summed * factor[:, None] + values * weight[:, None]
    return largest, total, summed


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _turned(vectors, SIZE: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return vectors times Hadamard's matrix over the root of its size, (SIZE / DIM, DIM)."""
    LEFT: tl.constexpr = SIZE // DIM
    STEPS: tl.constexpr = DIM.bit_length() - 1
    for _ in tl.static_range(STEPS):
        low, high = tl.split(tl.reshape(vectors, (LEFT, DIM // 2, 2)))
        vectors = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
    return tl.reshape(vectors, (LEFT, DIM)) * DIM**-0.5


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_entries(  # type: ignore[no-untyped-def]
    queries, entries, span, asking, softmax, factors, SIZES: tl.constexpr, CODES: tl.constexpr
):
    """Add a span (start, end, first key scale) of entries to a softmax.

    ``entries`` are keys and values, each with the step between tokens, and scales. ``asking``
    (batch row, places, starts) hides later tokens, and any before the row's start.
    """
    start, end, first_scale = span
    largest, total, summed = softmax
    scaling, softcap = factors
    for first in range(start, end, SIZES.columns):
        column = first + tl.arange(0, SIZES.columns)
        inside = column < end
        block = first_scale + (first - start) // SIZES.key_block
        key = _keys(entries, column, inside, block, SIZES, CODES).to(queries.dtype)
        logits = tl.dot(queries, key, input_precision=SIZES.precision) * scaling
        if softcap is not None:
            # tanh by exponentials, of the absolute value so that they cannot overflow
            small = tl.exp(-2.0 * tl.abs(logits) / softcap)
            turned = (1.0 - small) / (1.0 + small)
            logits = softcap * tl.where(logits < 0, -turned, turned)
        shown = inside[None, :]
        if asking is not None:
            batch_row, place, starts = asking
            shown = shown & (column[None, :] <= place[:, None])
            if starts is not None:
                follows = column >= tl.load(starts + batch_row)
                shown = shown & (follows[None, :] | (column[None, :] == place[:, None]))
        logits = tl.where(shown, logits, float("-inf"))
        largest, finite, factor = _raised(largest, tl.max(logits, 1))
        weights = tl.exp(logits - finite[:, None])
        value = _values(entries, column, inside, SIZES, CODES).to(queries.dtype)
        total = total * factor + tl.sum(weights, 1)
        summed = summed * factor[:, None]
        summed += tl.dot(weights.to(value.dtype), value, input_precision=SIZES.precision)
    return largest, total, summed


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keys(  # type: ignore[no-untyped-def]
    entries, column, inside, block, SIZES: tl.constexpr, CODES: tl.constexpr
):
    """Return keys in columns, (head_block, columns), which share a block's scales."""
    keys, key_token, _, _, scales = entries
    dims = tl.arange(0, SIZES.head_block)
    if scales is None:
        key = tl.load(
            keys + column[None, :] * key_token + dims[:, None],
            mask=inside[None, :] & (dims[:, None] < SIZES.head_dim),
            other=0.0,
        )
    else:
        place = scales[0] + block * 2 * SIZES.head_dim + dims
        step = tl.load(place, mask=dims < SIZES.head_dim, other=0.0).to(tl.float32)
        minimum = tl.load(place + SIZES.head_dim, mask=dims < SIZES.head_dim, other=0.0).to(
            tl.float32
        )
        codes = _codes(
            keys, column, inside, CODES.key_bytes, SIZES.head_dim, SIZES.head_block, CODES.key_bits
        )
        key = tl.trans(codes * step[None, :] + minimum[None, :])
    return key


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _values(entries, column, inside, SIZES: tl.constexpr, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return values in rows, (columns, value_block).

    After a row's codes come scales, one for `channels` numbers, each with a minimum unless turned;
    ``scales[1]`` views rows in their type.
    """
    _, _, values, value_token, scales = entries
    dims = tl.arange(0, SIZES.value_block)
    BLOCKS: tl.constexpr = SIZES.value_block // SIZES.channels
    N_SCALES: tl.constexpr = (SIZES.value_dim + SIZES.channels - 1) // SIZES.channels
    if scales is None:
        value = tl.load(
            values + column[:, None] * value_token + dims[None, :],
            mask=inside[:, None] & (dims[None, :] < SIZES.value_dim),
            other=0.0,
        )
    else:
        EACH: tl.constexpr = 1 if CODES.turned else 2
        ROW_BYTES: tl.constexpr = CODES.value_bytes + 2 * EACH * N_SCALES
        blocks = tl.arange(0, BLOCKS)
        pair = scales[1] + column[:, None] * (ROW_BYTES // 2) + CODES.value_bytes // 2
        pair += EACH * blocks[None, :]
        has_scale = inside[:, None] & (blocks[None, :] < N_SCALES)
        step = tl.load(pair, mask=has_scale, other=0.0).to(tl.float32)
        if CODES.turned:
            minimum = step * (-0.5 * (2**CODES.value_bits - 1))
        else:
            minimum = tl.load(pair + 1, mask=has_scale, other=0.0).to(tl.float32)
        codes = _codes(
            values, column, inside, ROW_BYTES, SIZES.value_dim, SIZES.value_block, CODES.value_bits
        )
        codes = tl.reshape(codes, (SIZES.columns, BLOCKS, SIZES.channels))
        wide = codes * step[:, :, None] + minimum[:, :, None]
        value = tl.reshape(wide, (SIZES.columns, SIZES.value_block))
    return value


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _codes(  # type: ignore[no-untyped-def]
    rows, column, inside, ROW_BYTES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Return codes, float32, (COLUMNS, BLOCK); 5 and 3 bits have two planes."""
    LOW: tl.constexpr = BITS - (BITS == 5 or BITS == 3)
    codes = _plane(rows, column, inside, ROW_BYTES, DIM, BLOCK, LOW)
    if LOW < BITS:
        rows += (DIM * LOW + 7) // 8
        codes |= _plane(rows, column, inside, ROW_BYTES, DIM, BLOCK, 1) << LOW
    return codes.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _plane(  # type: ignore[no-untyped-def]
    rows, column, inside, ROW_BYTES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Return numbers of BITS bits, uint8, a byte's lowest first."""
    byte = tl.arange(0, BLOCK * BITS // 8)
    codes = tl.load(
        rows + column[:, None] * ROW_BYTES + byte[None, :],
        mask=inside[:, None] & (byte[None, :] < (DIM * BITS + 7) // 8),
        other=0,
    )
    if BITS < 8:
        codes = tl.interleave(codes & 15, codes >> 4)
    if BITS < 4:
        codes = tl.interleave(codes & 3, codes >> 2)
    if BITS < 2:
        codes = tl.interleave(codes & 1, codes >> 1)
    return codes


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _raised(largest, other):  # type: ignore[no-untyped-def]
    """Return the larger logit, the subtrahend, and older sums' factor."""
    highest = tl.maximum(largest, other)
    # a row that has seen nothing yet: -inf minus -inf is not a number
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, finite, tl.exp(largest - finite)
