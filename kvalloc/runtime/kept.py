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

__all__ = ["BLOCK_TOKENS", "FlatEntries", "Piece", "RaggedEntries"]

BLOCK_TOKENS = 128
"""Entries of a block: attention reads whole blocks of all heads in one operation."""

if TYPE_CHECKING:
    #: Keys and values (n, head_dim), positions (n,), logit bias (n,) or None, and which of the n
    #: are kept, increasing.
    Piece: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]
else:
    Piece = tuple


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatEntries:
    """Kept entries as kernels read them: flat, and where each segment's are.

    Attributes
    ----------
    keys, values : Tensor, (n_entries, head_dim) and (n_entries, value_dim)
        Contiguous; at fewer bits packed rows of uint8, see `kvalloc.runtime.packed.Segment`.
    spans : Tensor of int64, (n_segments, 4)
        Two spans of each segment: start and end, start and end.
    longest : int
        Entries of the largest segment.
    bias : Tensor of float32, (n_entries,), or None
        Added to their logits.
    bits : int
        16, 8 or 4.
    key_scales : Tensor of float16, (n_key_blocks, 2, head_dim), or None
        None at 16 bits.
    first_scales : Tensor of int64, (n_segments, 2), or None
        Which key scale is the first of each of a segment's two spans.
    """

    keys: Tensor
    values: Tensor
    spans: Tensor
    longest: int
    bias: Tensor | None = None
    bits: int = 16
    key_scales: Tensor | None = None
    first_scales: Tensor | None = None

    @classmethod
    def even(cls, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> FlatEntries:
        """From dense ones, each (batch, n_kv_heads, n_entries, head_dim), contiguous.

        Nothing is copied. The bias is of the first entries of each head, (batch, n_kv_heads,
        n_biased); others have none.
        """
        batch, n_kv_heads, n_entries, _ = keys.shape
        if bias is not None:
            missing = n_entries - int(bias.shape[-1])
            bias = torch.nn.functional.pad(bias, (0, missing)) if missing else bias
            bias = bias.float().reshape(-1)
        return cls(
            keys=keys.reshape(-1, keys.shape[-1]),
            values=values.reshape(-1, values.shape[-1]),
            spans=_even_spans(batch * n_kv_heads, n_entries, keys.device),
            longest=n_entries,
            bias=bias,
        )


@lru_cache(maxsize=256)
def _even_spans(n_segments: int, n_entries: int, device: torch.device) -> Tensor:
    """Spans of equal segments; remembered, as layers ask for the same ones."""
    start = torch.arange(n_segments, dtype=torch.int64) * n_entries
    nothing = torch.zeros_like(start)
    return torch.stack([start, start + n_entries, nothing, nothing], dim=1).to(device)


@dataclass(frozen=True, kw_only=True)
class RaggedEntries:
    """Kept entries of one layer, one segment a row and KV head, back to back.

    The segment of row b and head h is number ``b * n_kv_heads + h``. Its entries are in position
    order: as many whole blocks as it fills, and the rest. First all segments' blocks are stored,
    then all rests, so that the blocks are one dense tensor and nothing is padded.

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
        total, starts = int(counts.sum()), _starts(counts)
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
            for target, source in sources:
                _copy(target, source, kept, *starts[segment])
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

    # Where things are

    @cached_property
    def n_blocks(self) -> int:
        """Whole blocks of all segments."""
        return int((self.lengths // BLOCK_TOKENS).sum())

    @cached_property
    def block_segments(self) -> Tensor:
        """Segment of each block, (n_blocks,)."""
        counts = (self.lengths // BLOCK_TOKENS).reshape(-1)
        owners = np.repeat(np.arange(counts.size), counts)
        return torch.from_numpy(owners).to(self.keys.device)

    @cached_property
    def rest_entries(self) -> Tensor:
        """Which entry is the i-th of each segment's rest, (n_segments, most); 0 beyond its end."""
        rests = (self.lengths % BLOCK_TOKENS).reshape(-1)
        start = self.n_blocks * BLOCK_TOKENS + np.cumsum(rests) - rests
        column = np.arange(int(rests.max()))
        found = np.where(column < rests[:, None], start[:, None] + column, 0)
        return torch.from_numpy(found).to(self.keys.device)

    @cached_property
    def _logit_type(self) -> torch.dtype:
        return torch.promote_types(self.keys.dtype, torch.float32)

    @cached_property
    def rest_logits(self) -> Tensor:
        """What the logits of `rest_entries` begin with, (n_segments, 1, most).

        Minus infinity beyond a segment's end, and their own bias.
        """
        rests = (self.lengths % BLOCK_TOKENS).reshape(-1, 1)
        beyond = torch.from_numpy(np.arange(int(rests.max())) >= rests).to(self.keys.device)
        logits = torch.zeros(beyond.shape, dtype=self._logit_type, device=self.keys.device)
        if self.bias is not None:
            logits += self.bias[self.rest_entries]
        return logits.masked_fill_(beyond, float("-inf"))[:, None]

    @cached_property
    def block_logits(self) -> Tensor | None:
        """What the logits of whole blocks begin with, (n_blocks, 1, BLOCK_TOKENS); None for 0."""
        return None if self.bias is None else self.blocks(self.bias)[:, None].to(self._logit_type)

    def parts(self, n_rows: int) -> tuple[Tensor, Tensor]:
        """Which parts make up each segment's rows, and where there are none.

        Where something was computed for ``n_rows`` rows of each block, and then of each segment's
        rest, this lists for each segment's row its own blocks' and its own rest's.

        Parameters
        ----------
        n_rows : int
            Query rows of a segment.

        Returns
        -------
        parts : Tensor of int64, (n_segments * n_rows, most)
            Places in the flattened ``(n_blocks + n_segments, n_rows)``; 0 where there is none.
        absent : Tensor of bool, the same shape
            Where there is none.
        """
        if n_rows not in self._parts:
            counts = (self.lengths // BLOCK_TOKENS).reshape(-1)
            first, column = np.cumsum(counts) - counts, np.arange(int(counts.max()) + 1)
            own = np.where(column == counts[:, None], self.n_blocks, 0) + np.where(
                column < counts[:, None], first[:, None] + column, np.arange(counts.size)[:, None]
            )
            absent = np.repeat(column > counts[:, None], n_rows, axis=0)
            places = own[:, None] * n_rows + np.arange(n_rows)[:, None]
            places = np.where(absent, 0, places.reshape(absent.shape))
            device = self.keys.device
            found = torch.from_numpy(places).to(device), torch.from_numpy(absent).to(device)
            self._parts.clear()  # a question's are larger than those of one token
            self._parts[n_rows] = found
        return self._parts[n_rows]

    @cached_property
    def _parts(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def blocks(self, states: Tensor) -> Tensor:
        """The whole blocks of ``keys``, ``values`` or ``bias``, (n_blocks, BLOCK_TOKENS, ...)."""
        whole = self.n_blocks * BLOCK_TOKENS
        return states[:whole].view(self.n_blocks, BLOCK_TOKENS, *states.shape[1:])

    @cached_property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """Of each segment: start and end of its blocks, start and end of its rest."""
        return _starts(self.lengths)

    @cached_property
    def flat(self) -> FlatEntries:
        """The same as kernels read it."""
        return FlatEntries(
            keys=self.keys,
            values=self.values,
            spans=torch.tensor(self.spans, dtype=torch.int64, device=self.keys.device),
            longest=int(self.lengths.max(initial=0)),
            bias=self.bias,
        )

    def piece(self, row: int, head: int) -> Piece:
        """One segment's entries in position order, all of them kept."""
        start, end, rest, rest_end = self.spans[row * self.lengths.shape[1] + head]

        def joined(states: Tensor) -> Tensor:
            if end == start:
                return states[rest:rest_end]
            if rest_end == rest:
                return states[start:end]
            return torch.cat([states[start:end], states[rest:rest_end]])

        bias = None if self.bias is None else joined(self.bias)
        every = torch.arange(end - start + rest_end - rest, device=self.keys.device)
        return joined(self.keys), joined(self.values), joined(self.positions), bias, every

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


def _starts(counts: IntArray) -> list[tuple[int, int, int, int]]:
    """Start and end of each segment's blocks, and of its rest."""
    flat = counts.reshape(-1)
    whole, rest = flat // BLOCK_TOKENS * BLOCK_TOKENS, flat % BLOCK_TOKENS
    whole_end, rest_end = np.cumsum(whole), whole.sum() + np.cumsum(rest)
    table = np.stack([whole_end - whole, whole_end, rest_end - rest, rest_end], axis=1)
    return [(int(a), int(b), int(c), int(d)) for a, b, c, d in table]


def _copy(
    target: Tensor, source: Tensor, kept: Tensor, start: int, end: int, rest: int, rest_end: int
) -> None:
    """Copy the kept part of a segment to its blocks and its rest."""
    whole = end - start
    if whole:
        torch.index_select(source, 0, kept[:whole], out=target[start:end])
    if rest_end > rest:
        torch.index_select(source, 0, kept[whole:], out=target[rest:rest_end])
