"""Kept entries of one layer, each KV head at the bits that the profile says.

The layout is ours, not that of optimum-quanto or torchao: theirs are tensors of one shape, with
scales of the model's type, while heads and rows here keep different numbers of entries and each
byte, scales included, has to be the one that the budget was decided with
(`kvalloc.accounting.costs`).
The rounding itself is the measured one (`kvalloc.runtime.quantization`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, VALUE_BLOCK_CHANNELS, WIDTHS
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime.kept import KeptEntries, Segment
from kvalloc.runtime.quantization import from_codes, key_codes, rotated, value_codes

__all__ = ["LayerEntries", "key_numbers", "pack", "rounded_layers", "value_numbers"]


def rounded_layers(profile: BudgetProfile, *, every: bool) -> dict[int, IntArray]:
    """Return the bits of each KV head, (n_kv_heads,), of the layers that are rounded.

    Parameters
    ----------
    profile : BudgetProfile
    every : bool
        Whether all layers are, to 16 bits at least; else those with fewer bits anywhere.
    """
    widths = np.full_like(profile.budgets, 16) if profile.bits is None else profile.bits
    full = profile.shape.full_layers
    return {layer: widths[layer] for layer in full if every or (widths[layer] != 16).any()}


def pack(numbers: Segment, bits: int) -> Segment:
    """Round and pack a segment."""
    if bits == 16:
        return numbers
    keys, key_scales = key_codes(numbers.keys, bits)
    values, scales = value_codes(numbers.values, bits)
    width = WIDTHS[bits]
    rows = [packed_codes(values, width.values), scales.flatten(1).contiguous().view(torch.uint8)]
    return numbers._replace(
        keys=packed_codes(keys, width.keys),
        values=torch.cat(rows, dim=1),
        key_scales=key_scales,
    )


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (n, head_dim) as bytes, eight in ``bits`` bytes, the first channel in the lowest."""
    if bits == 8:
        return codes.contiguous()
    if bits != 4:
        return _regrouped(codes, bits, 8)[:, : -(-codes.shape[1] * bits // 8)]
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def unpacked_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Codes (n, head_dim) of `packed_codes`."""
    if bits == 8:
        return packed
    if bits != 4:
        return _regrouped(packed, 8, bits)[:, :head_dim]
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :head_dim]


def _regrouped(numbers: Tensor, bits: int, other: int) -> Tensor:
    """Of numbers (n, m) of ``bits`` bits, each ``other`` as ``bits`` numbers of ``other`` bits."""
    groups = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % other))
    groups = groups.view(len(numbers), groups.shape[1] // other, other)
    places = torch.arange(8, device=numbers.device)
    words = (groups << bits * places[:other]).sum(dim=-1, keepdim=True)
    return torch.bitwise_and(words >> other * places[:bits], 2**other - 1).byte().flatten(1)


def key_numbers(rows: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Keys of one segment, float32, (n, head_dim).

    Parameters
    ----------
    rows : Tensor of uint8, (n, key_bytes)
    scales : Tensor of float16, (ceil(n / 64), 2, head_dim)
    bits : int
        Of `WIDTHS`, but not 16.
    """
    codes = unpacked_codes(rows, WIDTHS[bits].keys, int(scales.shape[-1]))
    whole = torch.nn.functional.pad(codes, (0, 0, 0, -len(rows) % KEY_BLOCK_TOKENS))
    blocks = whole.view(-1, KEY_BLOCK_TOKENS, whole.shape[1])
    return from_codes(blocks, scales[:, :1], scales[:, 1:]).flatten(0, 1)[: len(rows)]


def value_numbers(rows: Tensor, bits: int, head_dim: int) -> Tensor:
    """Values, float32, (n, head_dim), of packed rows with their scales, (n, value_bytes).

    Those that are turned are still `kvalloc.runtime.quantization.rotated`.
    """
    width = WIDTHS[bits].values
    n_bytes = -(-head_dim * width // 8)
    # A copy even of one row: float16 cannot begin at an odd byte.
    scales = rows[:, n_bytes:].clone(memory_format=torch.contiguous_format).view(torch.float16)
    scales = scales.view(len(rows), scales.shape[1] // 2, 2)
    codes = unpacked_codes(rows[:, :n_bytes], width, head_dim)
    block = min(VALUE_BLOCK_CHANNELS, head_dim)
    whole = torch.nn.functional.pad(codes, (0, -head_dim % block))
    blocks = whole.view(len(rows), scales.shape[1], block)
    return from_codes(blocks, scales[..., :1], scales[..., 1:]).flatten(1)[:, :head_dim]


@dataclass(frozen=True, kw_only=True)
class LayerEntries:
    """Kept entries of one layer, at the bits of each of its KV heads.

    Attributes
    ----------
    parts : tuple of KeptEntries
        One a width, the widest first, of the KV heads that are stored at it.
    like : tuple of Tensor
        Keys and values (0, head_dim) with the model's sizes and type.
    """

    parts: tuple[KeptEntries, ...]
    like: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls, segments: Sequence[Sequence[Segment]], bits: IntArray, like: tuple[Tensor, Tensor]
    ) -> LayerEntries:
        """A copy of segments, one a row and KV head, that are stored at these bits or at 16."""
        parts = []
        for width in sorted(set(bits.tolist()), reverse=True):
            heads = tuple(np.flatnonzero(bits == width).tolist())
            mine = [[row[head] for head in heads] for row in segments]
            part = KeptEntries.of(mine, bits=width, heads=heads)
            parts.append(part.halved() if width == 16 else part)
        return cls(parts=tuple(parts), like=like)

    @classmethod
    def whole(cls, entries: KeptEntries, *, rounds: bool = False) -> LayerEntries:
        """Return entries of all KV heads, as the model made them or rounded to 16 bits."""
        like = entries.keys[:0].clone(), entries.values[:0].clone()
        return cls(parts=(entries.halved() if rounds else entries,), like=like)

    @classmethod
    @torch.no_grad()
    def packed(
        cls, shape: tuple[int, ...], segment: Callable[[int, int], Segment], bits: IntArray
    ) -> LayerEntries:
        """Round and pack the entries of every row and head.

        Parameters
        ----------
        shape : tuple of int
            Rows and KV heads.
        segment : callable
            ``segment(row, head)`` gives their numbers; they need not all exist at once.
        bits : ndarray of int64, (n_kv_heads,)
            Of `WIDTHS`.
        """
        n_rows, n_heads = shape
        found = [
            [pack(segment(row, head), int(bits[head])) for head in range(n_heads)]
            for row in range(n_rows)
        ]
        keys, values, *_ = segment(0, 0)
        return cls.of(found, bits, (keys[:0].clone(), values[:0].clone()))

    @cached_property
    def _places(self) -> list[tuple[KeptEntries, int]]:
        """Where each KV head is."""
        own = [part.heads or range(part.lengths.shape[1]) for part in self.parts]
        pairs = zip(self.parts, own, strict=True)
        owners = {head: (part, n) for part, heads in pairs for n, head in enumerate(heads)}
        return [owners[head] for head in range(len(owners))]

    @property
    def bits(self) -> IntArray:
        """Width of each KV head, (n_kv_heads,)."""
        return np.array([part.bits for part, _ in self._places], dtype=np.int64)

    @cached_property
    def even(self) -> bool:
        """Whether all rows and heads have as many, all at 16 bits or more: those of `dense`."""
        return not self.is_packed and bool((self.lengths == self.lengths[0, 0]).all())

    @property
    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values of even ones, (batch, n_kv_heads, n, ...), in the model's type."""
        (part,) = self.parts
        shape = (*self.lengths.shape, int(self.lengths[0, 0]), -1)
        keys, values = (
            own.view(shape).to(like.dtype)
            for own, like in zip((part.keys, part.values), self.like, strict=True)
        )
        return keys, values

    @property
    def columns(self) -> tuple[Tensor, Tensor | None]:
        """Positions and bias of even ones, (batch, n_kv_heads, n), as views."""
        (part,) = self.parts
        shape = (*self.lengths.shape, int(self.lengths[0, 0]))
        return part.positions.view(shape), None if part.bias is None else part.bias.view(shape)

    @property
    def is_packed(self) -> bool:
        """Whether any KV head is stored at fewer bits than 16."""
        return any(part.bits != 16 for part in self.parts)

    @property
    def is_rounded(self) -> bool:
        """Whether any KV head is stored at fewer bits than the model has."""
        return self.is_packed or self.parts[0].keys.dtype != self.like[0].dtype

    @cached_property
    def lengths(self) -> IntArray:
        """Entries of each row and head, (batch, n_kv_heads)."""
        columns = [part.lengths[:, place] for part, place in self._places]
        found: IntArray = np.stack(columns, axis=1)
        return found

    def tensors(self) -> list[Tensor]:
        """All K and V storage, scales included."""
        found = [(part.keys, part.values, part.key_scales) for part in self.parts]
        return [tensor for part in found for tensor in part if tensor is not None]

    def nothing(self) -> tuple[Tensor, Tensor]:
        """Dense keys and values of no token, (batch, n_kv_heads, 0, head_dim)."""
        keys, values = (own.new_empty(*self.lengths.shape, 0, own.shape[-1]) for own in self.like)
        return keys, values

    def piece(self, row: int, head: int) -> Segment:
        """One segment's numbers."""
        part, place = self._places[head]
        return self._numbers(part.segment(row, place), part.bits)

    def _numbers(self, own: Segment, bits: int) -> Segment:
        keys, values = self.like
        if own.key_scales is None:
            return own._replace(keys=own.keys.to(keys.dtype), values=own.values.to(values.dtype))
        found = value_numbers(own.values, bits, int(values.shape[-1]))
        return own._replace(
            keys=key_numbers(own.keys, own.key_scales, bits).to(keys.dtype),
            values=(rotated(found) if WIDTHS[bits].turned else found).to(values.dtype),
            key_scales=None,
        )

    def padded_positions(self) -> Tensor:
        """Columns of each segment, (batch, n_kv_heads, most); -1 beyond a segment's end."""
        found = [own.positions for row in self._segments() for own in row]
        padded = pad_sequence(found, batch_first=True, padding_value=-1)
        return padded.view(*self.lengths.shape, -1)

    def _segments(self) -> list[list[Segment]]:
        """As they are stored, one a row and KV head."""
        return [
            [part.segment(row, place) for part, place in self._places]
            for row in range(self.lengths.shape[0])
        ]

    def rows(self, indices: Tensor) -> LayerEntries:
        """A copy of these rows, ``(n_rows,)``, in this order; a row may come more than once."""
        numbers = indices.cpu().numpy()
        return replace(self, parts=tuple(part.rows(numbers) for part in self.parts))

    def before(self, column: int) -> LayerEntries:
        """A copy without the entries from this column on."""
        cut = [
            [one.cut(0, int((one.positions < column).sum())) for one in row]
            for row in self._segments()
        ]
        return self.of(cut, self.bits, self.like)

    @torch.no_grad()
    def and_then(
        self, keys: Tensor, values: Tensor, positions: Tensor, shown: Tensor
    ) -> LayerEntries:
        """A copy with more entries behind.

        They are rounded; and a block of keys that was not full once more with those that fill it.

        Parameters
        ----------
        keys, values : Tensor, (batch, n_kv_heads, n, head_dim)
        positions : Tensor of int32, (n,)
        shown : Tensor of bool, (batch, n)
            False marks padding, which is left out. On the host.
        """
        segments = []
        for row, before in enumerate(self._segments()):
            new = shown[row].nonzero()[:, 0].to(keys.device)
            columns = positions[new]
            more = [
                Segment(keys[row, head, new], values[row, head, new], columns)
                for head in range(keys.shape[1])
            ]
            segments.append(
                [self._longer(*each) for each in zip(before, more, self.bits.tolist(), strict=True)]
            )
        return self.of(segments, self.bits, self.like)

    def _longer(self, before: Segment, more: Segment, bits: int) -> Segment:
        """One segment with numbers behind; at fewer bits from its last full block of keys on."""
        count = before.positions.numel()
        full = count if bits == 16 else count // KEY_BLOCK_TOKENS * KEY_BLOCK_TOKENS
        rest = before.cut(full, count)
        added = pack(Segment.joined([self._numbers(rest, bits), more]), bits)
        # values are rounded by token: those that were stay as they are
        values = torch.cat([rest.values, added.values[count - full :]])
        return Segment.joined([before.cut(0, full), added._replace(values=values)])
