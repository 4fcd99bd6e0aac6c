"""What a layer remembers until its next eviction: latest queries, and what policies observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import Observed
from kvalloc.runtime.tail import rows_of


class Queries:
    """The latest queries of each row.

    Attributes
    ----------
    pieces : list of (ndarray, Tensor)
        Of one forward after the other: how many are of each row, (rows,), and the queries,
        (rows, n_query_heads, n, head_dim), each row's at the end.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[IntArray, Tensor]] = []
        self._before: list[tuple[IntArray, Tensor]] = []

    def add(self, queries: Tensor, lengths: IntArray, limit: int) -> None:
        """Add the queries of a forward, and forget those that are not among the latest ``limit``.

        Of single tokens, up to twice as many stay, so that few of them take the time for it.
        """
        self._before = [*self.pieces]
        self.pieces.append((lengths, queries))
        if queries.shape[2] > 1 or len(self.pieces) > 2 * limit:
            self.trim(limit, frees=False)

    def undo(self) -> None:
        """Undo the latest `add`: its forward failed."""
        self.pieces = self._before

    def trim(self, limit: int, *, frees: bool = True) -> None:
        """Forget all but the latest ``limit`` of each row; ``frees`` copies cut pieces."""
        newer = np.zeros_like(self.pieces[-1][0]) if self.pieces else np.zeros(0, np.int64)
        for place in range(len(self.pieces) - 1, -1, -1):
            lengths, queries = self.pieces[place]
            if (newer >= limit).all():
                del self.pieces[: place + 1]
                return
            left = np.where(newer < limit, lengths, 0)  # those of a row follow each other
            count = int(np.minimum(left, np.maximum(limit - newer, 0)).max())
            if count < queries.shape[2] and (frees or place == len(self.pieces) - 1):
                queries = queries[:, :, queries.shape[2] - count :].clone()
                left = np.minimum(left, count)
            self.pieces[place] = left, queries
            newer = newer + lengths

    @property
    def counts(self) -> IntArray:
        """Queries of each row, (rows,)."""
        return np.asarray(sum(lengths for lengths, _ in self.pieces))

    def signature(self, row: int) -> tuple[int, ...]:
        """Return a key that is equal for rows with queries of one shape."""
        return tuple(int(lengths[row]) for lengths, _ in self.pieces)

    def of(self, rows: IntArray, limit: int) -> Tensor:
        """Return the latest queries of rows of one signature, (n_rows, n_query_heads, n, dim)."""
        parts: list[Tensor] = []
        for lengths, queries in reversed(self.pieces):
            count = min(int(lengths[rows[0]]), limit)
            limit -= count
            if count:
                parts.insert(0, rows_of(queries, rows)[:, :, queries.shape[2] - count :])
        if not parts:
            _, queries = self.pieces[0]
            return rows_of(queries, rows)[:, :, :0]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def cut(self, counts: IntArray) -> None:
        """Forget the latest ``counts`` queries of each row."""
        for place in range(len(self.pieces) - 1, -1, -1):
            lengths, queries = self.pieces[place]
            removed = np.minimum(counts, lengths)
            counts = counts - removed
            if not removed.any():
                continue
            if (removed == lengths).all():
                del self.pieces[place]
                continue
            left, end = lengths - removed, int((lengths - removed).max())
            index = np.arange(end) + (queries.shape[2] - removed - end)[:, None]
            taken = torch.from_numpy(np.maximum(index, 0)).to(queries.device)[:, None, :, None]
            taken = taken.expand(-1, queries.shape[1], -1, queries.shape[3])
            self.pieces[place] = (left, queries.gather(2, taken))

    def forget(self, rows: IntArray) -> None:
        """Forget the queries of some rows."""
        for place, (lengths, queries) in enumerate(self.pieces):
            lengths = lengths.copy()
            lengths[rows] = 0
            self.pieces[place] = (lengths, queries)
        self.pieces = [piece for piece in self.pieces if piece[0].any()]

    def select(self, rows: Tensor) -> None:
        """Let row i go on with the queries of row ``rows[i]``."""
        sources = rows.cpu().numpy()
        self.pieces = [
            (lengths[sources], queries[rows.to(queries.device)]) for lengths, queries in self.pieces
        ]


@dataclass(slots=True)
class Notes:
    """Notes about a layer's rows.

    Attributes
    ----------
    queries : Queries
    noted_until : int
        Columns seen when the latest queries were added.
    observed : dict of Observed
        What the policy noted, by row and KV head; the head is None for notes about all. Of one
        row each.
    later : dict of Observed
        What the scorer noted of each row while its prompt was read again.
    """

    queries: Queries = field(default_factory=Queries)
    noted_until: int = 0
    observed: dict[tuple[int, int | None], Observed] = field(default_factory=dict)
    later: dict[int, Observed] = field(default_factory=dict)

    def forget(self, rows: IntArray, *, observed: bool) -> None:
        """Forget what the scorer noted of some rows; what the policy did only if ``observed``."""
        forgotten = set(rows.tolist())
        self.later = {row: note for row, note in self.later.items() if row not in forgotten}
        if observed:
            self.observed = {
                key: note for key, note in self.observed.items() if key[0] not in forgotten
            }

    def select(self, rows: Tensor) -> None:
        """Let row i go on with the notes of row ``rows[i]``."""
        self.queries.select(rows)
        places = list(enumerate(rows.tolist()))
        self.later = {to: self.later[was] for to, was in places if was in self.later}
        self.observed = {
            (to, head): note
            for to, place in places
            for (was, head), note in self.observed.items()
            if was == place
        }

    def observed_of(
        self, rows: Sequence[int], head: int | None, n_kv_heads: int
    ) -> Observed | None:
        """Return the notes of rows, or of one KV head of a row; None if there are none."""
        result = []
        for row in rows:
            note = self.observed.get((row, head))
            if note is None and head is not None and (row, None) in self.observed:
                note = of_head(self.observed[row, None], head, n_kv_heads)
            if note is None:
                return None
            result.append(note)
        return of_batch(result)

    def later_of(self, rows: Sequence[int], head: int | None, n_kv_heads: int) -> Observed | None:
        """Return what a scorer noted of rows while their prompt was read again."""
        result = [self.later[row] for row in rows if row in self.later]
        if not result:
            return None
        note = of_batch(result)
        return note if head is None else of_head(note, head, n_kv_heads)


def of_batch(notes: Sequence[Observed]) -> Observed:
    """Return the notes of several rows as one batch."""
    first = notes[0]
    if len(notes) == 1:
        return first
    columns = [note.columns for note in notes if note.columns is not None]
    totals = {name: torch.cat([note.totals[name] for note in notes]) for name in first.totals}
    return replace(first, columns=torch.cat(columns) if columns else None, totals=totals)


def of_row(observed: Observed, row: int) -> Observed:
    """Return the notes of one row of a batch."""
    return observed.rows(torch.tensor([row], device="cpu"))


def of_head(observed: Observed, head: int, n_kv_heads: int) -> Observed:
    """Return the notes of one KV head.

    In sums over tokens, axis 1 counts KV heads, or query heads, which are grouped by KV head.
    """

    def cut(states: Tensor) -> Tensor:
        if states.ndim < 2:
            return states
        group = states.shape[1] // n_kv_heads
        return states[:, head * group : (head + 1) * group]

    columns = None if observed.columns is None else cut(observed.columns)
    totals = {name: cut(total) for name, total in observed.totals.items()}
    return replace(observed, columns=columns, totals=totals)
