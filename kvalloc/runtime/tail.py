"""Tokens since a layer's latest eviction, the latest of each row at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.runtime.kept import on_device

BLOCK_TOKENS = 64
"""Tokens that a tail gets room for at a time: until then none is copied, and no address changes."""

FIRST_TOKENS = 8
"""The first decoded tokens take no room to spare: a short answer to a short prompt
would store more than that prompt."""


def room_for(tokens: int, interval: int) -> int:
    """Return the room, in tokens, for decoded tokens.

    Those alone at first, then whole blocks, but no more than come before the next eviction.

    Parameters
    ----------
    tokens : int
    interval : int
        Tokens between two evictions.
    """
    if tokens <= FIRST_TOKENS:
        return tokens
    return min(-(-tokens // one) * one for one in (BLOCK_TOKENS, interval))


class Tail:
    """Keys and values of the latest tokens of each row, in storage with some room.

    A row that has fewer than another has places of no token in front of its own.

    Attributes
    ----------
    buffers : tuple of Tensor, each (rows, n_kv_heads, room, head_dim)
        Contiguous.
    tokens : int
        Places in use, from the first.
    lengths : ndarray of int64, (rows,)
        Tokens of each row.
    """

    def __init__(self, keys: Tensor, values: Tensor, lengths: IntArray) -> None:
        self.buffers, self.tokens, self.lengths = (keys, values), int(keys.shape[2]), lengths
        self._alone = 0  # tokens that came one at a time

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values, (rows, n_kv_heads, tokens, head_dim) each, as views."""
        keys, values = self.buffers
        return keys.narrow(2, 0, self.tokens), values.narrow(2, 0, self.tokens)

    @property
    def starts(self) -> IntArray | None:
        """Places of no token in front of each row's; None where there are none."""
        starts = self.tokens - self.lengths
        return starts if starts.any() else None

    @property
    def has_room(self) -> bool:
        """Whether one more token takes no more storage."""
        return self.tokens < int(self.buffers[0].shape[2])

    def add(self, states: tuple[Tensor, Tensor], lengths: IntArray, *, interval: int) -> None:
        """Add keys and values, (rows, n_kv_heads, n_new, head_dim) each.

        Several at once take what they take: a turn may be as long as memory has room for.

        Parameters
        ----------
        states : tuple of Tensor
        lengths : ndarray of int64, (rows,)
            Tokens of each row among the new places; they are the last ones.
        interval : int
            Tokens between two evictions.
        """
        n_new, both = int(states[0].shape[2]), self.lengths + lengths
        frozen, end = self._frozen(states), self.tokens + n_new
        apart = (self.lengths > 0) & (lengths < n_new)
        if apart.any():  # tokens of a row follow each other
            old = self.states
            whole = [torch.cat(pair, dim=2) for pair in zip(old, states, strict=True)]
            end = int(both.max())
            place = np.arange(end) - (end - both[:, None])  # among the row's own
            first = self.tokens - self.lengths[:, None]
            skipped = np.where(place >= self.lengths[:, None], n_new - lengths[:, None], 0)
            self._gather(whole, first + place + skipped)
        elif frozen or end > int(self.buffers[0].shape[2]):
            self._alone += n_new == 1
            few = n_new > 1 or self._alone <= FIRST_TOKENS
            room = end if frozen or few else room_for(end, interval)
            shape = (*states[0].shape[:2], room - end)
            keys, values = (
                torch.cat([old, new, new.new_empty(*shape, new.shape[-1])], dim=2)
                for old, new in zip(self.states, states, strict=True)
            )
            self.buffers = keys, values
        else:
            self._alone += n_new == 1
            for buffer, new in zip(self.buffers, states, strict=True):
                buffer.narrow(2, self.tokens, n_new).copy_(new)
        self.tokens, self.lengths = end, both

    def cut(self, removed: IntArray) -> None:
        """Remove the latest tokens of each row, (rows,) of them, and free them."""
        lengths = self.lengths - removed
        if (removed == removed[0]).all():
            self._keep(self.tokens - int(removed[0]) - int(lengths.max()), int(lengths.max()))
        else:
            end = int(lengths.max())
            place = np.arange(end) + (self.tokens - removed - end)[:, None]
            self._gather(self.states, place)
            self.tokens = end
        self.lengths = lengths

    def _gather(self, states: Sequence[Tensor], places: IntArray) -> None:
        """Take these places, (rows, n), from now on; those below 0 are of no token."""
        index = on_device(np.maximum(places, 0), states[0].device)[:, None, :, None]
        keys, values = (
            tensor.gather(2, index.expand(*tensor.shape[:2], -1, tensor.shape[3]))
            for tensor in states
        )
        self.buffers = keys, values

    def forget(self, rows: IntArray) -> None:
        """Remove all tokens of some rows; what no row needs is freed."""
        self.lengths = self.lengths.copy()
        self.lengths[rows] = 0
        longest = int(self.lengths.max())
        self._keep(self.tokens - longest, longest)

    def _keep(self, first: int, count: int) -> None:
        """Copy ``count`` places from ``first`` on: a slice would keep all alive."""
        self.buffers = tuple(  # type: ignore[assignment]
            buffer.narrow(2, first, count).clone(memory_format=torch.contiguous_format)
            for buffer in self.buffers
        )
        self.tokens, self._alone = count, 0

    def select(self, rows: Tensor) -> None:
        """Let row i go on with what row ``rows[i]`` has."""
        keys, values = (state[rows.to(state.device)] for state in self.states)
        self.__init__(keys, values, self.lengths[rows.cpu().numpy()])  # type: ignore[misc]

    def of(self, rows: IntArray) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows that have equally many, (n_rows, n_kv_heads, n, dim)."""
        count = int(self.lengths[rows[0]])
        return tuple(  # type: ignore[return-value]
            rows_of(state, rows)[:, :, self.tokens - count :] for state in self.states
        )

    def _frozen(self, states: tuple[Tensor, ...]) -> bool:
        """Whether the storage must not change: gradients go through it, or torch forbids it."""
        if self.buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            return True
        keys, values = self.buffers
        needs = torch.is_grad_enabled() and any(one.requires_grad for one in states)
        return needs or keys.requires_grad or values.requires_grad


def rows_of(states: Tensor, rows: IntArray) -> Tensor:
    """Return some rows: a view where they follow each other."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1:
        return states.narrow(0, first, count)
    return states[on_device(np.asarray(rows), states.device)]
