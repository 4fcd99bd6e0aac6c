"""Kept entries of a layer: segments of any length, flat and without padding.

Head h of row b is segment ``b * n_kv_heads + h``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, repeat
from math import nan
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, WIDTHS, turns
from kvalloc.errors import UnsupportedRequestError
from kvalloc.runtime.checks import ensure
from kvalloc.runtime.quantization import (
    encode_keys,
    encode_values,
    fits_float16,
    key_numbers,
    magnitudes,
    rotated,
    value_numbers,
    within,
)
from kvalloc.shape import HALF_BYTES

SHORTEST_TILE = 16
"""Smallest tile of entries: the fewest that tensor cores multiply at once."""

STEPS, STEP_BLOCKS = 8, 64
"""Steps in which a layer is rounded, and the fewest blocks of keys in a step. Rounding takes
several times the bytes of its numbers. At 2,048 tokens, steps of 8 blocks take an eighth more of an
eviction's time (SmolLM2-135M)."""

CACHED_NUMBERS = 1 << 16
"""Values rounded in one step on a CPU, at least: more do not fit its cache."""

NO_COLUMN = torch.iinfo(torch.int32).max
"""Column of padding: after all tokens, so that none sees it."""

PAGE_TOKENS = 1 << 16
"""Positions are stored by their lowest 16 bits, with the number of entries in each page of 2**16
tokens."""

FLOAT16_END = 65520.0
"""Numbers from here on are infinite in float16."""

LEAST_NUMBER, LEAST_CHANNEL = 2.0**-14, 2.0**-20
"""A segment, or a channel of one, is too small for float16 if all of it is below. Below 2**-14
float16 loses digits; from 2**-17 on it has fewer than bfloat16."""

WORK_BYTES = 20
"""Bytes of each piece in `Work`; all segments of a layer have equally many pieces."""


def on_device(array: IntArray, device: torch.device) -> Tensor:
    """Return numbers on a device, without a wait."""
    return torch.from_numpy(array).to(device, non_blocking=device.type == "cuda")


def index_of(indices: IntArray, device: torch.device) -> slice | Tensor:
    """Return an index of increasing places, a slice if possible."""
    if len(indices) and int(indices[-1] - indices[0]) == len(indices) - 1:
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return on_device(indices, device)


def halved(*tensors: Tensor, lengths: IntArray) -> list[Tensor]:
    """Return numbers as float16, or bfloat16 if any overflow or a segment loses digits.

    Beyond CPUs the host waits once.
    """
    if all(tensor.itemsize <= HALF_BYTES for tensor in tensors) or not lengths.any():
        return [tensor if tensor.itemsize <= HALF_BYTES else tensor.half() for tensor in tensors]
    limits = FLOAT16_END, LEAST_NUMBER, LEAST_CHANNEL
    largest = [segment_max(tensor.abs(), lengths) for tensor in tensors]
    fits = torch.stack([within(one, *limits) for one in largest])
    pairs = zip(tensors, fits.tolist(), strict=True)
    return [tensor.half() if fit else tensor.bfloat16() for tensor, fit in pairs]


def segment_max(values: Tensor, lengths: IntArray) -> Tensor:
    """Return each non-empty segment's largest values, by column."""
    counts = lengths[lengths > 0]
    if values.is_cpu:  # several times as fast there
        return torch.stack(
            [segment.amax(dim=0) for segment in torch.split(values, counts.tolist())]
        )
    lengths_there = on_device(counts, values.device)
    return torch.segment_reduce(values, "max", lengths=lengths_there, unsafe=True)


