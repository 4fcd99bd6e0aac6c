"""Latest tokens of each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.runtime.kept import index_of, on_device

BLOCK_TOKENS = 64
"""Tokens by which a tail's storage grows: between two growths nothing is copied, and no address
changes."""

FIRST_TOKENS = 8
"""The first decoded tokens get no spare capacity, so that a short answer to a short prompt stores
less than the prompt."""


def room_for(tokens: int, interval: int) -> int:
    """Return the capacity for decoded tokens: no spare one at first, then whole blocks.

    It lasts to the next eviction at most.
    """
    if tokens <= FIRST_TOKENS:
        return tokens
    return min(-(-tokens // one) * one for one in (BLOCK_TOKENS, interval))


class Latest:
    """Latest states of each row, with spare capacity, padded in front.

    The first `tokens` places of `buffers`, (rows, heads, room, head_dim) each, are in use.
    `starts`, (rows,), is padding.
    """

    def __init__(self, buffers: Iterable[Tensor], lengths: IntArray) -> None:
        self._fill(buffers, lengths)

    def _fill(self, buffers: Iterable[Tensor], lengths: IntArray) -> None:
        self.buffers = tuple(buffers)
        self._use(int(self.buffers[0].shape[2]), lengths)

    def _use(self, tokens: int, lengths: IntArray) -> None:
        self.tokens, starts = tokens, tokens - lengths
        self.starts: IntArray | None = starts if starts.any() else None

    @property
    def lengths(self) -> IntArray:
        """Tokens of each row."""
        rows = len(self.buffers[0])
        return np.full(rows, self.tokens) if self.starts is None else self.tokens - self.starts

    @property
    def states(self) -> tuple[Tensor, ...]:
        """Views of the places in use."""
        return tuple(buffer.narrow(2, 0, self.tokens) for buffer in self.buffers)

    def append(self, states: tuple[Tensor, ...], lengths: IntArray, room: int = 0) -> None:
        """Append states of new tokens, (rows, heads, n_new, head_dim) each.

        The last ``lengths``, (rows,), are tokens. If they do not fit, ``room`` places are
        allocated.
        """
        n_new = int(states[0].shape[2])
        end, in_all_rows = self.tokens + n_new, min(lengths.tolist()) == n_new
        if not in_all_rows:
            old, both = self.lengths, self.lengths + lengths
        if not in_all_rows and ((old > 0) & (lengths < n_new)).any():
            # tokens of a row follow each other
            pairs = zip(self.states, states, strict=True)
            whole = [torch.cat(pair, dim=2) for pair in pairs]
            end = max(int(both.max()), n_new)  # no fewer places than queries
            place = np.arange(end) - (end - both[:, None])  # among the row's own
            skipped = np.where(place >= old[:, None], n_new - lengths[:, None], 0)
            self._gather(whole, self.tokens - old[:, None] + place + skipped)
        elif (frozen := self._frozen(states)) or end > int(self.buffers[0].shape[2]):
            shape = (*states[0].shape[:2], 0 if frozen else max(room - end, 0))
            self.buffers = tuple(
                torch.cat([before, new, new.new_empty(*shape, new.shape[-1])], dim=2)
                for before, new in zip(self.states, states, strict=True)
            )
        else:
            for buffer, new in zip(self.buffers, states, strict=True):
                buffer.narrow(2, self.tokens, n_new).copy_(new)
        if in_all_rows:
            self.tokens = end
        else:
            self._use(end, both)

    def cut(self, removed: IntArray) -> None:
        """Remove and free up to (rows,) latest tokens."""
        lengths = self.lengths - removed
        end = int(lengths.max())
        if (removed == removed[0]).all():
            self._keep(self.tokens - int(removed[0]) - end, lengths)
        else:
            place = np.arange(end) + (self.tokens - removed - end)[:, None]
            self._gather(self.states, place)
            self._use(end, lengths)

    def _gather(self, states: Sequence[Tensor], places: IntArray) -> None:
        index = on_device(np.maximum(places, 0), states[0].device)[:, None, :, None]
        self.buffers = tuple(
            tensor.gather(2, index.expand(*tensor.shape[:2], -1, tensor.shape[3]))
            for tensor in states
        )

    def forget(self, rows: IntArray) -> None:
        """Remove all tokens of rows, and free unused places."""
        lengths = self.lengths.copy()
        lengths[rows] = 0
        self._keep(self.tokens - int(lengths.max()), lengths)

    def _keep(self, first: int, lengths: IntArray) -> None:
        """Copy the longest row's places: a slice would keep all alive."""
        places = (buffer.narrow(2, first, int(lengths.max())) for buffer in self.buffers)
        copies = [one.clone(memory_format=torch.contiguous_format) for one in places]
        self._fill(copies, lengths)

    def select(self, rows: Tensor) -> None:
        """Let row i go on with row ``rows[i]``."""
        states = [state[rows.to(state.device)] for state in self.states]
        self._fill(states, self.lengths[rows.cpu().numpy()])

    def of(self, rows: IntArray, limit: int | None = None) -> tuple[Tensor, ...]:
        """Return the latest states of rows of equal length."""
        count = int(self.lengths[rows[0]])
        count = count if limit is None else min(count, limit)
        return tuple(rows_of(state, rows)[:, :, self.tokens - count :] for state in self.states)

    def _frozen(self, states: tuple[Tensor, ...]) -> bool:
        """Whether gradients or torch forbid changes of the storage."""
        if self.buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            return True
        needs = torch.is_grad_enabled() and any(one.requires_grad for one in states)
        return needs or any(buffer.requires_grad for buffer in self.buffers)


class Tail(Latest):
    """Contiguous keys and values since a layer's latest eviction."""

    def _fill(self, buffers: Iterable[Tensor], lengths: IntArray) -> None:
        self._n_single = 0  # tokens that came one at a time
        super()._fill(buffers, lengths)

    @property
    def has_room(self) -> bool:
        """Whether one more token fits."""
        return self.tokens < int(self.buffers[0].shape[2])

    def add(self, states: tuple[Tensor, ...], lengths: IntArray, *, interval: int) -> None:
        """Append keys and values; only single tokens get spare capacity."""
        room, is_single = 0, states[0].shape[2] == 1
        self._n_single += is_single
        if is_single and self._n_single > FIRST_TOKENS and not self.has_room:
            room = room_for(self.tokens + 1, interval)
        self.append(states, lengths, room)


def rows_of(states: Tensor, rows: IntArray) -> Tensor:
    """Return rows, a view if they are adjacent."""
    return states[index_of(rows, states.device)]
