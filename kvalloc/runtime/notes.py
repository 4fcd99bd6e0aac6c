"""Notes of a layer until its next eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import Observed
from kvalloc.runtime.tail import BLOCK_TOKENS, Latest

_NOTHING = [torch.empty(1, 1, 0, 1, device="cpu")], np.zeros(1, np.int64)


class Queries(Latest):
    """Latest queries of each row."""

    def __init__(self) -> None:
        super().__init__(*_NOTHING)
        self._before = self.buffers, self.tokens, self.starts

    def note(self, queries: Tensor, lengths: IntArray, limit: int) -> None:
        """Add queries, and keep the latest ``limit`` of each row.

        Single tokens are trimmed once twice as many, or a block, are stored.
        """
        self._before, n_new = (self.buffers, self.tokens, self.starts), int(queries.shape[2])
        if n_new > limit:
            queries = queries[:, :, n_new - limit :].clone()
            lengths = np.minimum(lengths, limit)
        max_tokens = max(2 * limit, BLOCK_TOKENS)
        if self.tokens:
            self.append((queries,), lengths, min(self.tokens + BLOCK_TOKENS, max_tokens))
        else:
            self._fill((queries,), lengths)
        if n_new > min(1, limit) or self.tokens >= max_tokens:
            self.trim(limit)

    def undo(self) -> None:
        """Undo the latest `note`."""
        self.buffers, self.tokens, self.starts = self._before

    def trim(self, limit: int) -> None:
        """Forget all but the latest ``limit``."""
        if self.buffers[0].shape[2] > limit:
            lengths = np.minimum(self.lengths, limit)
            self._keep(self.tokens - int(lengths.max()), lengths)

    def signature(self, row: int) -> int:
        """Return a key, equal for rows of one shape."""
        return int(self.lengths[row]) if self.tokens else 0

    def cut(self, removed: IntArray) -> None:
        """Forget up to (rows,) latest queries."""
        if self.tokens:
            super().cut(np.minimum(removed, self.lengths))

    def forget(self, rows: IntArray) -> None:
        """Forget the queries of rows."""
        if self.tokens:
            super().forget(rows)

    def select(self, rows: Tensor) -> None:
        """See `Latest.select`."""
        if self.tokens:
            super().select(rows)
        else:
            self._fill(*_NOTHING)  # of any number of rows


NotesByRow: TypeAlias = "dict[tuple[int, int | None], Observed]"
"""Notes of single rows, by row and KV head; the head is None for all heads."""


@dataclass(slots=True)
class Notes:
    """Notes about a layer's rows: `observed` by policies, `later` by the second read."""

    queries: Queries = field(default_factory=Queries)
    noted_until: int = 0
    observed: NotesByRow = field(default_factory=dict)
    later: NotesByRow = field(default_factory=dict)

    def forget(self, rows: IntArray, *, observed: bool) -> None:
        """Forget the scorer's notes about rows, or the policy's too."""
        for notes in (self.later, self.observed) if observed else (self.later,):
            for key in [key for key in notes if key[0] in rows]:
                del notes[key]

    def select(self, rows: Tensor) -> None:
        """See `Latest.select`."""
        self.queries.select(rows)
        self.observed = _selected(self.observed, rows.tolist())
        self.later = _selected(self.later, rows.tolist())


def _selected(notes: NotesByRow, rows: Sequence[int]) -> NotesByRow:
    return {
        (to, head): note
        for to, place in enumerate(rows)
        for (was, head), note in notes.items()
        if was == place
    }


def of_rows(
    notes: NotesByRow, rows: IntArray, head: int | None, n_kv_heads: int
) -> Observed | None:
    """Return notes of rows, or of a KV head, or None."""
    result = []
    for row in rows.tolist():
        note = notes.get((row, head))
        if note is None and head is not None and (row, None) in notes:
            note = of_head(notes[row, None], head, n_kv_heads)
        if note is None:
            return None
        result.append(note)
    return result[0] if len(result) == 1 else _as_one(result, torch.cat)


def by_kv_head(tensors: Sequence[Tensor], n_kv_heads: int) -> Tensor:
    """Return tensors of several layers, (rows, n_query_heads, ...), as one, grouped by KV head."""
    if len(tensors) == 1:
        return tensors[0]
    grouped = [one.reshape(len(one), n_kv_heads, -1, *one.shape[2:]) for one in tensors]
    return torch.cat(grouped, dim=2).flatten(1, 2)


def _as_one(notes: Sequence[Observed], change: Callable[[list[Tensor]], Tensor]) -> Observed:
    columns = [one.columns for one in notes if one.columns is not None]
    totals = {name: change([one.totals[name] for one in notes]) for name in notes[0].totals}
    return replace(notes[0], columns=change(columns) if columns else None, totals=totals)


def of_readers(notes: Sequence[Observed], n_kv_heads: int) -> Observed:
    """Return notes of layers that read the same entries, as one."""
    return _as_one(
        notes, lambda each: by_kv_head(each, n_kv_heads) if each[0].ndim > 1 else each[0]
    )


def of_row(observed: Observed, row: int) -> Observed:
    """Return a copy of a row's notes."""
    return _as_one([observed], lambda each: each[0][row, None].clone())


def of_head(observed: Observed, head: int, n_kv_heads: int) -> Observed:
    """Return the notes of one KV head.

    In sums, axis 1 counts KV heads, or query heads by KV head.
    """

    def cut(each: list[Tensor]) -> Tensor:
        if each[0].ndim < 2:
            return each[0]
        group = each[0].shape[1] // n_kv_heads
        return each[0][:, head * group : (head + 1) * group]

    return _as_one([observed], cut)
