"""Entries of KV heads that keep different numbers of them, stored without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS
from kvalloc.shape import HALF_BYTES

__all__ = ["KeptEntries", "Segment", "Spans", "Tiles", "halved"]


def halved(numbers: Tensor) -> Tensor:
    """Return numbers at 16 bits: in float16, or in bfloat16 where any would overflow there.

    Numbers that take no more are returned as they are. Elsewhere the host asks the device once.
    """
    if numbers.itemsize <= HALF_BYTES:
        return numbers
    half = numbers.half()
    return half if bool(half.isfinite().all()) else numbers.bfloat16()


class Segment(NamedTuple):
    """One head's entries of one row, in position order: numbers, or codes as they are stored.

    Attributes
    ----------
    keys : Tensor, (n, head_dim), or of uint8, (n, key_bytes)
        Packed codes are rows of whole bytes.
    values : Tensor, (n, head_dim), or of uint8, (n, value_bytes)
        Packed codes, and after them the row's own scales and minima.
    positions : Tensor of int32, (n,)
        Columns of the row.
    bias : Tensor of float32, (n,), or None
        Added to their logits.
    key_scales : Tensor of float16, (ceil(n / 64), 2, head_dim), or None
        Of codes: scale and minimum of each channel.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor | None = None
    key_scales: Tensor | None = None

    def cut(self, first: int, last: int) -> Segment:
        """The entries from the first, which begins a block, to before the last, as views.

        A block that loses some keeps its scales.
        """
        blocks = slice(first // KEY_BLOCK_TOKENS, -(-last // KEY_BLOCK_TOKENS))
        return Segment(
            keys=self.keys[first:last],
            values=self.values[first:last],
            positions=self.positions[first:last],
            bias=None if self.bias is None else self.bias[first:last],
            key_scales=None if self.key_scales is None else self.key_scales[blocks],
        )

    @classmethod
    def joined(cls, segments: Sequence[Segment]) -> Segment:
        """A copy of one behind the other; of codes, all blocks but the last one's are full."""
        keys, values, positions, bias, scales = zip(*segments, strict=True)
        biases = [
            torch.zeros_like(place, dtype=torch.float32) if own is None else own
            for own, place in zip(bias, positions, strict=True)
        ]
        return cls(
            keys=torch.cat(keys),
            values=torch.cat(values),
            positions=torch.cat(positions),
            bias=None if all(own is None for own in bias) else torch.cat(biases),
            key_scales=None if scales[0] is None else torch.cat(scales),
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
    def first_scales(self) -> IntArray:
        """Which key scale is the first of each segment, and how many there are, (n_segments + 1,).

        Keys at fewer bits have one scale for each `KEY_BLOCK_TOKENS` entries of a segment.
        """
        blocks = -(-self.lengths // KEY_BLOCK_TOKENS)
        found: IntArray = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        return found

    @cached_property
    def table(self) -> Tensor:
        """Start, end and first key scale of each segment, int64, (n_segments, 3)."""
        columns = np.stack([self.starts, self.ends, self.first_scales[:-1]], axis=1)
        return torch.from_numpy(columns.astype(np.int64)).to(self.device)

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
                table=torch.from_numpy(table).to(self.device),
                first=torch.from_numpy(first).to(self.device),
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
        see `Segment`.
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
    @torch.no_grad()
    def of(
        cls,
        segments: Sequence[Sequence[Segment]],
        *,
        bits: int = 16,
        heads: tuple[int, ...] | None = None,
    ) -> KeptEntries:
        """A copy of segments, one a row and head."""
        lengths = [[one.positions.numel() for one in row] for row in segments]
        return cls(
            **Segment.joined([one for row in segments for one in row])._asdict(),
            lengths=np.array(lengths, dtype=np.int64),
            bits=bits,
            heads=heads,
        )

    def halved(self) -> KeptEntries:
        """Return the same with its numbers at 16 bits."""
        return replace(self, keys=halved(self.keys), values=halved(self.values))

    def segment(self, row: int, place: int) -> Segment:
        """One head's entries of one row, as views; ``place`` counts the heads that are here."""
        number = row * self.lengths.shape[1] + place
        own = slice(int(self.spans.starts[number]), int(self.spans.ends[number]))
        scales = self.key_scales
        if scales is not None:
            first, last = self.spans.first_scales[number : number + 2].tolist()
            scales = scales[first:last]
        bias = None if self.bias is None else self.bias[own]
        return Segment(self.keys[own], self.values[own], self.positions[own], bias, scales)

    def rows(self, rows: IntArray) -> KeptEntries:
        """A copy of these rows, ``(n_rows,)``, in this order; a row may come more than once."""
        n_heads, spans = self.lengths.shape[1], self.spans
        entries = [0, *spans.ends[n_heads - 1 :: n_heads].tolist()]
        blocks = spans.first_scales[::n_heads].tolist()

        def taken(own: Tensor, starts: list[int]) -> Tensor:
            return torch.cat([own[starts[row] : starts[row + 1]] for row in rows.tolist()])

        return replace(
            self,
            keys=taken(self.keys, entries),
            values=taken(self.values, entries),
            positions=taken(self.positions, entries),
            bias=None if self.bias is None else taken(self.bias, entries),
            key_scales=None if self.key_scales is None else taken(self.key_scales, blocks),
            lengths=self.lengths[rows],
        )
