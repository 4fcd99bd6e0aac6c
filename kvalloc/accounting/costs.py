"""Costs: bytes of entries at 16 bits and fewer, of options and of whole caches."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, option
from kvalloc.shape import ModelShape


@dataclass(frozen=True)
class Width:
    """Storage of entries at some bits.

    Attributes
    ----------
    keys, values : int
        Bits of each number.
    turned : bool
        Whether a Hadamard matrix turns values before rounding; see `turns`.
    only_turned : bool
        Whether heads need a power of two numbers.
    """

    keys: int
    values: int
    turned: bool = False
    only_turned: bool = field(default=False, repr=False)


WIDTHS = {
    16: Width(16, 16),
    8: Width(8, 8),
    5: Width(5, 4, turned=True),
    4: Width(4, 4, turned=True),
    3: Width(4, 3, turned=True, only_turned=True),
    2: Width(3, 2, turned=True, only_turned=True),
}
"""By the bits' name; 16 is half precision, also if the model computes in float32. At 5, 3 and 2
bits keys have one bit more than values: their rounding loses most (docs/running.md)."""

MIXES = {
    853: {8: 1, 5: 3, 3: 6},
    85: {8: 2, 5: 8},
    53: {5: 4, 3: 6},
    532: {5: 3, 3: 4, 2: 3},
    52: {5: 4, 2: 6},
}
"""Widths of one KV head's entries, and entries of ten at each: the best ones have the widest.

By reverse water-filling an entry deserves ``a log2(score / threshold)`` bits. Scores fall off like
a power of the rank, so the shares of the widths hold for any number of entries.
"""

BIT_WIDTHS = (*WIDTHS, *MIXES)

MIXED_FROM = 12
"""Number of a head's best entries at the widest width of a mix, before its shares count: the
default's sinks and window."""

PLANES = {8: (8,), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,), 1: (1,)}
"""Planes of a row of codes by their number of bits: the lowest bits of all codes, then the others.

A byte holds a plane's bits of 8 / width neighbours, so all are read at fixed places.
"""

KEY_BLOCK_TOKENS = 64
"""Tokens of one key channel that share a scale and a minimum."""

VALUE_BLOCK_CHANNELS = 64
"""Channels of one value vector that share a scale and a minimum."""

SCALE_BYTES = 2
"""Bytes of a scale or a minimum, float16 or bfloat16."""

POSITION_BYTES = 2
"""Bytes of an entry's position: its lowest 16 bits."""

MOST_BYTES = 2**60
"""Largest sum of costs: costs are int64, and solvers scale them without overflow below this."""


def checked_bits(bits: Iterable[int]) -> tuple[int, ...]:
    """Return bit widths once each, the largest first.

    Raises
    ------
    InputError
        If there is none, or one outside `BIT_WIDTHS`.
    """
    widths = tuple(sorted(set(bits), reverse=True))
    if not widths or any(width not in BIT_WIDTHS for width in widths):
        raise InputError(
            f"the bits are {list(widths)}, expected some of {', '.join(map(str, BIT_WIDTHS))}, "
            f"such as {option('bits', (16, 8, 4))}"
        )
    return widths


