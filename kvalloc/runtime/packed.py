"""Kept entries of one layer, each KV head at the bits that the profile says.

The layout is ours, not that of optimum-quanto or torchao: theirs are tensors of one shape, with
scales of the model's type, while heads and rows here keep different numbers of entries and each
byte, scales included, has to be the one that the budget was decided with
(`kvalloc.accounting.costs`).
The rounding itself is the measured one (`kvalloc.runtime.quantization`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import (
    KEY_BLOCK_TOKENS,
    PLANES,
    VALUE_BLOCK_CHANNELS,
    WIDTHS,
    code_bytes,
    turns,
)
from kvalloc.errors import UnsupportedRequestError
from kvalloc.runtime.checks import ensure
from kvalloc.runtime.kept import (
    KeptEntries,
    KeptLayer,
    Spans,
    halved,
    on_device,
    parted,
    segment_max,
)
from kvalloc.runtime.quantization import (
    coded,
    fits_float16,
    from_codes,
    in_blocks,
    magnitudes,
    rotated,
)

STEPS = 8
"""In so many steps a layer is rounded, which takes several times the bytes of the numbers.

Heads of one width take their share of them, by their blocks of keys, but none is of fewer than
`STEP_BLOCKS`.
"""

STEP_BLOCKS = 64
"""Blocks of keys that are rounded in one step at least: a smaller one takes as many operations, and
saves no memory that counts. At 2,048 tokens steps of 8 take an eighth more of an eviction's time
(SmolLM2-135M)."""

NO_COLUMN = torch.iinfo(torch.int32).max
"""Where a place of no entry stands: behind all tokens, so that none sees it."""


def pack(
    numbers: KeptEntries,
    bits: int,
    n_steps: int,
    before: KeptEntries | None = None,
    kind: torch.dtype = torch.float16,
) -> KeptEntries:
    """Return numbers of the model's type at so many bits, rounded in as many steps.

    Scales are float16, or bfloat16 if `fits_float16` says so.

    The first block of each segment keeps the key scales that it had before, where they cover what
    is in it now. It holds the sinks, which stay for ever and are attended to most: what they lose
    each time that they are rounded by other scales adds up.
    """
    if bits == 16:
        return numbers.halved()
    keys, key_scales, key_exact = _packed_segments(numbers, bits, n_steps, before, kind)
    steps = [_packed_values(values, bits, kind) for values in numbers.values.chunk(n_steps)]
    values, value_exact = (torch.cat(own) for own in zip(*steps, strict=True))
    if len(values):
        spans, width = numbers.spans, WIDTHS[bits]
        of_keys = segment_max(magnitudes(key_exact, width.keys, 1), spans.blocks)
        of_values = segment_max(magnitudes(value_exact, width.values), spans.lengths)
        fits = fits_float16(of_keys, width.keys) & fits_float16(of_values, width.values)
        if not _fits(fits, kind, key_exact, value_exact):
            return pack(numbers, bits, n_steps, before, torch.bfloat16)
    return replace(numbers, keys=keys, values=values, key_scales=key_scales, bits=bits)


def _fits(fits: Tensor, kind: torch.dtype, *exact: Tensor) -> bool:
    """Return whether scales hold what they stand for, on a GPU always: the host does not wait.

    Raises
    ------
    UnsupportedRequestError
        If numbers are not finite, or on a GPU if they do not fit.
    """
    if kind == torch.bfloat16:
        fits = torch.stack([one.isfinite().all() for one in exact]).all()
    elif fits.is_cpu:
        return bool(fits)
    ensure(fits, _refuse_scales)
    return True


def _refuse_scales() -> None:
    raise UnsupportedRequestError(
        "keys or values of this text are infinite or NaN, or on a GPU too large or too small for "
        "float16 scales, so they cannot be rounded; use a profile at 16 bits and a bfloat16 model"
    )


def _packed_segments(
    numbers: KeptEntries,
    bits: int,
    n_steps: int,
    before: KeptEntries | None,
    kind: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, their scales and exact scales of all segments; see `pack` and `KeptEntries`."""
    spans = numbers.spans
    places = spans.block_places()
    steps, known = places.chunk(n_steps), None
    if before is not None and before.key_scales is not None and before.key_scales.dtype == kind:
        shape = (len(places), 2, numbers.keys.shape[1])
        known = numbers.keys.new_full(shape, nan, dtype=kind)
        both = (spans.lengths > 0) & (before.spans.lengths > 0)
        first, old = (
            on_device(own.first_scales[:-1][both], spans.device) for own in (spans, before.spans)
        )
        known[first] = before.key_scales[old]
    scales = [None] * len(steps) if known is None else known.chunk(n_steps)
    pairs = zip(steps, scales, strict=True)
    blocks = [_packed_keys(numbers.keys[own], bits, some, kind) for own, some in pairs]
    keys, key_scales, exact = (torch.cat(own) for own in zip(*blocks, strict=True))
    filled, _ = parted(keys, spans.lengths, spans.blocks * KEY_BLOCK_TOKENS)
    return torch.cat(filled), key_scales, exact


