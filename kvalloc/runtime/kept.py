"""Entries of KV heads that keep different numbers of them, stored without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS
from kvalloc.shape import HALF_BYTES

SHORTEST_TILE = 16
"""Entries that are worth a program: as few as tensor cores multiply."""

FLOAT16_END = 65520.0
"""Numbers from here on are infinite in float16."""

LEAST_NUMBER, LEAST_CHANNEL = 2.0**-14, 2.0**-20
"""Below 2**-14 float16 loses digits, and has fewer than bfloat16 from 2**-17 on."""


def halved(*numbers: Tensor, lengths: IntArray) -> list[Tensor]:
    """Return numbers at 16 bits: each in float16, or in bfloat16 where float16 does not hold them.

    That is if any would overflow, or if all of a segment are so small that they lose digits.
    Numbers that take no more are returned as they are. Elsewhere the host asks the device once.
    """
    if all(own.itemsize <= HALF_BYTES for own in numbers) or not lengths.any():
        return [own if own.itemsize <= HALF_BYTES else own.half() for own in numbers]
    fits = torch.stack([_fits_float16(segment_max(own.abs(), lengths)) for own in numbers])
    pairs = zip(numbers, fits.tolist(), strict=True)
    return [own.half() if fit else own.bfloat16() for own, fit in pairs]


def _fits_float16(channels: Tensor) -> Tensor:
    """Return whether float16 holds numbers, of which these are the largest of segment and channel.

    A segment must not be all below `LEAST_NUMBER`, nor a channel below `LEAST_CHANNEL`.
    """
    heads = channels.amax(dim=1)
    small = (heads > 0) & (heads < LEAST_NUMBER)
    fits: Tensor = ((heads < FLOAT16_END) & ~small).all()
    return fits & ~((channels > 0) & (channels < LEAST_CHANNEL)).any()


def segment_max(numbers: Tensor, lengths: IntArray) -> Tensor:
    """Return the largest of each segment that has rows, of so many rows each, by column."""
    counts = lengths[lengths > 0]
    if numbers.is_cpu:  # several times as fast there
        return torch.stack([own.amax(dim=0) for own in torch.split(numbers, counts.tolist())])
    lengths_there = on_device(counts, numbers.device)
    return torch.segment_reduce(numbers, "max", lengths=lengths_there, unsafe=True)


def on_device(numbers: IntArray, device: torch.device) -> Tensor:
    """Return a tensor of numbers, without a wait for the device."""
    return torch.from_numpy(numbers).to(device, non_blocking=device.type == "cuda")


def parted(
    own: Tensor, counts: IntArray, lengths: IntArray
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the first so many of each segment of a tensor, and the rest of each, as views.

    Parameters
    ----------
    own : Tensor, (n, ...)
    counts, lengths : ndarray of int64, (n_segments,)
        How many are the first of each segment, and how many it has.
    """
    pieces = torch.split(own, np.stack([counts, lengths - counts], axis=1).ravel().tolist())
    return pieces[::2], pieces[1::2]