@dataclass(frozen=True, eq=False)
class Spans:
    """Start and end of segments that are back to back."""

    lengths: IntArray
    device: torch.device

    @cached_property
    def ends(self) -> IntArray:
        """Entry after each segment."""
        return np.cumsum(self.lengths)

    @cached_property
    def starts(self) -> IntArray:
        """First entries."""
        return self.ends - self.lengths

    @cached_property
    def blocks(self) -> IntArray:
        """Blocks of keys of each segment."""
        return np.asarray(-(-self.lengths // KEY_BLOCK_TOKENS))

    @cached_property
    def first_scales(self) -> IntArray:
        """Index of each segment's first key scale, then the number of scales."""
        return np.concatenate([[0], np.cumsum(self.blocks)]).astype(np.int64)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """First, and last plus 1, of runs of equally long segments."""
        first = [0, *(np.flatnonzero(np.diff(self.lengths)) + 1).tolist()]
        return list(zip(first, [*first[1:], len(self.lengths)], strict=True))

    def key_blocks(self) -> tuple[IntArray, IntArray]:
        """Return start and end of each block of keys."""
        segment = np.repeat(np.arange(len(self.blocks)), self.blocks)
        place = np.arange(len(segment)) - self.first_scales[segment]  # of each block in its segment
        starts = self.starts[segment] + place * KEY_BLOCK_TOKENS
        return starts, np.minimum(starts + KEY_BLOCK_TOKENS, self.ends[segment])

    def block_places(self) -> Tensor:
        """Return each block's entries, (n_blocks, 64); a short one repeats its end."""
        starts, ends = self.key_blocks()
        places = np.minimum(starts[:, None] + np.arange(KEY_BLOCK_TOKENS), ends[:, None] - 1)
        return on_device(places, self.device)


def _gathered(firsts: IntArray, counts: IntArray, device: torch.device) -> Tensor:
    ends = np.cumsum(counts)
    places = np.repeat(firsts - (ends - counts), counts) + np.arange(int(counts.sum()))
    return on_device(places, device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Kept entries of one width, as attention backends read them.

    Segments are back to back, entries by position. Tensors own their storage, no entry larger.

    Attributes
    ----------
    keys, values : Tensor, (n_entries, head_dim) and (n_entries, value_dim)
        Contiguous, of the model's type, or `halved`. At fewer bits: packed uint8 rows, values
        followed by scales and minima.
    tokens : Tensor of int32 or int16, (n_entries,)
        Each entry's token in its row; once `compact`, its lowest 16 bits.
    segments : ndarray of int64, (n_segments,)
        Increasing.
    key_scales : Tensor of float16 or bfloat16, (n_key_blocks, 2, head_dim), or None
        None at 16 bits. Scales of values have its type.
    width_of : Tensor of int16, (n_entries,), or None
        Each entry's width to store, if a segment has several.
    pages : ndarray of int64, (n_segments, n_pages), or None
        Entries in each page; None if one page holds all.
    """

    keys: Tensor
    values: Tensor
    tokens: Tensor
    segments: IntArray
    lengths: IntArray
    bits: int = 16
    key_scales: Tensor | None = None
    width_of: Tensor | None = None
    pages: IntArray | None = None

    @cached_property
    def spans(self) -> Spans:
        """Spans of segments."""
        return Spans(self.lengths, self.keys.device)

    @property
    def positions(self) -> Tensor:
        """Uncompressed `tokens`, int32."""
        if self.tokens.dtype == torch.int32:
            return self.tokens
        low = self.tokens.int().bitwise_and_(PAGE_TOKENS - 1)
        if self.pages is None:
            return low
        firsts = np.arange(self.pages.shape[1]) * PAGE_TOKENS
        each = np.tile(firsts, len(self.pages)).repeat(self.pages.ravel())
        return low + on_device(each, low.device).int()

    def compact(self, end: int) -> Part:
        """Return the part with tokens of 2 bytes, all below ``end``."""
        if self.tokens.dtype == torch.int16:
            return self
        pages = None
        if end > PAGE_TOKENS:
            n_pages = -(-end // PAGE_TOKENS)
            each = np.arange(len(self.lengths)).repeat(self.lengths) * n_pages
            each += self.tokens.cpu().numpy() // PAGE_TOKENS
            pages = np.bincount(each, minlength=len(self.lengths) * n_pages).reshape(-1, n_pages)
        return replace(self, tokens=self.tokens.short(), pages=pages)

    def pages_of(self, n_pages: int) -> IntArray:
        """Return `pages`, in ``n_pages`` columns."""
        known = self.lengths[:, None] if self.pages is None else self.pages
        return np.pad(known, ((0, 0), (0, n_pages - known.shape[1])))

    @property
    def kind(self) -> tuple[object, ...]:
        """Key, equal for parts that can be one."""
        scales = None if self.key_scales is None else self.key_scales.dtype
        return -self.bits, str(self.keys.dtype), str(self.values.dtype), str(scales)

    def has_wide_scales(self, fresh: Part) -> bool:
        """Whether float16 did not hold its scales."""
        if self.key_scales is not None:
            return self.key_scales.dtype == torch.bfloat16
        stored = self.keys.dtype, self.values.dtype
        return fresh.keys.dtype != torch.bfloat16 and torch.bfloat16 in stored

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        stored = (self.keys, self.values, self.key_scales, self.tokens)
        return [one for one in stored if one is not None]

    def taken(self, places: IntArray) -> Part:
        """Return a copy of these segments; itself if they are all."""
        if np.array_equal(places, np.arange(len(self.segments))):
            return self
        spans, device = self.spans, self.keys.device
        lengths, blocks = self.lengths[places], spans.blocks[places]
        starts, first_scales = spans.starts[places], spans.first_scales[places]
        if len(places) and (np.diff(places) == 1).all():  # they follow each other

            def copied(stored: Tensor, firsts: IntArray, counts: IntArray) -> Tensor:
                return stored.narrow(0, int(firsts[0]), int(counts.sum())).clone()
        else:

            def copied(stored: Tensor, firsts: IntArray, counts: IntArray) -> Tensor:
                return stored[_gathered(firsts, counts, device)]

        scales = self.key_scales
        return replace(
            self,
            keys=copied(self.keys, starts, lengths),
            values=copied(self.values, starts, lengths),
            tokens=copied(self.tokens, starts, lengths),
            pages=None if self.pages is None else self.pages[places],
            width_of=None if self.width_of is None else copied(self.width_of, starts, lengths),
            key_scales=None if scales is None else copied(scales, first_scales, blocks),
            segments=self.segments[places],
            lengths=lengths,
        )

    def by_layer(self, n_layers: int, n_heads: int) -> Iterator[tuple[int, Part]]:
        """Yield copies of each layer's segments."""
        rows, heads = np.divmod(self.segments, n_layers * n_heads)
        layers, heads = np.divmod(heads, n_heads)
        for layer in np.unique(layers).tolist():
            places = np.flatnonzero(layers == layer)
            segments = rows[places] * n_heads + heads[places]
            yield layer, replace(self.taken(places), segments=segments)

    def unpacked(self, like: tuple[Tensor, Tensor]) -> Part:
        """Return unpacked entries, of ``like``'s types."""
        keys, values, scales = self.keys, self.values, self.key_scales
        if scales is not None:
            starts, ends = self.spans.key_blocks()
            each = on_device(np.repeat(np.arange(len(starts)), ends - starts), keys.device)
            keys = key_numbers(keys, scales[each], self.bits)
            dim = int(like[1].shape[-1])
            values = value_numbers(values, self.bits, dim, scales.dtype)
            values = rotated(values) if turns(self.bits, dim) else values
        keys, values = keys.to(like[0].dtype), values.to(like[1].dtype)
        return replace(self, keys=keys, values=values, key_scales=None, bits=16)


def joined(several: Sequence[Part]) -> tuple[Part, ...]:
    """Return a part for each kind, the widest first."""
    by_kind: dict[tuple[object, ...], list[Part]] = {}
    for one in several:
        if len(one.segments):
            by_kind.setdefault(one.kind, []).append(one)
    parts = []
    for same in by_kind.values():
        first = same[0]
        if len(same) > 1:
            stored = ["keys", "values", "tokens"]
            stored += [
                name for name in ("key_scales", "width_of") if getattr(first, name) is not None
            ]
            fields: dict[str, Any] = {
                name: torch.cat([getattr(one, name) for one in same]) for name in stored
            }
            for name in ("segments", "lengths"):
                fields[name] = np.concatenate([getattr(one, name) for one in same])
            if n_pages := _most_pages(*same):
                fields["pages"] = np.concatenate([one.pages_of(n_pages) for one in same])
            first = replace(first, **fields).taken(fields["segments"].argsort())
        parts.append(first)
    return tuple(sorted(parts, key=lambda part: -part.bits))


def _most_pages(*parts: Part) -> int:
    return max(0 if one.pages is None else one.pages.shape[1] for one in parts)


# At fewer bits


def pack(
    part: Part,
    bits: int,
    before: Sequence[Part] = (),
    kind: torch.dtype = torch.float16,
    n_steps: int = 1,
) -> Part:
    """Return numbers of the model's type at a width, rounded in ``n_steps`` steps.

    Scales are bfloat16 unless `fits_float16`. From ``before`` values keep codes. Each segment's
    first block, with the sinks, keeps key scales that cover it.
    """
    if bits == 16:
        keys, values = halved(part.keys, part.values, lengths=part.lengths)
        return replace(part, keys=keys, values=values)
    keys, key_scales, key_exact = _packed_segments(part, bits, n_steps, before, kind)
    n = max(n_steps, part.values.numel() // CACHED_NUMBERS) if part.values.is_cpu else n_steps
    pieces = zip(part.values.chunk(n), _coded_before(part, bits, before, n), strict=False)
    steps = [encode_values(chunk, bits, kind, coded) for chunk, coded in pieces]
    values, value_exact = (torch.cat(tensors) for tensors in zip(*steps, strict=True))
    if len(values):
        spans, width = part.spans, WIDTHS[bits]
        of_keys = segment_max(magnitudes(key_exact, width.keys, 1), spans.blocks)
        of_values = segment_max(magnitudes(value_exact, width.values), spans.lengths)
        fits = fits_float16(of_keys, width.keys) & fits_float16(of_values, width.values)
        if not _fits(fits, kind, key_exact, value_exact):
            return pack(part, bits, before, torch.bfloat16, n_steps)
    return replace(part, keys=keys, values=values, key_scales=key_scales, bits=bits)


def _coded_before(
    part: Part, bits: int, before: Sequence[Part], n_steps: int
) -> Sequence[Tensor] | Iterator[None]:
    segments = [one.segments for one in before if one.bits == bits]
    if not segments:
        return repeat(None)
    coded = np.isin(part.segments, np.concatenate(segments)).repeat(part.lengths)
    return on_device(coded.astype(np.int64), part.values.device).bool().chunk(n_steps)


def _fits(fits: Tensor, kind: torch.dtype, *exact: Tensor) -> bool:
    if kind == torch.bfloat16:
        fits = torch.stack([one.isfinite().all() for one in exact]).all()
    elif fits.is_cpu:
        return bool(fits)
    ensure(fits, _refuse_scales)
    return True


def _refuse_scales() -> None:
    raise UnsupportedRequestError(
        "keys or values of this text are infinite or NaN, or beyond float16 scales on a GPU, and "
        "cannot be rounded; use a profile at 16 bits and a bfloat16 model"
    )


def _packed_segments(
    fresh: Part, bits: int, n_steps: int, before: Sequence[Part], kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    spans = fresh.spans
    places = spans.block_places()
    known: Tensor | None = None
    for part in before:  # one of them at most has such scales
        if part.bits != bits or part.key_scales is None or part.key_scales.dtype != kind:
            continue
        known = part.key_scales.new_full((len(places), *part.key_scales.shape[1:]), nan)
        _, new_places, old_places = np.intersect1d(
            fresh.segments, part.segments, return_indices=True
        )
        both = (fresh.lengths[new_places] > 0) & (part.lengths[old_places] > 0)
        first, old = (
            on_device(source.first_scales[index[both]], spans.device)
            for source, index in ((spans, new_places), (part.spans, old_places))
        )
        known[first] = part.key_scales[old]
    steps = places.chunk(n_steps)
    scales = [None] * len(steps) if known is None else known.chunk(n_steps)
    pairs = zip(steps, scales, strict=True)
    blocks = [encode_keys(fresh.keys[source], bits, scale, kind) for source, scale in pairs]
    keys, key_scales, exact = (torch.cat(source) for source in zip(*blocks, strict=True))
    return _without_ends(keys, spans), key_scales, exact


def _without_ends(keys: Tensor, spans: Spans) -> Tensor:
    if int(spans.blocks.sum()) * KEY_BLOCK_TOKENS == int(spans.lengths.sum()):
        return keys
    return keys[_gathered(spans.first_scales[:-1] * KEY_BLOCK_TOKENS, spans.lengths, keys.device)]


def by_width(part: Part, counts: Mapping[int, IntArray]) -> Iterator[tuple[int, Part]]:
    """Yield the entries of each width, the widest first, not packed."""
    lengths, width_of = part.lengths, part.width_of
    ensure(_fit(part, counts), _refuse_counts)
    empty = lengths == 0  # segments that are in the widest part
    for width, owned in sorted(counts.items(), reverse=True):
        segments = np.flatnonzero((owned > 0) | empty)
        empty = np.zeros_like(empty)
        if (owned[segments] == lengths[segments]).all():
            if len(segments):
                yield width, replace(part.taken(segments), width_of=None)
            continue
        if width_of is None:
            _refuse_counts()
        places = (width_of == width).nonzero_static(size=int(owned.sum()), fill_value=0)[:, 0]
        n_pages = _most_pages(part)
        segment_part = replace(
            part,
            keys=part.keys[places],
            values=part.values[places],
            tokens=(part.positions if n_pages else part.tokens)[places],
            width_of=None,
            segments=part.segments[segments],
            lengths=owned[segments],
        )
        yield width, segment_part.compact(n_pages * PAGE_TOKENS) if n_pages else segment_part


def _fit(part: Part, counts: Mapping[int, IntArray]) -> Tensor:
    width_of = part.width_of
    fits = torch.tensor(np.array_equal(sum(counts.values()), part.lengths), device="cpu")
    if width_of is None or not fits:
        return fits
    ends = on_device(part.spans.ends, width_of.device)
    fits = fits.to(width_of.device)
    for width, owned in counts.items():
        before = torch.nn.functional.pad((width_of == width).cumsum(0), (1, 0))
        fits = fits & (before[ends] == on_device(np.cumsum(owned), width_of.device)).all()
    return fits


def _refuse_counts() -> NoReturn:
    raise ValueError("entries have other widths than those that are counted")


def packed(
    part: Part,
    counts: Mapping[int, IntArray],
    before: Sequence[Part] = (),
) -> list[Part]:
    """Return numbers of the model's type as they are stored.

    ``counts`` of each width, (n_segments,), add up to the lengths. For ``before`` see `pack`.
    """
    blocks = {bits: -(-owned // KEY_BLOCK_TOKENS) for bits, owned in counts.items()}
    all_blocks = max(sum(int(owned.sum()) for owned in blocks.values()), 1)
    parts = []
    for bits, owned in by_width(part, counts):
        n_blocks = int(blocks[bits].sum())
        n_steps = max(1, min(-(-STEPS * n_blocks // all_blocks), n_blocks // STEP_BLOCKS))
        parts.append(pack(owned, bits, before, n_steps=n_steps))
    return parts


def added(
    stored: Sequence[Part],
    part: Part,
    counts: Mapping[int, IntArray],
) -> list[Part]:
    """Return stored parts with new entries appended; see `packed`.

    New entries of a width that their segment did not have become a part of their own.
    """
    result, more = [], dict(by_width(part, counts))
    for one in stored:
        if (new := more.get(one.bits)) is not None:
            _, here, at_one = np.intersect1d(new.segments, one.segments, return_indices=True)
            lengths = np.zeros_like(one.lengths)
            lengths[at_one] = new.lengths[here]
            more[one.bits] = new.taken(np.setdiff1d(np.arange(len(new.segments)), here))
            if lengths.any():
                same = replace(new.taken(here), segments=one.segments, lengths=lengths)
                if new.pages is not None:
                    pages = np.zeros((len(lengths), new.pages.shape[1]), dtype=np.int64)
                    pages[at_one] = new.pages[here]
                    same = replace(same, pages=pages)
                one = extended(one, same)
        result.append(one)
    for bits, new in more.items():
        if new.lengths.any():
            result.append(pack(new.taken(np.flatnonzero(new.lengths)), bits))
    return result


def extended(part: Part, more: Part) -> Part:
    """Return a part with entries appended to the same segments.

    Stored values stay. A block of keys that was not full is rounded once more.
    """
    old, new = part.lengths, more.lengths

    def appended(stored: Tensor, added: Tensor) -> Tensor:
        return _interleaved((stored, old), (added, new))

    result = replace(part, tokens=appended(part.tokens, more.tokens), lengths=old + new)
    if n_pages := _most_pages(part, more):
        result = replace(result, pages=part.pages_of(n_pages) + more.pages_of(n_pages))
    if part.key_scales is None:
        stored, added = [part.keys, part.values], [more.keys, more.values]
        added = added if stored[0].dtype == added[0].dtype else halved(*added, lengths=new)
        pairs = [_of_a_type(*pair) for pair in zip(stored, added, strict=True)]
        keys, values = (appended(*pair) for pair in pairs)
        return replace(result, keys=keys, values=values)
    last = np.where(new > 0, old % KEY_BLOCK_TOKENS, 0)  # in blocks that are filled now
    stay, spans = old - last, part.spans
    full = -(-stay // KEY_BLOCK_TOKENS)
    device, kind = part.keys.device, part.key_scales.dtype
    unfilled = part.keys[_gathered(spans.starts + stay, last, device)]
    blocks_of = on_device(np.repeat(spans.first_scales[:-1] + full, last), device)
    filling = key_numbers(unfilled, part.key_scales[blocks_of], part.bits).to(more.keys.dtype)
    tail = Spans(last + new, device)
    blocks = _interleaved((filling, last), (more.keys, new))[tail.block_places()]
    keys, key_scales, key_exact = encode_keys(blocks, part.bits, kind=kind)
    values, value_exact = encode_values(more.values, part.bits, kind)
    if len(values):  # a head that is stored in float16 is not small
        fits = fits_float16(torch.cat([key_exact.flatten(), value_exact.flatten()]).abs()[None])
        if not _fits(fits, kind, key_exact, value_exact):
            before = part.unpacked((more.keys, more.values))
            return pack(extended(before, more), part.bits, kind=torch.bfloat16)
    kept_keys = part.keys[_gathered(spans.starts, stay, device)]
    kept_scales = part.key_scales[_gathered(spans.first_scales[:-1], full, device)]
    return replace(
        result,
        keys=_interleaved((kept_keys, stay), (_without_ends(keys, tail), tail.lengths)),
        values=appended(part.values, values),
        key_scales=_interleaved((kept_scales, full), (key_scales, tail.blocks)),
    )


def _of_a_type(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return (one, other) if one.dtype == other.dtype else (one.bfloat16(), other.bfloat16())


def _interleaved(*pieces: tuple[Tensor, IntArray]) -> Tensor:
    divided = [torch.split(tensor, lengths.tolist()) for tensor, lengths in pieces]
    return torch.cat([one for segment in zip(*divided, strict=True) for one in segment])


# A layer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
    """Kept entries in tiles of equal `length`.

    `pieces`, int32, (n_segments, n_pieces, 5), are `Kept.pieces` and the number of tiles up to
    their ends, at most `room`.
    """

    length: int
    room: int
    pieces: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Adjacent segments of equal length in the same parts.

    `pieces` are parts with entries, and the first segment's place in each.
    """

    segments: IntArray
    pieces: list[tuple[Part, int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """Kept entries of all rows and KV heads of a layer.

    A segment is in one part, or several of different widths. `like` are empty keys and values of
    the model's type.
    """

    parts: tuple[Part, ...]
    rows: int
    heads: int
    like: tuple[Tensor, Tensor]

    @cached_property
    def lengths(self) -> IntArray:
        """Entries of each head, (rows, heads)."""
        counts = np.diff(self.pieces[:, :, :2]).sum(axis=(1, 2))
        return np.asarray(counts.reshape(self.rows, self.heads))

    @cached_property
    def pieces(self) -> IntArray:
        """Start, end, first key scale and part of pieces, (n_segments, n_pieces, 4).

        Pieces with turned values come first, empty ones last.
        """
        dim = int(self.like[1].shape[-1])
        rows = []
        for number, part in enumerate(self.parts):
            spans = part.spans
            columns = [spans.starts, spans.ends, spans.first_scales[:-1]]
            plain, indices = (
                np.full(len(spans.ends), x) for x in (not turns(part.bits, dim), number)
            )
            rows.append(np.column_stack([*columns, indices, part.segments, plain]))
        table = np.concatenate([*rows, np.zeros((0, 6), np.int64)])
        table = table[table[:, 1] > table[:, 0]]
        table = table[np.lexsort((-table[:, 3], table[:, 5], table[:, 4]))]
        segments = table[:, 4]
        place = np.arange(len(table)) - np.searchsorted(segments, segments)
        shape = self.rows * self.heads, int(place.max(initial=0)) + 1, 4
        result = np.zeros(shape, dtype=np.int64)
        result[segments, place] = table[:, :4]
        return result

    @cached_property
    def runs(self) -> list[Run]:
        """Runs of all segments."""
        order = np.lexsort(self.pieces[:, ::-1, 3].T)
        starts, ends, _, parts = np.moveaxis(self.pieces[order], 2, 0)
        lengths = ends - starts
        same = (parts[1:] == parts[:-1]) & (lengths[1:] == lengths[:-1]) & (starts[1:] == ends[:-1])
        edges = [0, *(np.flatnonzero(~same.all(axis=1)) + 1).tolist(), len(order)]
        result = []
        for first, last in pairwise(edges):
            owned = [self.parts[number] for number in parts[first][lengths[first] > 0]]
            at = [int(np.searchsorted(part.segments, order[first])) for part in owned]
            segments = order[first:last]
            result.append(Run(segments=segments, pieces=list(zip(owned, at, strict=True))))
        return result

    @property
    def is_rounded(self) -> bool:
        """Whether entries have fewer bits than in the model."""
        return any(part.keys.dtype != self.like[0].dtype for part in self.parts)

    def work(self, length: int) -> Work:
        """Return tiles, made once for each eviction.

        ``length`` is a multiple or a divisor of `KEY_BLOCK_TOKENS`.
        """
        if length not in self._work:
            self._work.clear()
            lengths = np.diff(self.pieces[:, :, :2])
            tiles = np.cumsum(-(-lengths // length)).reshape(lengths.shape)
            self._work[length] = Work(
                length=length,
                room=int(lengths.sum()) // length + lengths.size,
                pieces=on_device(
                    np.concatenate([self.pieces, tiles], axis=2).astype(np.int32),
                    self.like[0].device,
                ),
            )
        return self._work[length]

    @cached_property
    def _work(self) -> dict[int, Work]:
        return {}

    def tensors(self) -> list[Tensor]:
        """Return all tensors, positions and tiles included."""
        stored = [tensor for part in self.parts for tensor in part.tensors()]
        return stored + [one.pieces for one in self._work.values()]

    def _numbers_of(self, rows: IntArray, head: int | None = None) -> IntArray:
        heads = np.arange(self.heads) if head is None else np.array([head])
        return (np.asarray(rows)[:, None] * self.heads + heads).ravel()

    def of_rows(self, rows: IntArray, head: int | None = None) -> list[Part]:
        """Return the segments of different rows."""
        segments = self._numbers_of(rows, head)
        inside = [np.flatnonzero(np.isin(part.segments, segments)) for part in self.parts]
        pairs = zip(self.parts, inside, strict=True)
        return [part.taken(places) for part, places in pairs if len(places)]

    def select(self, rows: IntArray) -> Kept:
        """Let row i go on with row ``rows[i]``."""
        parts, segments = [], self._numbers_of(rows)
        for part in self.parts:
            place = np.full(self.rows * self.heads, -1)
            place[part.segments] = np.arange(len(part.segments))
            places = place[segments]
            taken = part.taken(places[places >= 0])
            parts.append(replace(taken, segments=np.flatnonzero(places >= 0)))
        parts = [part for part in parts if len(part.segments)]
        return replace(self, parts=tuple(parts), rows=len(rows))

    def padded(self, rows: IntArray, head: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and positions of rows, padded at the end to the longest head.

        They have shape (n_rows, n_kv_heads, most, ...). Padding is 0, at `NO_COLUMN`.
        """
        lengths = self.lengths[rows] if head is None else self.lengths[rows, head, None]
        shape = (*lengths.shape, int(lengths.max(initial=0)))
        parts = self.of_rows(rows, head)
        if len(parts) == 1 and (lengths == shape[2]).all():
            whole = parts[0].unpacked(self.like)
            flat = whole.keys, whole.values, whole.positions
            keys, values, positions = (one.view(*shape, *one.shape[1:]) for one in flat)
            return keys, values, positions
        places = int(np.prod(shape))
        keys, values = (tensor.new_zeros(places, tensor.shape[-1]) for tensor in self.like)
        positions = torch.full((places,), NO_COLUMN, dtype=torch.int32, device=keys.device)
        firsts = np.zeros(self.rows * self.heads, dtype=np.int64)
        firsts[self._numbers_of(rows, head)] = np.arange(lengths.size) * shape[2]
        at = []
        for part in parts:
            at.append(_gathered(firsts[part.segments], part.lengths, keys.device))
            positions[at[-1]] = part.positions
            firsts[part.segments] += part.lengths
        if sum(len(part.segments) for part in parts) > lengths.size:  # some heads are in several
            order = positions.view(-1, shape[2]).argsort(dim=1)
            order += torch.arange(0, places, shape[2], device=keys.device)[:, None]
            rank = torch.empty_like(order).flatten()
            rank[order.flatten()] = torch.arange(places, device=keys.device)
            positions, at = positions[order], [rank[one] for one in at]
        for part, owned in zip(parts, at, strict=True):
            unpacked = part.unpacked(self.like)
            keys[owned], values[owned] = unpacked.keys, unpacked.values
        keys, values = (tensor.view(*shape, tensor.shape[-1]) for tensor in (keys, values))
        return keys, values, positions.view(shape)
