"""Entries of KV heads that keep different numbers of them, stored without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS
from kvalloc.shape import HALF_BYTES

__all__ = ["KeptEntries", "Segment", "Spans", "Tiles", "halved", "interleaved", "on_device"]


def halved(numbers: Tensor) -> Tensor:
    """Return numbers at 16 bits: in float16, or in bfloat16 where any would overflow there.

    Numbers that take no more are returned as they are. Elsewhere the host asks the device once.
    """
    if numbers.itemsize <= HALF_BYTES:
        return numbers
    half = numbers.half()
    return half if bool(half.isfinite().all()) else numbers.bfloat16()


def interleaved(*sources: tuple[Tensor, IntArray, IntArray]) -> Tensor:
    """Return a copy of what tensors have of each segment, one behind the other.

    Parameters
    ----------
    sources : tuple of (Tensor, ndarray of int64, ndarray of int64)
        A tensor, how many of its numbers are taken of each segment, and how many that stand behind
        these are left out, (n_segments,) each.
    """
    taken = [
        torch.split(own, np.stack([taken, left], axis=1).ravel().tolist())[::2]
        for own, taken, left in sources
    ]
    return torch.cat([one for segment in zip(*taken, strict=True) for one in segment])


def on_device(numbers: IntArray, device: torch.device) -> Tensor:
    """Return a tensor of numbers, without a wait for the device."""
    return torch.from_numpy(numbers).to(device, non_blocking=device.type == "cuda")


class Segment(NamedTuple):
    """Numbers of one head's entries of one row, in position order.

    Attributes
    ----------
    keys, values : Tensor, (n, head_dim) and (n, value_dim)
    positions : Tensor of int32, (n,)
        Columns of the row.
    bias : Tensor of float32, (n,), or None
        Added to their logits.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor | None = None

    @classmethod
    def joined(cls, segments: Sequence[Segment]) -> Segment:
        """Return a copy of one behind the other."""
        keys, values, positions, bias = zip(*segments, strict=True)
        biases = [
            torch.zeros_like(place, dtype=torch.float32) if own is None else own
            for own, place in zip(bias, positions, strict=True)
        ]
        return cls(
            keys=torch.cat(keys),
            values=torch.cat(values),
            positions=torch.cat(positions),
            bias=None if all(own is None for own in bias) else torch.cat(biases),
        )


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
        found: IntArray = -(-self.lengths // KEY_BLOCK_TOKENS)
        return found

    @property
    def padding(self) -> IntArray:
        """Entries that each segment's last block of keys has room for, (n_segments,)."""
        found: IntArray = -self.lengths % KEY_BLOCK_TOKENS
        return found

    @property
    def block_lengths(self) -> IntArray:
        """Entries of each block of keys, (n_blocks,): as many as fit, but for a segment's last."""
        found = np.full(int(self.blocks.sum()), KEY_BLOCK_TOKENS)
        some = self.lengths > 0
        found[self.first_scales[1:][some] - 1] -= self.padding[some]
        return found

    @property
    def block_places(self) -> IntArray:
        """Where the entries of each block are, (n_blocks, 64); a short one repeats its last."""
        lengths = self.block_lengths[:, None]
        column = np.minimum(np.arange(KEY_BLOCK_TOKENS), lengths - 1)
        return np.cumsum(lengths)[:, None] - lengths + column

    @cached_property
    def first_scales(self) -> IntArray:
        """Which key scale is the first of each segment, and how many there are, (n_segments + 1,).

        Keys at fewer bits have one scale for each block.
        """
        found: IntArray = np.concatenate([[0], np.cumsum(self.blocks)]).astype(np.int64)
        return found

    @cached_property
    def table(self) -> Tensor:
        """Start, end and first key scale of each segment, int64, (n_segments, 3)."""
        columns = np.stack([self.starts, self.ends, self.first_scales[:-1]], axis=1)
        return on_device(columns.astype(np.int64), self.device)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Segments, first and after the last, that are equally long."""
        first = [0, *(np.flatnonzero(np.diff(self.lengths)) + 1).tolist()]
        return list(zip(first, [*first[1:], len(self.lengths)], strict=True))

    def tiles(self, length: int) -> Tiles:
        """The same cut into tiles of so many entries, a multiple of `KEY_BLOCK_TOKENS`."""
        if length not in self._tiles:
            counts = -(-self.lengths // length)
            first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            segments = np.repeat(np.arange(len(counts)), counts)
            before = (np.arange(len(segments)) - first[segments]) * length
            starts = self.starts[segments] + before
            ends = np.minimum(starts + length, self.ends[segments])
            scales = self.first_scales[segments] + before // KEY_BLOCK_TOKENS
            table = np.stack([segments, starts, ends, scales], axis=1).astype(np.int64)
            self._tiles[length] = Tiles(
                count=len(segments),
                table=on_device(table, self.device),
                first=on_device(first, self.device),
            )
        return self._tiles[length]

    @cached_property
    def _tiles(self) -> dict[int, Tiles]:
        return {}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tiles:
    """Kept entries in pieces of equal length, of which a program reads one each.

    Attributes
    ----------
    count : int
        How many there are.
    table : Tensor of int64, (count, 4)
        Segment, start, end and first key scale of each; those of one segment follow each other.
    first : Tensor of int64, (n_segments + 1,)
        Which tile is the first of each segment, and how many there are.
    """

    count: int
    table: Tensor
    first: Tensor


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
    bias : Tensor of float32, (n_entries,), or None
        Added to their logits.
    bits : int
        Of `kvalloc.accounting.costs.WIDTHS`.
    key_scales : Tensor of float16, (n_key_blocks, 2, head_dim), or None
        Those of one segment after those of another; None at 16 bits.
    heads : tuple of int, or None
        Which KV heads of the layer these are; None for all.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: IntArray
    bias: Tensor | None = None
    bits: int = 16
    key_scales: Tensor | None = None
    heads: tuple[int, ...] | None = None

    @cached_property
    def spans(self) -> Spans:
        """Where each segment is."""
        return Spans(self.lengths.reshape(-1), self.keys.device)

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, positions: Tensor, kept: Tensor, counts: IntArray
    ) -> KeptEntries:
        """Return a copy of what is kept of dense entries, without a wait for the device.

        Parameters
        ----------
        keys, values : Tensor, (batch, n_kv_heads, n, head_dim)
        positions : Tensor of int32, (n,)
        kept : Tensor of bool, (batch, n_kv_heads, n)
            Which entries these are, on any device.
        counts : ndarray of int64, (batch, n_kv_heads)
            How many are kept of each segment.
        """
        places = kept.nonzero_static(size=int(counts.sum()))
        row, head, token = places.to(keys.device, non_blocking=True).unbind(1)
        return cls(
            keys=keys[row, head, token],
            values=values[row, head, token],
            positions=positions[token],
            lengths=counts,
        )

    def halved(self) -> KeptEntries:
        """Return the same with its numbers at 16 bits."""
        return replace(self, keys=halved(self.keys), values=halved(self.values))

    def rows(self, rows: IntArray) -> KeptEntries:
        """Return a copy of these rows, ``(n_rows,)``; one may come more than once."""
        return self.segments(self._numbers[rows])

    def of_heads(self, heads: Sequence[int]) -> KeptEntries:
        """Return a copy of these KV heads, by their places here; itself if these are all."""
        if list(heads) == list(range(self.lengths.shape[1])):
            return replace(self, heads=tuple(heads))
        return replace(self.segments(self._numbers[:, list(heads)]), heads=tuple(heads))

    def segments(self, numbers: IntArray) -> KeptEntries:
        """Return a copy of the segments of these numbers, ``(n_rows, n_heads)``."""

        def chosen(own: Tensor, lengths: IntArray) -> Tensor:
            pieces = torch.split(own, lengths.tolist())
            return torch.cat([pieces[number] for number in numbers.ravel().tolist()])

        spans = self.spans
        own = self._copied(
            partial(chosen, lengths=spans.lengths), partial(chosen, lengths=spans.blocks)
        )
        return replace(own, lengths=self.lengths.reshape(-1)[numbers])

    def first(self, counts: IntArray) -> KeptEntries:
        """Return a copy of the first so many of each segment, ``(batch, n_kv_heads)``.

        A block of keys that loses some keeps its scales.
        """
        spans, left = self.spans, counts.reshape(-1)
        blocks = -(-left // KEY_BLOCK_TOKENS)
        own = self._copied(
            lambda own: interleaved((own, left, spans.lengths - left)),
            lambda scales: interleaved((scales, blocks, spans.blocks - blocks)),
        )
        return replace(own, lengths=counts)

    @property
    def _numbers(self) -> IntArray:
        """Number of each segment, (batch, n_kv_heads)."""
        return np.arange(self.lengths.size).reshape(self.lengths.shape)

    def _copied(
        self, entries: Callable[[Tensor], Tensor], scales: Callable[[Tensor], Tensor]
    ) -> KeptEntries:
        """Return what one function takes of entries, and another of key scales."""
        return replace(
            self,
            keys=entries(self.keys),
            values=entries(self.values),
            positions=entries(self.positions),
            bias=None if self.bias is None else entries(self.bias),
            key_scales=None if self.key_scales is None else scales(self.key_scales),
        )