def stored_bytes(tokens: npt.ArrayLike, bits: npt.ArrayLike, shape: ModelShape) -> IntArray:
    """Return the bytes of K and V that one KV head stores of one row.

    At 16 bits an entry takes ``shape.bytes_per_entry``. At fewer, with n entries in the order of
    their positions:

    - keys have a float16 scale and minimum for each channel and block of 64 tokens, the last also
      with fewer: ``ceil(n / 64) * key_dim * 4`` bytes;
    - values have them for each token and block of 64 channels: ``n * ceil(value_dim / 64) * 4``
      bytes, or half, without a minimum, if `turns` holds;
    - a token's key or value is packed in `PLANES`: ``ceil(dim * w / 8)`` bytes for each plane's w.

    ``bits``, of `BIT_WIDTHS`, are broadcast against ``tokens``.

    Examples
    --------
    >>> shape = ModelShape(model_id="m", n_layers=1, n_query_heads=1, n_kv_heads=1, head_dim=64,
    ...                    dtype_bytes=2, layer_types=("full",))
    >>> stored_bytes([64, 65], [[16], [8], [5], [4]], shape).tolist()
    [[16384, 16640], [8704, 9092], [4992, 5322], [4480, 4802]]

    References
    ----------
    KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (the blocks).
    """
    count, width = np.broadcast_arrays(
        np.asarray(tokens, dtype=np.int64), np.asarray(bits, dtype=np.int64)
    )
    if mixes := {*MIXES} & {*np.unique(width).tolist()}:
        mixed = np.isin(width, [*mixes])
        parts = [(np.where(mixed, 0, count), np.where(mixed, 16, width))]
        for mix in mixes:
            of_mix = tier_counts(np.where(width == mix, count, 0), mix)
            parts += [(each, np.asarray(one)) for one, each in of_mix.items()]
        total: IntArray = np.sum([stored_bytes(*part, shape) for part in parts], axis=0)
        return total
    rows = _packed_rows(*shape.dims)
    key_scales = -(-count // KEY_BLOCK_TOKENS) * shape.head_dim * 2 * SCALE_BYTES
    packed = count * rows[width] + key_scales
    stored: IntArray = np.where(width == 16, count * shape.bytes_per_entry, packed).astype(np.int64)
    return stored


def tier_counts(tokens: npt.ArrayLike, bits: int) -> dict[int, IntArray]:
    """Return how many of a KV head's entries are stored at each width, the widest first.

    No count falls with more entries.
    """
    count = np.asarray(tokens, dtype=np.int64)
    if bits in WIDTHS:
        return {bits: count}
    widths, prefixes = _turns_of(bits)
    mixed = np.maximum(count - MIXED_FROM, 0)
    shared = mixed[..., None] // 10 * prefixes[-1] + prefixes[mixed % 10]
    shared[..., 0] += count - mixed
    return dict(zip(widths, np.moveaxis(shared, -1, 0), strict=True))


def counts_of(
    lengths: IntArray, bits: IntArray, before: IntArray | None = None
) -> dict[int, IntArray]:
    """Return `tier_counts` of heads with ``lengths`` entries at ``bits``, broadcast against them.

    ``before`` are entries that the heads store already.
    """
    by_segment, result = np.broadcast_to(bits, lengths.shape), dict[int, IntArray]()
    first = np.zeros_like(lengths) if before is None else before
    for one in np.unique(by_segment).tolist():
        begin, end = (np.where(by_segment == one, n, 0) for n in (first, first + lengths))
        starts, ends = tier_counts(begin, one), tier_counts(end, one)
        for width in ends:
            more = ends[width] - starts[width]
            result[width] = result[width] + more if width in result else more
    return dict(sorted(result.items(), reverse=True))


@cache
def _turns_of(bits: int) -> tuple[tuple[int, ...], IntArray]:
    """Return a mix's widths, and how many of the first 0 to 10 entries have each."""
    widths, shares = tuple(MIXES[bits]), np.array([*MIXES[bits].values()])
    prefixes = np.zeros((11, len(shares)), dtype=np.int64)
    for n in range(1, 11):  # each entry gets the width farthest below its share
        prefixes[n] = prefixes[n - 1]
        prefixes[n, int(np.argmax(shares * n - 10 * prefixes[n - 1]))] += 1
    return widths, prefixes


@cache
def _packed_rows(key_dim: int, value_dim: int) -> IntArray:
    """Return the bytes of a token's packed key and value by bits."""
    rows = np.zeros(max(WIDTHS) + 1, dtype=np.int64)
    rows[[*WIDTHS]] = [sum(packed_row_bytes(b, key_dim, value_dim)) for b in WIDTHS]
    return rows


def head_bytes(tokens: npt.ArrayLike, bits: npt.ArrayLike, shape: ModelShape) -> IntArray:
    """Return the bytes of a KV head and row: `stored_bytes` and positions."""
    positions = POSITION_BYTES * np.asarray(tokens, dtype=np.int64)
    return stored_bytes(tokens, bits, shape) + positions


def bytes_in_share(share: float, whole: int) -> int:
    """Return the bytes of a share, rounded down but for a millionth."""
    return int(share * whole + 1e-6)


def entries_in_share(
    share: float,
    tokens: int,
    bits: npt.ArrayLike,
    shape: ModelShape,
    *,
    minimum: int,
) -> int:
    """Return the largest number of entries in each KV head within a share of a 16-bit cache.

    Entries count as in `head_bytes`; the full cache has no positions. A prompt is kept whole if the
    share does not hold ``minimum``, sinks and window.
    """
    if share == 1:
        return tokens
    widths, heads = np.unique(np.asarray(bits), return_counts=True)
    counts = np.arange(tokens + 1)[:, None]
    needed = (head_bytes(counts, widths, shape) * heads).sum(axis=1)
    capacity_bytes = bytes_in_share(share, tokens * shape.bytes_per_entry * int(heads.sum()))
    entries = int(np.searchsorted(needed, capacity_bytes, side="right")) - 1
    return tokens if entries < min(minimum, tokens) else entries


def within_bytes(
    budgets: IntArray,
    capacity_bytes: int,
    bits: npt.ArrayLike,
    shape: ModelShape,
    *,
    minimum: int,
) -> IntArray:
    """Return budgets of KV heads, made smaller by one factor until they fit in the capacity.

    ``budgets``, (n_layers, n_kv_heads), cost their `head_bytes`; ``bits`` are broadcast against
    them. ``minimum`` is the smallest budget, even beyond the capacity.
    """
    floor = np.minimum(budgets, minimum)

    def scaled(part: int) -> IntArray:
        return np.maximum(budgets * part // whole, floor)

    def fits(part: int) -> bool:
        return int(head_bytes(scaled(part), bits, shape).sum()) <= capacity_bytes

    whole = max(int(budgets.max(initial=1)), 1)
    part = bisect.bisect_left(range(whole), True, key=lambda part: not fits(part + 1))
    return scaled(part)


def filling_bytes(
    budgets: IntArray, capacity_bytes: int, bits: npt.ArrayLike, shape: ModelShape, *, tokens: int
) -> IntArray:
    """Return budgets made larger by one factor, up to ``tokens``; see `within_bytes`."""

    def larger(part: int) -> IntArray:
        return np.asarray(np.minimum(budgets + budgets * part // 1024, tokens))

    def fits(part: int) -> bool:
        return int(head_bytes(larger(part), bits, shape).sum()) <= capacity_bytes

    return larger(bisect.bisect_left(range(1024), True, key=lambda part: not fits(part + 1)))


def packed_row_bytes(bits: int, key_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the bytes of a token's packed key, and of its value with scales."""
    scales = -(-value_dim // VALUE_BLOCK_CHANNELS) * (2 - turns(bits, value_dim)) * SCALE_BYTES
    width = WIDTHS[bits]
    return code_bytes(width.keys, key_dim), code_bytes(width.values, value_dim) + scales


def entry_bytes(bits: int, shape: ModelShape) -> int:
    """Return about the bytes of one more entry."""
    few, more = map(int, stored_bytes([1024, 2048], bits, shape))
    return max((more - few) // 1024, 1)


def code_bytes(bits: int, head_dim: int) -> int:
    """Return the bytes of a row of codes."""
    return sum(-(-head_dim * width // 8) for width in PLANES.get(bits, (bits,)))


def turns(bits: int, head_dim: int) -> bool:
    """Return whether values of heads of that size are turned."""
    return WIDTHS[bits].turned and head_dim & (head_dim - 1) == 0


def bits_fault(bits: int, head_dim: int) -> str | None:
    """Return why heads of that size cannot have a width, or None."""
    widths = MIXES.get(bits, (bits,))
    if turns(min(widths), head_dim) or not any(WIDTHS[width].only_turned for width in widths):
        return None
    return (
        f"{bits} bits for heads of {head_dim} numbers, expected a power of two: values at "
        f"{min(widths)} bits have to be turned by a Hadamard matrix; take 4 bits"
    )


def constant_entries(shape: ModelShape, tokens: int) -> IntArray:
    """Return the entries of layers without budgets, (n_layers, n_kv_heads)."""
    counts = np.array([layer.stored_tokens(tokens) for layer in shape.by_layer], dtype=np.int64)
    return np.tile(counts[:, None], (1, shape.n_kv_heads))


def constant_bytes(shape: ModelShape, tokens: int, page_tokens: int = 1) -> IntArray:
    """Return the bytes of one row that no budget changes, (n_layers,).

    They are all states, and layers without budgets, in whole pages.
    """
    result = np.array([layer.state_bytes for layer in shape.by_layer], dtype=np.int64)
    for index, layer in enumerate(shape.by_layer):
        entries = -(-layer.stored_tokens(tokens) // page_tokens) * page_tokens * layer.kv_heads
        result[index] += entries * sum(layer.sizes[1:]) * shape.dtype_bytes
    return result


def full_bytes(shape: ModelShape, tokens: int, rows: int = 1) -> int:
    """Return the bytes of rows of ``tokens`` tokens kept whole.

    Layers with budgets count at 16 bits, others in the model's type.
    """
    full = len(shape.full_layers) * tokens * shape.n_kv_heads * shape.bytes_per_entry
    return (full + int(constant_bytes(shape, tokens).sum())) * rows


def plain_bytes(shape: ModelShape, tokens: int, rows: int = 1) -> int:
    """Return the bytes of a plain cache, in the model's type."""
    full = len(shape.full_layers) * tokens * shape.n_kv_heads * shape.plain_bytes_per_entry
    return (full + int(constant_bytes(shape, tokens).sum())) * rows


def reading_bytes(shape: ModelShape, tokens: int, rows: int = 1) -> int:
    """Return the bytes of the one full layer while prompts, padding included, are read."""
    return shape.n_kv_heads * tokens * rows * shape.plain_bytes_per_entry


def check_size(shape: ModelShape, context_tokens: int, page_tokens: int, batch: int) -> None:
    """Refuse a cache with more than `MOST_BYTES`.

    Raises
    ------
    InputError
    """
    whole = plain_bytes(shape, -(-context_tokens // page_tokens) * page_tokens, batch)
    if whole > MOST_BYTES:
        raise InputError(
            f"a cache of {whole:,} bytes is more than can be counted; ask for a smaller batch, a "
            "shorter context or smaller pages"
        )


@dataclass(frozen=True, kw_only=True)
class CacheCosts:
    """Costs of a whole cache, for sizes as targets.

    Attributes
    ----------
    columns : int or None
        Length of the longest prompt, if different.
    heads : int
        KV heads of all full-attention layers and rows.
    full : int
        Cost for shares: full-attention layers at 16 bits, without positions and pages.
    everything : int
        Cost of all entries in a reduced cache at 16 bits, without constant layers.
    constant : ndarray of int64, (n_layers,)
        Bytes that no budget changes, in whole pages.

    Raises
    ------
    InputError
        As `check_size`.
    """

    shape: ModelShape
    context_tokens: int
    batch: int
    page_tokens: int
    columns: int | None = None

    heads: int = field(init=False)
    full: int = field(init=False)
    everything: int = field(init=False)
    constant: IntArray = field(init=False)

    def __post_init__(self) -> None:
        shape, page, context = self.shape, self.page_tokens, self.context_tokens
        check_size(shape, context, page, self.batch)
        heads = len(shape.full_layers) * shape.n_kv_heads * self.batch
        everything = heads * int(self.of_head(context, 16, page))
        columns = self.columns or context
        self.__dict__.update(
            heads=heads,
            full=heads * context * shape.bytes_per_entry,
            everything=everything,
            constant=constant_bytes(shape, columns, page) * self.batch,
        )

    def of_head(self, tokens: npt.ArrayLike, bits: npt.ArrayLike, page_tokens: int = 1) -> IntArray:
        """Return the bytes of budgets of a KV head and row, rising page by page."""
        pages = -(-np.asarray(tokens, dtype=np.int64) // page_tokens) * page_tokens
        return head_bytes(pages, bits, self.shape)

    @property
    def reading_bytes(self) -> int:
        """Return the bytes beside kept entries while prompts are read."""
        columns = self.columns or self.context_tokens
        return reading_bytes(self.shape, columns, self.batch)

    @property
    def plain_bytes(self) -> int:
        """Return the bytes of a plain cache."""
        return len(self.shape.full_layers) * self.reading_bytes + self.constant_bytes

    @property
    def constant_bytes(self) -> int:
        """Return the sum of `constant`."""
        return int(self.constant.sum())

    def of_budget(self, tokens: int) -> int:
        """Return the cost of one budget in every KV head."""
        return self.heads * int(self.of_head(tokens, 16))

    def fewest_tokens(self, cost: int) -> int:
        """Return the smallest equal budget that costs at least this."""
        costs = self.of_head(np.arange(self.context_tokens), 16)
        return int(np.searchsorted(costs * self.heads, cost))
