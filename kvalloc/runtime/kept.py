"""Entries of KV heads that keep different numbers of them, stored without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS

__all__ = ["FlatEntries", "Piece", "RaggedEntries", "Spans", "Tiles"]

if TYPE_CHECKING:
    #: Keys and values (n, head_dim), positions (n,), logit bias (n,) or None, and which of the n
    #: are kept, increasing.
    Piece: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]
else:
    Piece = tuple


@dataclass(frozen=True, eq=False)
class Spans:
    """Where the entries of each segment are; made once for each eviction.

    Attributes
    ----------
    starts, ends : ndarray of int64, (n_segments,)
        First entry of each segment, and the one after its last.
    device : torch.device
        Where the entries are.
    """

    starts: IntArray
    ends: IntArray
    device: torch.device

    @classmethod
    def back_to_back(cls, lengths: IntArray, device: torch.device) -> Spans:
        """Of segments of these lengths, (batch, n_kv_heads), one after the other."""
        ends = np.cumsum(lengths)
        return cls(ends - lengths.reshape(-1), ends, device)

    @cached_property
    def lengths(self) -> IntArray:
        """Entries of each segment, (n_segments,)."""
        return self.ends - self.starts

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
        """Segments, first and after the last, that are equally long and back to back."""
        same = (np.diff(self.lengths) == 0) & (self.starts[1:] == self.ends[:-1])
        first = [0, *(np.flatnonzero(~same) + 1).tolist()]
        return list(zip(first, [*first[1:], len(same) + 1], strict=True))

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
class FlatEntries:
    """Kept entries as every backend of attention reads them: flat, and where each segment's are.

    The segment of row b and head h is number ``b * n_kv_heads + h``. Equal budgets are the case of
    equal spans.

    Attributes
    ----------
    keys, values : Tensor, (n_entries, head_dim) and (n_entries, value_dim)
        Contiguous; at fewer bits packed rows of uint8, see `kvalloc.runtime.packed.Segment`.
    spans : Spans
    bias : Tensor of float32, (n_entries,), or None
        Added to their logits.
    bits : int
        16, 8, 4 or 3.
    key_scales : Tensor of float16, (n_key_blocks, 2, head_dim), or None
        Those of one segment after those of another; None at 16 bits.
    heads : tuple of int, or None
        Which KV heads of the layer these are; None for all.
    """

    keys: Tensor
    values: Tensor
    spans: Spans
    bias: Tensor | None = None
    bits: int = 16
    key_scales: Tensor | None = None
    heads: tuple[int, ...] | None = None

    @classmethod
    def even(
        cls, keys: Tensor, values: Tensor, bias: Tensor | None = None, n_kept: int | None = None
    ) -> FlatEntries:
        """From dense keys and values, which are not copied if they are contiguous.

        Parameters
        ----------
        keys, values : Tensor, (batch, n_kv_heads, n_entries, head_dim)
        bias : Tensor of float32, (batch, n_kv_heads, n_biased), optional
            Of the first entries of each head; others have none.
        n_kept : int, optional
            So many of the first entries of each head are meant; by default all.
        """
        batch, n_kv_heads, n_entries, _ = keys.shape
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, n_entries - int(bias.shape[-1])))
        n_kept = n_entries if n_kept is None else n_kept
        return cls(
            keys=keys.reshape(-1, keys.shape[-1]),
            values=values.reshape(-1, values.shape[-1]),
            spans=_even_spans(batch * n_kv_heads, n_entries, n_kept, keys.device),
            bias=None if bias is None else bias.reshape(-1),
        )


@lru_cache(maxsize=256)
def _even_spans(n_segments: int, n_entries: int, n_kept: int, device: torch.device) -> Spans:
    """Spans of equal segments; remembered, as layers ask for the same ones."""
    starts = np.arange(n_segments, dtype=np.int64) * n_entries
    return Spans(starts, starts + n_kept, device)


@dataclass(frozen=True, kw_only=True)
class RaggedEntries:
    """Kept entries of one layer, one segment a row and KV head, back to back.

    The segment of row b and head h is number ``b * n_kv_heads + h``. Its entries are in position
    order, and nothing is padded.

    Attributes
    ----------
    keys, values : Tensor, (n_entries, head_dim)
        In storage of their own, not one entry larger.
    positions : Tensor of int32, (n_entries,)
        Where in the row's columns each entry stood.
    bias : Tensor of float32, (n_entries,), or None
        Added to an entry's logits.
    lengths : ndarray of int64, (batch, n_kv_heads)
        Entries of each segment.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor | None
    lengths: IntArray

    @classmethod
    @torch.no_grad()
    def collect(
        cls, counts: IntArray, piece: Callable[[int, int], Piece], *, biased: bool = False
    ) -> RaggedEntries:
        """Copy the kept entries of every row and head into fresh storage.

        Parameters
        ----------
        counts : ndarray of int64, (batch, n_kv_heads)
            Entries that each segment keeps.
        piece : callable
            ``piece(row, head)`` gives what they are taken from; asked once for each, so that no
            more than one head's candidates need to exist beside the result.
        biased : bool
            Whether any piece has a logit bias.
        """
        total, spans = int(counts.sum()), Spans.back_to_back(counts, torch.device("cpu"))
        store: tuple[Tensor, ...] | None = None
        bias: Tensor | None = None
        for segment, (row, head) in enumerate(np.ndindex(*counts.shape)):
            keys, values, positions, own_bias, kept = piece(row, head)
            if store is None:
                store = (
                    keys.new_empty(total, keys.shape[1]),
                    values.new_empty(total, values.shape[1]),
                    positions.new_empty(total),
                )
                bias = positions.new_zeros(total, dtype=torch.float32) if biased else None
            sources: list[tuple[Tensor, Tensor]] = list(
                zip(store, (keys, values, positions), strict=True)
            )
            if bias is not None and own_bias is not None:
                sources.append((bias, own_bias))
            own = slice(int(spans.starts[segment]), int(spans.ends[segment]))
            for target, source in sources:
                torch.index_select(source, 0, kept, out=target[own])
        assert store is not None, "a cache has at least one row and one head"
        return cls(keys=store[0], values=store[1], positions=store[2], bias=bias, lengths=counts)

    def tensors(self) -> list[Tensor]:
        """K and V storage."""
        return [self.keys, self.values]

    def nothing(self) -> tuple[Tensor, Tensor]:
        """Dense keys and values of no token, (batch, n_kv_heads, 0, head_dim)."""
        shape = (*self.lengths.shape, 0)
        return (
            self.keys.new_empty(*shape, self.keys.shape[-1]),
            self.values.new_empty(*shape, self.values.shape[-1]),
        )

    @cached_property
    def spans(self) -> Spans:
        """Where each segment's entries are."""
        return Spans.back_to_back(self.lengths, self.keys.device)

    @cached_property
    def flat(self) -> tuple[FlatEntries, ...]:
        """The same as attention reads it."""
        own = FlatEntries(keys=self.keys, values=self.values, spans=self.spans, bias=self.bias)
        return (own,)

    def piece(self, row: int, head: int) -> Piece:
        """One segment's entries in position order, all of them kept."""
        number = row * self.lengths.shape[1] + head
        start, end = int(self.spans.starts[number]), int(self.spans.ends[number])
        bias = None if self.bias is None else self.bias[start:end]
        every = torch.arange(end - start, device=self.keys.device)
        return self.keys[start:end], self.values[start:end], self.positions[start:end], bias, every

    def padded_positions(self) -> Tensor:
        """`positions` of each segment, (batch, n_kv_heads, most); -1 beyond a segment's end."""
        found = self.positions.new_full((*self.lengths.shape, int(self.lengths.max())), -1)
        for row, head in np.ndindex(*self.lengths.shape):
            found[row, head, : self.lengths[row, head]] = self.piece(row, head)[2]
        return found

    def rows(self, indices: Tensor) -> RaggedEntries:
        """A copy of these rows, ``(n_rows,)``, in this order; a row may come more than once."""
        chosen = indices.cpu().numpy()
        return RaggedEntries.collect(
            self.lengths[chosen],
            lambda row, head: self.piece(int(chosen[row]), head),
            biased=self.bias is not None,
        )