def unpack(entries: KeptEntries, like: tuple[Tensor, Tensor]) -> KeptEntries:
    """Return the numbers that entries stand for, of the types of ``like``."""
    keys, values, scales = entries.keys, entries.values, entries.key_scales
    if scales is not None:
        keys = segment_keys(entries)
        values = value_numbers(values, entries.bits, int(like[1].shape[-1]), scales.dtype)
        values = rotated(values) if turns(entries.bits, int(values.shape[-1])) else values
    keys, values = keys.to(like[0].dtype), values.to(like[1].dtype)
    return replace(entries, keys=keys, values=values, key_scales=None, bits=16)


def longer(entries: KeptEntries, more: KeptEntries) -> KeptEntries:
    """Return entries with numbers of the model's type behind, segment by segment.

    Values are rounded by token: those that were there stay as they are. A block of keys that was
    not full is rounded once more, with the keys that fill it.
    """
    spans, old, new = entries.spans, entries.spans.lengths, more.spans.lengths

    def behind(own: Tensor, added: Tensor) -> Tensor:
        return _interleaved(torch.split(own, old.tolist()), torch.split(added, new.tolist()))

    found = replace(
        entries,
        positions=behind(entries.positions, more.positions),
        lengths=entries.lengths + more.lengths,
    )
    if entries.key_scales is None:
        stored, added = [entries.keys, entries.values], [more.keys, more.values]
        added = added if stored[0].dtype == added[0].dtype else halved(*added, lengths=new)
        pairs = zip(stored, added, strict=True)
        keys, values = (behind(*_of_a_type(pair)) for pair in pairs)
        return replace(found, keys=keys, values=values)
    last = np.where(new > 0, old % KEY_BLOCK_TOKENS, 0)  # in blocks that are filled now
    full = -(-(old - last) // KEY_BLOCK_TOKENS)
    stay, unfilled = parted(entries.keys, old - last, old)
    scales, _ = parted(entries.key_scales, full, spans.blocks)
    theirs = on_device(np.repeat(spans.first_scales[:-1] + full, last), spans.device)
    filling = key_numbers(torch.cat(unfilled), entries.key_scales[theirs], entries.bits)
    numbers = _interleaved(
        torch.split(filling.to(more.keys.dtype), last.tolist()),
        torch.split(more.keys, new.tolist()),
    )
    tail = Spans(last + new, spans.device)
    kind = entries.key_scales.dtype
    blocks = numbers[tail.block_places()]
    keys, key_scales, key_exact = _packed_keys(blocks, entries.bits, kind=kind)
    values, value_exact = _packed_values(more.values, entries.bits, kind)
    if len(values):  # a head that is stored in float16 is not small
        fits = fits_float16(torch.cat([key_exact.flatten(), value_exact.flatten()]).abs())
        if not _fits(fits, kind, key_exact, value_exact):
            before = unpack(entries, (more.keys, more.values))
            return pack(longer(before, more), entries.bits, 1, kind=torch.bfloat16)
    filled, _ = parted(keys, tail.lengths, tail.blocks * KEY_BLOCK_TOKENS)
    return replace(
        found,
        keys=_interleaved(stay, filled),
        values=behind(entries.values, values),
        key_scales=_interleaved(scales, torch.split(key_scales, tail.blocks.tolist())),
    )


def joined(several: Sequence[KeptEntries], like: tuple[Tensor, Tensor]) -> KeptEntries:
    """Return the rows of several one behind the other, stored as they are.

    If the scales of some are bfloat16, others are rounded again to have the same.
    """
    scales = {None if one.key_scales is None else one.key_scales.dtype for one in several}
    if len(scales) > 1:
        bits, kind = several[0].bits, torch.bfloat16
        several = [pack(unpack(one, like), bits, 1, kind=kind) for one in several]
    found: dict[str, Any] = {}
    for name in ("keys", "values", "positions", "key_scales"):
        own = [getattr(one, name) for one in several]
        found[name] = None if own[0] is None else torch.cat(_of_a_type(own))
    lengths = np.concatenate([one.lengths for one in several])
    return replace(several[0], **found, lengths=lengths)


def _of_a_type(several: Sequence[Tensor]) -> list[Tensor]:
    """Return halves in bfloat16, where any of them is."""
    other = any(own.dtype != several[0].dtype for own in several)
    return [own.bfloat16() if other else own for own in several]


def _interleaved(*pieces: tuple[Tensor, ...]) -> Tensor:
    """Return of each segment one piece behind the other."""
    return torch.cat([one for segment in zip(*pieces, strict=True) for one in segment])


def _packed_keys(
    blocks: Tensor, bits: int, before: Tensor | None = None, kind: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks of keys of one head each as they are stored.

    Parameters
    ----------
    blocks : Tensor, (n_blocks, 64, head_dim)
    bits : int
        Of `WIDTHS`, but not 16.
    before : Tensor of the kind, (n_blocks, 2, head_dim), optional
        Scales to be kept; see `kvalloc.runtime.quantization.coded`.
    kind : torch.dtype
        Of the scales.

    Returns
    -------
    keys : Tensor of uint8, (n_blocks * 64, key_bytes)
    key_scales : Tensor of the kind, (n_blocks, 2, head_dim)
        Of each block and channel the scale and the minimum.
    exact : Tensor of float32, as ``key_scales``
        Before they were rounded.
    """
    width = WIDTHS[bits].keys
    codes, scales, exact = coded(blocks.float(), width, dim=1, before=before, kind=kind)
    return packed_codes(codes.flatten(0, 1), width), scales, exact


def _packed_values(values: Tensor, bits: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return values (n, head_dim) as they are stored, of uint8, (n, value_bytes), and exact scales.

    Behind the codes of a token stand the scale and the minimum of each block of its channels.
    """
    width = WIDTHS[bits].values
    numbers = rotated(values) if turns(bits, int(values.shape[1])) else values
    codes, scales, exact = coded(in_blocks(numbers, VALUE_BLOCK_CHANNELS), width, kind=kind)
    rows = packed_codes(codes.flatten(1)[:, : values.shape[1]], width)
    rows = torch.cat([rows, scales.flatten(1).view(torch.uint8)], dim=1)
    return rows, exact


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes (n, head_dim) as bytes, in `PLANES`, the first channel in the lowest bits."""
    low, *more = PLANES[bits]
    if not more:
        return _packed_plane(codes, low).contiguous()
    planes = codes.bitwise_and(2**low - 1), codes >> low
    return torch.cat([_packed_plane(*one) for one in zip(planes, PLANES[bits], strict=True)], dim=1)


def unpacked_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Return the codes (n, head_dim) of `packed_codes`."""
    low, *more = PLANES[bits]
    end = code_bytes(low, head_dim)
    codes = _unpacked_plane(packed[:, :end], low, head_dim)
    for width in more:
        codes = codes.add(_unpacked_plane(packed[:, end:], width, head_dim), alpha=2**low)
    return codes


_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""What the numbers of a byte, of so many bits, are together before they are packed: one word."""


def _packed_plane(numbers: Tensor, width: int) -> Tensor:
    """Return numbers (n, head_dim) of so many bits as bytes."""
    if width == 8:
        return numbers.contiguous()
    # a product puts each number where it belongs in the word's last byte, where none overlap
    each = 8 // width
    words = _padded(numbers, each).contiguous().view(_WORDS[width])
    together: Tensor = words * sum(2 ** ((8 - width) * place) for place in range(1, each + 1))
    return together.flatten().view(torch.uint8)[each - 1 :: each].view(words.shape)


def _unpacked_plane(packed: Tensor, width: int, head_dim: int) -> Tensor:
    """Return the numbers (n, head_dim) of `_packed_plane`."""
    if width == 8:
        return packed
    numbers = (packed[:, :, None] >> _places(width, packed.device)).bitwise_and_(2**width - 1)
    return numbers.flatten(1)[:, :head_dim]


@cache
def _places(width: int, device: torch.device) -> Tensor:
    """Return where numbers of so many bits begin in a byte, uint8, (8 / width,)."""
    with torch.inference_mode(False):
        return torch.arange(0, 8, width, dtype=torch.uint8, device=device)


def _padded(numbers: Tensor, multiple: int) -> Tensor:
    """Return numbers (n, m) with zeros behind, m being a multiple; the same where it is one."""
    missing = -numbers.shape[1] % multiple
    return torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers


def segment_keys(entries: KeptEntries) -> Tensor:
    """Return the keys of entries below 16 bits, float32, (n, head_dim)."""
    assert entries.key_scales is not None
    starts, ends = entries.spans.key_blocks()
    each = on_device(np.repeat(np.arange(len(starts)), ends - starts), entries.keys.device)
    return key_numbers(entries.keys, entries.key_scales[each], entries.bits)


def key_numbers(rows: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Keys, float32, (n, head_dim).

    Parameters
    ----------
    rows : Tensor of uint8, (n, key_bytes)
    scales : Tensor of float16 or bfloat16, (n, 2, head_dim)
        Those of the block of each.
    bits : int
        Of `WIDTHS`, but not 16.
    """
    codes = unpacked_codes(rows, WIDTHS[bits].keys, int(scales.shape[-1]))
    return from_codes(codes, *scales.unbind(1))


def value_numbers(rows: Tensor, bits: int, head_dim: int, kind: torch.dtype) -> Tensor:
    """Values, float32, (n, head_dim), of packed rows with their scales, (n, value_bytes).

    Those that are turned are still `kvalloc.runtime.quantization.rotated`.
    """
    width = WIDTHS[bits].values
    n_bytes = code_bytes(width, head_dim)
    # A copy even of one row: float16 cannot begin at an odd byte.
    scales = rows[:, n_bytes:].clone(memory_format=torch.contiguous_format).view(kind)
    scales = scales.view(len(rows), scales.shape[1] // 2, 2)
    codes = unpacked_codes(rows[:, :n_bytes], width, head_dim)
    block = min(VALUE_BLOCK_CHANNELS, head_dim)
    blocks = _padded(codes, block).view(len(rows), scales.shape[1], block)
    return from_codes(blocks, scales[..., :1], scales[..., 1:]).flatten(1)[:, :head_dim]


@dataclass(frozen=True, kw_only=True, eq=False)
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
    def whole(cls, entries: KeptEntries) -> LayerEntries:
        """Return entries of all KV heads, as the model made them."""
        return cls(parts=(entries,), like=(entries.keys[:0].clone(), entries.values[:0].clone()))

    @classmethod
    @torch.no_grad()
    def packed(
        cls, entries: KeptEntries, bits: IntArray, before: LayerEntries | None = None
    ) -> LayerEntries:
        """Round and pack entries of all KV heads.

        Parameters
        ----------
        entries : KeptEntries
            Numbers of the model's type.
        bits : ndarray of int64, (n_kv_heads,)
            Of `WIDTHS`.
        before : LayerEntries, optional
            What was kept until now, of the same rows; see `pack`.
        """
        like = entries.keys[:0].clone(), entries.values[:0].clone()
        blocks, parts = entries.spans.blocks.reshape(entries.lengths.shape), []
        for width in sorted(set(bits.tolist()), reverse=True):
            heads = np.flatnonzero(bits == width)
            n_blocks = int(blocks[:, heads].sum())
            share = -(-STEPS * n_blocks // max(int(blocks.sum()), 1))
            n_steps = max(1, min(share, n_blocks // STEP_BLOCKS))
            own = entries.of_heads(heads.tolist())
            known = () if before is None else before.parts
            old = next((one for one in known if (one.bits, one.heads) == (width, own.heads)), None)
            parts.append(pack(own, width, n_steps, old))
        return cls(parts=tuple(parts), like=like)

    @cached_property
    def kept(self) -> KeptLayer:
        """What attention reads."""
        return KeptLayer(self.parts)

    @cached_property
    def even(self) -> bool:
        """Whether all rows and heads have as many, all at 16 bits or more: those of `dense`."""
        return not self.is_packed and bool((self.lengths == self.lengths[0, 0]).all())

    @property
    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values of even ones, (batch, n_kv_heads, n, ...), as views."""
        (part,) = self.parts
        shape = (*self.lengths.shape, int(self.lengths[0, 0]))
        keys, values = (own.view(*shape, own.shape[-1]) for own in (part.keys, part.values))
        return keys, values

    @property
    def columns(self) -> Tensor:
        """Positions of even ones, (batch, n_kv_heads, n), as a view."""
        (part,) = self.parts
        return part.positions.view(*self.lengths.shape, int(self.lengths[0, 0]))

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
        n_heads = sum(part.lengths.shape[1] for part in self.parts)
        found = np.empty((len(self.parts[0].lengths), n_heads), dtype=np.int64)
        for part in self.parts:
            found[:, list(part.heads or range(n_heads))] = part.lengths
        return found

    def tensors(self) -> list[Tensor]:
        """Return all that is stored: K and V, scales, positions, and lists of tiles."""
        stored = [(one.keys, one.values, one.key_scales, one.positions) for one in self.parts]
        found = [tensor for part in stored for tensor in part if tensor is not None]
        return found + self.kept.tensors()

    def numbers(self) -> LayerEntries:
        """Return the same entries as numbers of the model's type."""
        return replace(self, parts=tuple(unpack(part, self.like) for part in self.parts))

    def _padded_places(self, part: KeptEntries) -> Tensor:
        """Return where the entries of a part stand among those of all rows and heads, padded."""
        (n_rows, n_heads), most = self.lengths.shape, int(self.lengths.max())
        heads = np.array(part.heads or range(n_heads))
        firsts = (np.arange(n_rows)[:, None] * n_heads + heads).ravel() * most
        index = np.repeat(firsts - part.spans.starts, part.spans.lengths)
        return on_device(index + np.arange(len(index)), part.keys.device)

    def rows(self, indices: Tensor) -> LayerEntries:
        """A copy of these rows, ``(n_rows,)``, in this order; a row may come more than once."""
        numbers = indices.cpu().numpy()
        return replace(self, parts=tuple(part.of_rows(numbers) for part in self.parts))

    @classmethod
    def joined(cls, several: Sequence[LayerEntries], order: IntArray) -> LayerEntries:
        """Return the rows of several one behind the other, in this order."""
        like = several[0].like
        parts = [joined(own, like) for own in zip(*(one.parts for one in several), strict=True)]
        return cls(parts=tuple(part.of_rows(order) for part in parts), like=like)

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and columns with as many places in all rows and heads.

        Returns
        -------
        keys, values : Tensor, (batch, n_kv_heads, most, head_dim)
            Of the model's type; 0 at places of no entry, which are the last ones.
        positions : Tensor of int32, (batch, n_kv_heads, most)
            Beyond all columns at these.
        """
        shape = (*self.lengths.shape, int(self.lengths.max()))
        if len(self.parts) == 1 and (self.lengths == shape[2]).all():
            whole = self.numbers()
            return *whole.dense, whole.columns
        places = int(np.prod(shape))
        keys, values = (own.new_zeros(places, own.shape[-1]) for own in self.like)
        positions = torch.full((places,), NO_COLUMN, dtype=torch.int32, device=keys.device)
        for part in self.parts:
            numbers, at = unpack(part, self.like), self._padded_places(part)
            keys[at], values[at] = numbers.keys, numbers.values
            positions[at] = numbers.positions
        return (
            keys.view(*shape, keys.shape[-1]),
            values.view(*shape, values.shape[-1]),
            positions.view(shape),
        )

    @torch.no_grad()
    def with_more(self, more: KeptEntries) -> LayerEntries:
        """Return a copy with more entries behind, which are rounded.

        Codes that are there stay as they are, but for those of a block of keys that was not full:
        it is rounded once more with those that fill it.

        Parameters
        ----------
        more : KeptEntries
            Of all KV heads, numbers of the model's type, in columns behind all that are here.
        """
        every = range(more.lengths.shape[1])
        parts = [longer(part, more.of_heads(part.heads or every)) for part in self.parts]
        return replace(self, parts=tuple(parts))