@dataclass(frozen=True, eq=False)
class Spans:
    """Where the entries of each segment are; made once for each eviction.

    Attributes
    ----------
    lengths : ndarray of int64, (n_segments,)
        Entries of each segment; one follows the other.
    device : torch.device
        Where the entries are.
    """

    lengths: IntArray
    device: torch.device

    @cached_property
    def ends(self) -> IntArray:
        """The entry after the last of each segment, (n_segments,)."""
        return np.cumsum(self.lengths)

    @cached_property
    def starts(self) -> IntArray:
        """The first entry of each segment, (n_segments,)."""
        return self.ends - self.lengths

    @cached_property
    def blocks(self) -> IntArray:
        """Blocks of keys of each segment, (n_segments,): of `KEY_BLOCK_TOKENS` entries each."""
        return np.asarray(-(-self.lengths // KEY_BLOCK_TOKENS))

    @cached_property
    def first_scales(self) -> IntArray:
        """Which key scale is the first of each segment, and how many there are, (n_segments + 1,).

        Keys at fewer bits have one scale for each block.
        """
        return np.concatenate([[0], np.cumsum(self.blocks)]).astype(np.int64)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Segments, first and after the last, that are equally long."""
        first = [0, *(np.flatnonzero(np.diff(self.lengths)) + 1).tolist()]
        return list(zip(first, [*first[1:], len(self.lengths)], strict=True))

    def key_blocks(self) -> tuple[IntArray, IntArray]:
        """Return the first entry of each block of keys and the one after its last, (n_blocks,)."""
        own = np.repeat(np.arange(len(self.blocks)), self.blocks)
        place = np.arange(len(own)) - self.first_scales[own]  # of each block in its segment
        starts = self.starts[own] + place * KEY_BLOCK_TOKENS
        return starts, np.minimum(starts + KEY_BLOCK_TOKENS, self.ends[own])

    def block_places(self) -> Tensor:
        """Return the entries of each block of keys, (n_blocks, 64); a short one repeats its end."""
        starts, ends = self.key_blocks()
        places = np.minimum(starts[:, None] + np.arange(KEY_BLOCK_TOKENS), ends[:, None] - 1)
        return on_device(places, self.device)


@dataclass(frozen=True, kw_only=True)
class KeptEntries:
    """Kept entries of one layer's heads of one width, as every backend of attention reads them.

    Flat: a segment a row and KV head, that of row b and head h number ``b * n_kv_heads + h``, back
    to back and in position order. Equal budgets are the case of equal lengths; nothing is padded.
    Keys and values are in storage of their own, not one entry larger.

    Attributes
    ----------
    keys, values : Tensor, (n_entries, head_dim) and (n_entries, value_dim)
        Contiguous. Numbers of the model's type, or `halved`; at fewer bits packed rows of uint8,
        of values with the row's own scales and minima behind.
    positions : Tensor of int32, (n_entries,)
        Where in the row's columns each entry stood.
    lengths : ndarray of int64, (batch, n_kv_heads)
        Entries of each segment.
    bits : int
        Of `kvalloc.accounting.costs.WIDTHS`.
    key_scales : Tensor of float16 or bfloat16, (n_key_blocks, 2, head_dim), or None
        Those of one segment after those of another; None at 16 bits. Those of values have its type.
    heads : tuple of int, or None
        Which KV heads of the layer these are; None for all.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: IntArray
    bits: int = 16
    key_scales: Tensor | None = None
    heads: tuple[int, ...] | None = None

    @cached_property
    def spans(self) -> Spans:
        """Where each segment is."""
        return Spans(self.lengths.reshape(-1), self.keys.device)

    def halved(self) -> KeptEntries:
        """Return the same with its numbers at 16 bits."""
        keys, values = halved(self.keys, self.values, lengths=self.spans.lengths)
        return replace(self, keys=keys, values=values)

    @property
    def segment_numbers(self) -> IntArray:
        """Number of each segment, (batch, n_kv_heads)."""
        return np.arange(self.lengths.size).reshape(self.lengths.shape)

    def segments(self, numbers: IntArray) -> KeptEntries:
        """Return a copy of the segments of these numbers, ``(n_rows, n_heads)``."""
        spans = self.spans

        def copied(own: Tensor, firsts: IntArray, counts: IntArray) -> Tensor:
            pairs = zip(firsts[numbers.ravel()], counts[numbers.ravel()], strict=True)
            return torch.cat([own[first : first + count] for first, count in pairs])

        found: dict[str, Any] = {}
        for name in ("keys", "values", "positions"):
            found[name] = copied(getattr(self, name), spans.starts, spans.lengths)
        if self.key_scales is not None:
            found["key_scales"] = copied(self.key_scales, spans.first_scales, spans.blocks)
        return replace(self, **found, lengths=spans.lengths[numbers])

    def of_rows(self, rows: IntArray) -> KeptEntries:
        """Return a copy of these rows, (n_rows,), in this order; one may come more than once."""
        return self.segments(self.segment_numbers[rows])

    def of_heads(self, heads: Sequence[int]) -> KeptEntries:
        """Return the KV heads at these places: a copy, or the same entries if these are all."""
        every = list(heads) == list(range(self.lengths.shape[1]))
        found = self if every else self.segments(self.segment_numbers[:, list(heads)])
        return replace(found, heads=tuple(heads))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Work:
    """Kept entries of a layer in tiles of equal length, of which a program reads one each.

    Attributes
    ----------
    length : int
        Entries of a tile, at most.
    room : int
        Tiles of as many entries in as many segments, at most; how many there are says the last
        segment.
    segments : Tensor of int32, (n_segments, 5)
        Start, end, first key scale and part of each segment, and tiles up to its end.
    """

    length: int
    room: int
    segments: Tensor


WORK_BYTES = 20
"""Bytes of a segment in `Work`."""


@dataclass(frozen=True, eq=False)
class KeptLayer:
    """Kept entries of all KV heads of a layer.

    Attributes
    ----------
    parts : tuple of KeptEntries
        One for the heads of each width.
    """

    parts: tuple[KeptEntries, ...]

    @cached_property
    def spans(self) -> IntArray:
        """Start, end, first key scale and part of each segment, (n_segments, 4)."""
        n_heads = sum(part.lengths.shape[1] for part in self.parts)
        found = np.empty((len(self.parts[0].lengths), n_heads, 4), dtype=np.int64)
        for number, part in enumerate(self.parts):
            own, heads = part.spans, list(part.heads or range(n_heads))
            columns = np.stack([own.starts, own.ends, own.first_scales[:-1]], axis=1)
            found[:, heads, :3] = columns.reshape(*part.lengths.shape, 3)
            found[:, heads, 3] = number
        return found.reshape(-1, 4)

    def work(self, length: int) -> Work:
        """Return tiles of so many entries, made once for each eviction; the latest are kept.

        Parameters
        ----------
        length : int
            A multiple of `KEY_BLOCK_TOKENS`, or what divides it.
        """
        if length not in self._work:
            self._work.clear()
            lengths = self.spans[:, 1] - self.spans[:, 0]
            segments = np.column_stack([self.spans, np.cumsum(-(-lengths // length))])
            self._work[length] = Work(
                length=length,
                room=int(lengths.sum()) // length + len(lengths),
                segments=on_device(segments.astype(np.int32), self.parts[0].keys.device),
            )
        return self._work[length]

    def tensors(self) -> list[Tensor]:
        """Return what is stored beside the entries for reading them."""
        return [one.segments for one in self._work.values()]

    @cached_property
    def _work(self) -> dict[int, Work]:
        return {}
