"""Kept entries of one layer at 16, 8, 4 or 3 bits, each KV head as the profile says.

The layout is ours, not that of optimum-quanto or torchao: theirs are tensors of one shape, with
scales of the model's type, while heads and rows here keep different numbers of entries and each
byte, scales included, has to be the one that the budget was decided with
(`kvalloc.accounting.costs`).
The rounding itself is the measured one (`kvalloc.runtime.quantization`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, VALUE_BLOCK_CHANNELS, key_bits
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime.kept import FlatEntries, Piece, RaggedEntries
from kvalloc.runtime.quantization import from_codes, key_codes, rotated, value_codes

__all__ = [
    "PackedEntries",
    "PackedHeads",
    "Segment",
    "key_numbers",
    "packed_layers",
    "value_numbers",
]


def packed_layers(profile: BudgetProfile) -> dict[int, IntArray]:
    """Bits of each KV head, (n_kv_heads,), of the layers that have fewer than 16 anywhere."""
    if profile.bits is None:
        return {}
    full = profile.shape.full_layers
    return {layer: profile.bits[layer] for layer in full if (profile.bits[layer] != 16).any()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One head's entries of one row, as they are stored.

    Attributes
    ----------
    keys : Tensor, (n, key_bytes) of uint8, or (n, head_dim) at 16 bits
        Packed codes, a row to a whole byte.
    values : Tensor, (n, value_bytes) of uint8, or (n, head_dim) at 16 bits
        Packed codes, and after them the row's own scales and minima.
    key_scales : Tensor of float16, (ceil(n / 64), 2, head_dim)
        None at 16 bits.
    positions : Tensor of int32, (n,)
    bias : Tensor of float32, (n,), or None
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    positions: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, piece: Piece, bits: int) -> Segment:
        """Round and pack what is kept of a piece."""
        keys, values, positions, bias, kept = piece
        keys, values = keys.index_select(0, kept), values.index_select(0, kept)
        positions = positions.index_select(0, kept)
        bias = None if bias is None else bias.index_select(0, kept)
        if bits == 16:
            return cls(keys=keys, values=values, key_scales=None, positions=positions, bias=bias)
        codes, key_scales = key_codes(keys, bits)
        own_codes, scales = value_codes(values, bits)
        rows = [packed_codes(own_codes, bits), scales.flatten(1).contiguous().view(torch.uint8)]
        return cls(
            keys=packed_codes(codes, key_bits(bits)),
            values=torch.cat(rows, dim=1),
            key_scales=key_scales,
            positions=positions,
            bias=bias,
        )

    def first(self, count: int) -> Segment:
        """The first entries; a block that loses some keeps its scales."""
        scales = self.key_scales
        return Segment(
            keys=self.keys[:count],
            values=self.values[:count],
            key_scales=None if scales is None else scales[: -(-count // KEY_BLOCK_TOKENS)],
            positions=self.positions[:count],
            bias=None if self.bias is None else self.bias[:count],
        )

    def and_then(self, other: Segment) -> Segment:
        """Another segment behind this one, whose last block is full."""
        scales = None
        if self.key_scales is not None and other.key_scales is not None:
            scales = torch.cat([self.key_scales, other.key_scales])
        bias = None
        if self.bias is not None:
            more = torch.zeros_like(other.positions, dtype=torch.float32)
            bias = torch.cat([self.bias, more if other.bias is None else other.bias])
        return Segment(
            keys=torch.cat([self.keys, other.keys]),
            values=torch.cat([self.values, other.values]),
            key_scales=scales,
            positions=torch.cat([self.positions, other.positions]),
            bias=bias,
        )


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (n, head_dim) as bytes, the first channel in the lowest bits.

    At 4 bits two to a byte, at 3 bits eight to three bytes.
    """
    if bits == 8:
        return codes.contiguous()
    if bits == 3:
        n_bytes, places = -(-codes.shape[1] * 3 // 8), torch.arange(8, device=codes.device)
        whole = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).int()
        groups = whole.view(len(codes), whole.shape[1] // 8, 8)
        words = (groups << 3 * places).sum(dim=-1, keepdim=True)
        return torch.bitwise_and(words >> 8 * places[:3], 255).byte().flatten(1)[:, :n_bytes]
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def unpacked_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Codes (n, head_dim) of `packed_codes`."""
    if bits == 8:
        return packed
    if bits == 3:
        places = torch.arange(8, device=packed.device)
        whole = torch.nn.functional.pad(packed, (0, -packed.shape[1] % 3)).int()
        groups = whole.view(len(packed), whole.shape[1] // 3, 3)
        words = (groups << 8 * places[:3]).sum(dim=-1, keepdim=True)
        return torch.bitwise_and(words >> 3 * places, 7).flatten(1)[:, :head_dim]
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :head_dim]


def key_numbers(rows: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Keys of one segment, float32, (n, head_dim).

    Parameters
    ----------
    rows : Tensor of uint8, (n, key_bytes)
    scales : Tensor of float16, (ceil(n / 64), 2, head_dim)
    bits : int
        8, 4 or 3.
    """
    codes = unpacked_codes(rows, key_bits(bits), int(scales.shape[-1]))
    whole = torch.nn.functional.pad(codes, (0, 0, 0, -len(rows) % KEY_BLOCK_TOKENS))
    blocks = whole.view(-1, KEY_BLOCK_TOKENS, whole.shape[1])
    return from_codes(blocks, scales[:, :1], scales[:, 1:]).flatten(0, 1)[: len(rows)]


def value_numbers(rows: Tensor, bits: int, head_dim: int) -> Tensor:
    """Values, float32, (n, head_dim), of packed rows with their scales, (n, value_bytes).

    At 3 bits they are still `kvalloc.runtime.quantization.rotated`.
    """
    n_bytes = -(-head_dim * bits // 8)
    # A copy even of one row: float16 cannot begin at an odd byte.
    scales = rows[:, n_bytes:].clone(memory_format=torch.contiguous_format).view(torch.float16)
    scales = scales.view(len(rows), scales.shape[1] // 2, 2)
    codes = unpacked_codes(rows[:, :n_bytes], bits, head_dim)
    width = min(VALUE_BLOCK_CHANNELS, head_dim)
    whole = torch.nn.functional.pad(codes, (0, -head_dim % width))
    blocks = whole.view(len(rows), scales.shape[1], width)
    return from_codes(blocks, scales[..., :1], scales[..., 1:]).flatten(1)[:, :head_dim]


@dataclass(frozen=True, kw_only=True)
class PackedHeads:
    """The heads of a layer that are stored at one width.

    Attributes
    ----------
    bits : int
        16, 8, 4 or 3.
    heads : tuple of int
        KV heads of the layer, rising.
    codes : RaggedEntries
        Packed rows of keys and values, see `Segment`, in the order of ragged entries.
    key_scales : Tensor of float16, (n_key_blocks, 2, head_dim), or None
        Those of one segment after those of another; None at 16 bits.
    like : tuple of Tensor
        Keys and values (0, head_dim): sizes and type of what was rounded.
    """

    bits: int
    heads: tuple[int, ...]
    codes: RaggedEntries
    key_scales: Tensor | None
    like: tuple[Tensor, Tensor]

    @classmethod
    def collect(
        cls,
        segments: list[list[Segment]],
        *,
        bits: int,
        heads: tuple[int, ...],
        like: tuple[Tensor, Tensor],
    ) -> PackedHeads:
        """Copy segments, one a row and head, into storage of their own."""
        counts = np.array([[int(s.positions.numel()) for s in row] for row in segments])

        def piece(row: int, head: int) -> Piece:
            own = segments[row][head]
            every = torch.arange(own.positions.numel(), device=own.positions.device)
            return own.keys, own.values, own.positions, own.bias, every

        biased = any(one.bias is not None for row in segments for one in row)
        codes = RaggedEntries.collect(counts.astype(np.int64), piece, biased=biased)
        scales = None
        if bits != 16:
            parts = [one.key_scales for row in segments for one in row]
            scales = torch.cat([one for one in parts if one is not None])
        return cls(bits=bits, heads=heads, codes=codes, key_scales=scales, like=like)

    def segment(self, row: int, place: int) -> Segment:
        """One head's entries of one row; ``place`` counts these heads."""
        keys, values, positions, bias, _ = self.codes.piece(row, place)
        scales = None
        if self.key_scales is not None:
            number = row * len(self.heads) + place
            first, last = self.codes.spans.first_scales[number : number + 2].tolist()
            scales = self.key_scales[first:last]
        return Segment(keys=keys, values=values, key_scales=scales, positions=positions, bias=bias)

    def piece(self, row: int, place: int) -> Piece:
        """One segment's numbers."""
        one, (keys, values) = self.segment(row, place), self.like
        every = torch.arange(one.positions.numel(), device=one.positions.device)
        if one.key_scales is None:
            return one.keys, one.values, one.positions, one.bias, every
        found = value_numbers(one.values, self.bits, int(values.shape[-1]))
        return (
            key_numbers(one.keys, one.key_scales, self.bits).to(keys.dtype),
            (rotated(found) if self.bits == 3 else found).to(values.dtype),
            one.positions,
            one.bias,
            every,
        )

    @cached_property
    def flat(self) -> FlatEntries:
        """The same as attention reads it."""
        (own,) = self.codes.flat
        return replace(own, bits=self.bits, key_scales=self.key_scales, heads=self.heads)


@dataclass(frozen=True, kw_only=True)
class PackedEntries:
    """Kept entries of one layer, at the bits of each of its KV heads.

    Attributes
    ----------
    parts : tuple of PackedHeads
        One a width, the widest first.
    """

    parts: tuple[PackedHeads, ...]

    @classmethod
    @torch.no_grad()
    def collect(
        cls, counts: IntArray, piece: Callable[[int, int], Piece], bits: IntArray
    ) -> PackedEntries:
        """Round and pack the kept entries of every row and head.

        Parameters
        ----------
        counts : ndarray of int64, (batch, n_kv_heads)
            Entries that each segment keeps.
        piece : callable
            As for `RaggedEntries.collect`; asked once for each, in order.
        bits : ndarray of int64, (n_kv_heads,)
            16, 8, 4 or 3.
        """
        segments: list[list[Segment]] = []
        like: tuple[Tensor, Tensor] | None = None
        for row in range(counts.shape[0]):
            own = []
            for head in range(counts.shape[1]):
                found = piece(row, head)
                like = (found[0][:0].clone(), found[1][:0].clone()) if like is None else like
                own.append(Segment.of(found, int(bits[head])))
            segments.append(own)
        assert like is not None, "a cache has at least one row and one head"
        return cls.of(segments, bits, like)

    @classmethod
    def of(
        cls, segments: list[list[Segment]], bits: IntArray, like: tuple[Tensor, Tensor]
    ) -> PackedEntries:
        """Segments, one a row and KV head, in storage of their own."""
        parts = []
        for width in sorted({int(each) for each in bits}, reverse=True):
            heads = tuple(np.flatnonzero(bits == width).tolist())
            mine = [[row[head] for head in heads] for row in segments]
            parts.append(PackedHeads.collect(mine, bits=width, heads=heads, like=like))
        return cls(parts=tuple(parts))

    @cached_property
    def _places(self) -> list[tuple[PackedHeads, int]]:
        """Where each KV head is."""
        owners = {head: (part, n) for part in self.parts for n, head in enumerate(part.heads)}
        return [owners[head] for head in range(len(owners))]

    @property
    def bits(self) -> IntArray:
        """Width of each KV head, (n_kv_heads,)."""
        return np.array([part.bits for part, _ in self._places], dtype=np.int64)

    @cached_property
    def lengths(self) -> IntArray:
        """Entries of each row and head, (batch, n_kv_heads)."""
        columns = [part.codes.lengths[:, place] for part, place in self._places]
        found: IntArray = np.stack(columns, axis=1)
        return found

    @cached_property
    def flat(self) -> tuple[FlatEntries, ...]:
        """The same as attention reads it, one a width."""
        if len(self.parts) == 1:
            return (replace(self.parts[0].flat, heads=None),)
        return tuple(part.flat for part in self.parts)

    def tensors(self) -> list[Tensor]:
        """All K and V storage, scales included."""
        found = []
        for part in self.parts:
            found += part.codes.tensors()
            found += [] if part.key_scales is None else [part.key_scales]
        return found

    def nothing(self) -> tuple[Tensor, Tensor]:
        """Dense keys and values of no token, (batch, n_kv_heads, 0, head_dim)."""
        keys, values = self.parts[0].like
        shape = (*self.lengths.shape, 0)
        return keys.new_empty(*shape, keys.shape[-1]), values.new_empty(*shape, values.shape[-1])

    def piece(self, row: int, head: int) -> Piece:
        """One segment's numbers in position order."""
        part, place = self._places[head]
        return part.piece(row, place)

    def padded_positions(self) -> Tensor:
        """Columns of each segment, (batch, n_kv_heads, most); -1 beyond a segment's end."""
        first = self.parts[0].codes.positions
        found = first.new_full((*self.lengths.shape, int(self.lengths.max())), -1)
        for row, head in np.ndindex(*self.lengths.shape):
            part, place = self._places[head]
            found[row, head, : self.lengths[row, head]] = part.codes.piece(row, place)[2]
        return found

    def _segments(self) -> list[list[Segment]]:
        return [
            [part.segment(row, place) for part, place in self._places]
            for row in range(self.lengths.shape[0])
        ]

    def rows(self, indices: Tensor) -> PackedEntries:
        """A copy of these rows, ``(n_rows,)``, in this order; a row may come more than once."""
        own = self._segments()
        chosen = [own[row] for row in indices.tolist()]
        return self.of(chosen, self.bits, self.parts[0].like)

    def before(self, column: int) -> PackedEntries:
        """A copy without the entries from this column on."""
        cut = [
            [one.first(int((one.positions < column).sum())) for one in row]
            for row in self._segments()
        ]
        return self.of(cut, self.bits, self.parts[0].like)

    @torch.no_grad()
    def and_then(
        self, keys: Tensor, values: Tensor, positions: Tensor, shown: Tensor
    ) -> PackedEntries:
        """A copy with more entries behind.

        They are rounded; and a block of keys that was not full once more with those that fill it.

        Parameters
        ----------
        keys, values : Tensor, (batch, n_kv_heads, n, head_dim)
        positions : Tensor of int32, (n,)
        shown : Tensor of bool, (batch, n)
            False marks padding, which is left out.
        """
        segments = []
        for row in range(self.lengths.shape[0]):
            new = shown[row].nonzero()[:, 0]
            own = []
            for head, (part, place) in enumerate(self._places):
                before = part.segment(row, place)
                count = int(before.positions.numel())
                full = count if part.bits == 16 else count // KEY_BLOCK_TOKENS * KEY_BLOCK_TOKENS
                rest = part.piece(row, place)
                more = (
                    torch.cat([rest[0][full:], keys[row, head].index_select(0, new)]),
                    torch.cat([rest[1][full:], values[row, head].index_select(0, new)]),
                    torch.cat([before.positions[full:], positions.index_select(0, new)]),
                )
                bias = None
                if before.bias is not None:
                    bias = torch.nn.functional.pad(before.bias[full:], (0, int(new.numel())))
                every = torch.arange(more[0].shape[0], device=new.device)
                added = Segment.of((*more, bias, every), part.bits)
                if full < count:  # values are rounded by token: those that were stay as they are
                    kept = before.values[full:]
                    changed = torch.cat([kept, added.values[kept.shape[0] :]])
                    added = replace(added, values=changed)
                own.append(before.first(full).and_then(added))
            segments.append(own)
        return self.of(segments, self.bits, self.parts[0].like)
