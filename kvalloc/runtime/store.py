"""Store of one full-attention layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicLayer

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates, latent_states
from kvalloc.runtime.door import Batch, Columns
from kvalloc.runtime.kept import NO_COLUMN, Kept, Part, added, joined, packed
from kvalloc.runtime.notes import Notes
from kvalloc.runtime.tail import Tail, rows_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Entries of rows, (n_rows, n_kv_heads, n), the same number for each.

    `positions` count tokens of the row. For `absent` and `counts` see `AttentionStates`.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    absent: Tensor | None = None
    counts: Tensor | None = None


class Store(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a layer.

    *Whole*: before any eviction it is transformers' layer, operation for operation, so a budget of
    100% is bit-identical. *Reduced*: `kept` holds entries of earlier evictions, `tail` later
    tokens.

    Attributes
    ----------
    keys, values : Tensor, (rows, n_kv_heads, n_stored, head_dim)
        A whole layer's columns, or a reduced one's tail.
    fresh : bool
        Whether an eviction follows the next `update`: it copies nothing that may go.
    template : AttentionStates or None
        Part of its attention that a prompt's forwards share.
    latent : bool
        Whether it stores latents and rotary keys.
    readers : int
        Other layers that attend to its entries.
    """

    is_croppable = True  # `BudgetCache.crop` refuses to go behind the latest eviction

    keys: Any  # transformers calls them optional
    values: Any

    def __init__(self, *, latent: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.latent, self.readers = latent, 0
        self._forget()

    def _forget(self) -> None:
        self.kept: Kept | None = None
        self.tail: Tail | None = None
        self.seen, self.fresh = 0, False
        self.notes = Notes()
        self.template: AttentionStates | None = None

    @property
    def rows(self) -> int:
        """Stored rows; 0 at first."""
        return 0 if self.keys is None or self.keys.ndim < 4 else int(self.keys.shape[0])

    def latest(self, tokens: IntArray) -> IntArray:
        """Return each row's tokens since its latest eviction."""
        return tokens if self.tail is None else self.tail.lengths

    @property
    def kept_counts(self) -> IntArray:
        """Entries kept by earlier evictions, (rows, n_kv_heads)."""
        if self.kept is None:
            return np.zeros((self.rows, int(self.keys.shape[1])), dtype=np.int64)
        return self.kept.lengths

    def counts(self, tokens: IntArray) -> IntArray:
        """Return the number of entries, (rows, n_kv_heads)."""
        return np.asarray(self.kept_counts + self.latest(tokens)[:, None])

    def stored_tensors(self) -> list[Tensor]:
        """Return all tensors, positions included."""
        if self.kept is None or self.tail is None:
            return [] if self.keys is None else [self.keys, self.values]
        return [*self.tail.buffers, *self.kept.tensors()]

    # Adding

    def update(
        self, key_states: Tensor, value_states: Tensor, batch: Batch, *args: Any, interval: int
    ) -> tuple[Tensor, Tensor]:
        """Add new tokens; return `keys` and `values`."""
        self.seen += int(key_states.shape[-2])
        if self.tail is not None:
            states = batch.aligned(key_states), batch.aligned(value_states)
            self.tail.add(states, batch.lengths, interval=interval)
            self.keys, self.values = self.tail.states
        elif self.fresh and not self.rows:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        else:
            super().update(key_states, value_states)
        return self.keys, self.values

    def attended(self) -> Kept:
        """Return kept entries as attention reads them."""
        assert self.kept is not None
        if not self.latent:
            return self.kept
        parts = []
        for part in (one.unpacked(self.kept.like) for one in self.kept.parts):
            keys, values = self.seen_as(part.keys, part.values)
            parts.append(replace(part, keys=keys, values=values))
        return replace(self.kept, parts=tuple(parts))

    # What there is to choose from

    def seen_as(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values for `AttentionStates`."""
        return latent_states(keys, values) if self.latent else (keys, values)

    def stored_as(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `seen_as`."""
        if not self.latent:
            return keys, values
        first = int(values.shape[-1])
        return keys[..., :first], keys[..., first:]

    def alike(self, row: int, place: Callable[[int], object]) -> tuple[object, ...]:
        """Return a key, equal for rows of one shape."""
        if self.kept is None or self.tail is None:
            return (place(row),)
        return int(self.tail.lengths[row]), *self.kept.lengths[row].tolist()

    def is_even(self, row: int) -> bool:
        """Return whether all KV heads have equally many entries."""
        return len({*self.kept_counts[row].tolist()}) == 1

    def candidates(
        self,
        rows: IntArray,
        columns: Callable[[int], Columns],
        tokens: int | None = None,
        *,
        head: int | None = None,
        latest: bool = False,
    ) -> Candidates:
        """Return the entries of increasing rows that are `alike`, or of one KV head.

        ``columns`` returns a row's columns; ``tokens`` are by default the stored ones. ``latest``
        leaves kept entries out.
        """
        if self.kept is None or self.tail is None:
            places = columns(int(rows[0]))
            keys, values = (
                _columns_of(rows_of(states, rows), places) for states in (self.keys, self.values)
            )
        else:
            keys, values = self.tail.of(rows)
        heads = slice(None) if head is None else slice(head, head + 1)
        keys, values = keys[:, heads], values[:, heads]
        end = int(keys.shape[2])
        tokens = end if tokens is None else tokens
        latest_positions = torch.arange(tokens - end, tokens, dtype=torch.int32, device=keys.device)
        positions = latest_positions.expand(*keys.shape[:2], -1)
        if self.kept is None or latest:
            return Candidates(keys=keys, values=values, positions=positions)
        lengths = self.kept.lengths[rows][:, heads]
        before = self.kept.padded(rows, head)
        keys, values, positions = (
            torch.cat(pair, dim=2) for pair in zip(before, (keys, values, positions), strict=True)
        )
        candidates = Candidates(keys=keys, values=values, positions=positions)
        if (lengths == lengths.max(initial=0)).all():
            return candidates
        counts = torch.from_numpy(lengths + end)
        return replace(candidates, absent=positions == NO_COLUMN, counts=counts)

    # Evicting

    def as_stored(
        self,
        fresh: Part,
        rows: IntArray,
        counts: Mapping[int, IntArray] | None,
        *,
        beside_kept: bool = False,
    ) -> list[Part]:
        """Return entries of increasing rows, of the model's type, as they will be stored.

        ``counts`` of each width are (n_segments,); None changes nothing. If kept entries stay, new
        ones follow them with their width.
        """
        stored = [] if self.kept is None else self.kept.of_rows(rows)
        fresh = fresh.compact(self.seen)
        if beside_kept:
            return added(stored, fresh, counts or {16: fresh.lengths})
        return [fresh] if counts is None else packed(fresh, counts, stored)

    def replace(self, rows: IntArray, new: Sequence[Part], whole_rows: Sequence[Part] = ()) -> None:
        """Keep these entries of increasing rows, and free all others.

        ``whole_rows`` are the other rows of a whole layer.
        """
        before = self.kept
        if before is None:
            like = tuple(one.new_empty(0, one.shape[3]) for one in (self.keys, self.values))
            n_rows, heads = self.rows, int(self.keys.shape[1])
            before = Kept(parts=(), rows=n_rows, heads=heads, like=like)
        unchanged = np.setdiff1d(np.arange(before.rows), rows)
        stay = before.of_rows(unchanged) if len(unchanged) else []
        new = [part.compact(self.seen) for part in (*whole_rows, *new)]
        self.kept = replace(before, parts=joined([*stay, *new]))
        if self.tail is None:
            empty = [states[:, :, :0].clone() for states in (self.keys, self.values)]
            self.tail = Tail(empty, np.zeros(before.rows, np.int64))
        else:
            self.tail.forget(rows)
        self.keys, self.values = self.tail.states
        self.fresh = False

    # What transformers calls

    def get_seq_length(self) -> int:
        """Return the columns seen: positions stay true after eviction."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return sizes as if nothing had been evicted, as a 2-D mask.

        Older transformers pass the positions of new tokens.
        """
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.seen + int(new), 0

    def write(self, begin: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values from a column on."""
        place = begin - (self.seen - int(self.keys.shape[2]))
        for states, new in ((self.keys, keys), (self.values, values)):
            states[:, :, place : place + int(new.shape[2])] = new

    def take_back(self, columns: int, tokens: IntArray) -> None:
        """Remove the latest columns, with these tokens of each row."""
        self.seen -= columns
        if self.tail is not None:
            self.tail.cut(tokens)
            self.keys, self.values = self.tail.states
        else:
            self.keys, self.values = (
                states[..., : states.shape[2] - columns, :].clone(
                    memory_format=torch.contiguous_format
                )
                for states in (self.keys, self.values)
            )

    def reset(self) -> None:
        """Free everything."""
        self.keys = self.values = None
        self.is_initialized = False
        self._forget()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep only these rows."""
        if self.tail is None or self.kept is None:
            super().reorder_cache(beam_idx)
        else:
            self.kept = self.kept.select(beam_idx.cpu().numpy())
            self.tail.select(beam_idx)
            self.keys, self.values = self.tail.states
        self.notes.select(beam_idx)


def _columns_of(states: Tensor, columns: Columns) -> Tensor:
    if isinstance(columns, slice):
        return states[:, :, columns]
    return states[:, :, columns.to(states.device)]
