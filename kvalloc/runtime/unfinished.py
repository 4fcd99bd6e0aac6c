"""What a layer remembers of a prompt that has not arrived completely."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from kvalloc.models.attention import Observed

#: A row and a KV head of a layer; None stands for all of them.
Part: TypeAlias = tuple[int | None, int | None]

LAYER: Part = (None, None)
"""All of a layer at once."""


@dataclass(slots=True)
class Queries:
    """The latest queries of each row, padding left out.

    Attributes
    ----------
    pieces : list of (Tensor, Tensor)
        Of one forward after the other: columns of its tokens, (batch, n), on the host, and their
        queries, (batch, n_query_heads, n, head_dim). A row that has fewer than another has column
        -1 in front.
    """

    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, queries: Tensor, columns: Tensor, most: int, *, padded: bool) -> None:
        """Add those of a forward, and forget what is not among so many of the latest of a row.

        Parameters
        ----------
        queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
        columns : Tensor of int64, (batch, n_new_tokens)
            -1 for padding.
        most : int
        padded : bool
            Whether there is padding.
        """
        self.pieces.append((columns, queries))
        if padded:
            self._keep_latest(most)
        elif columns.shape[1] > most:
            self.pieces = [_last(columns, queries, most)]
        elif columns.shape[1] == 1:  # so is every piece that follows the first ones
            del self.pieces[: max(len(self.pieces) - most, 0)]
        else:
            tokens = sum(int(own.shape[1]) for own, _ in self.pieces)
            while len(self.pieces) > 1 and (tokens := tokens - self.pieces[0][0].shape[1]) >= most:
                del self.pieces[0]

    def of(self, row: int | None) -> tuple[Tensor, Tensor]:
        """Return the queries of a row, or of all, (batch or 1, ...), and their columns, (n,)."""
        columns, queries = self._joined()
        if row is None:  # no padding
            return queries, columns[0]
        first = int((columns[row] < 0).sum())
        return queries[row : row + 1, :, first:], columns[row, first:]

    def trim(self, most: int) -> None:
        """Forget, and free, all but so many of the latest of each row."""
        columns, queries = self._joined()
        if columns.shape[1] > most:
            self.pieces = [_last(columns, queries, most)]

    def crop(self, end: int) -> None:
        """Forget those from a column on."""
        if any(bool((columns >= end).any()) for columns, _ in self.pieces):
            columns, queries = self._joined()
            self.pieces = [(columns.masked_fill(columns >= end, -1), queries)]
            self._keep_latest(int(columns.shape[1]))

    def rows(self, rows: Tensor) -> Queries:
        """Return those of these rows."""
        pairs = self.pieces
        return Queries([(own[rows.cpu()], states[rows.to(states.device)]) for own, states in pairs])

    def _joined(self) -> tuple[Tensor, Tensor]:
        """Return all columns and all queries, which are one piece from now on."""
        if len(self.pieces) > 1:
            several = zip(*self.pieces, strict=True)
            columns, queries = (torch.cat(own, dim=1 + n) for n, own in enumerate(several))
            self.pieces = [(columns, queries)]
        return self.pieces[0]

    def _keep_latest(self, most: int) -> None:
        """Keep so many of each row, those of rows with fewer behind columns of -1."""
        columns, queries = self._joined()
        first = max(int(columns.shape[1]) - most, 0)
        order = (columns >= 0).byte().argsort(dim=1, stable=True)[:, first:]
        latest = columns.gather(1, order)
        some = (latest >= 0).any(dim=0)
        index = order[:, some].to(queries.device)[:, None, :, None]
        index = index.expand(-1, queries.shape[1], -1, queries.shape[3])
        self.pieces = [(latest[:, some], queries.gather(2, index))]


def _last(columns: Tensor, queries: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return a copy of so many of the last."""
    first = int(columns.shape[1]) - most
    return columns[:, first:].clone(), queries[:, :, first:].clone()


@dataclass(slots=True)
class Unfinished:
    """Notes of one layer about the chunks of a prompt so far.

    Attributes
    ----------
    observed : dict of Observed
        What the policy noted of each piece.
    prompt : Queries
        Of the prompt.
    latest : Queries
        Of what followed it, since anything was evicted.
    later : Observed or None
        What the scorer noted while the prompt was repeated: of all rows, and with all columns of
        the prompt, padding included.
    """

    observed: dict[Part, Observed] = field(default_factory=dict)
    prompt: Queries = field(default_factory=Queries)
    latest: Queries = field(default_factory=Queries)
    later: Observed | None = None

    def select(self, rows: Tensor) -> None:
        """Let row i go on with the notes of row ``rows[i]``."""
        places: dict[int | None, list[int | None]] = {None: [None]}  # of all rows, for all rows
        for to, was in enumerate(rows.tolist()):
            places.setdefault(was, []).append(to)
        self.observed = {
            (to, head): noted.rows(rows) if row is None else noted
            for (row, head), noted in self.observed.items()
            for to in places.get(row, ())
        }
        self.prompt, self.latest = self.prompt.rows(rows), self.latest.rows(rows)
        self.later = self.later and self.later.rows(rows)

    def observed_of(self, part: Part, n_kv_heads: int) -> Observed | None:
        """What was noted of a piece, if need be cut from the notes of a larger one."""
        row, head = part
        for key in (part, (row, None), LAYER):
            noted = self.observed.get(key)
            if noted is not None:
                cut_row = row if key[0] is None else None
                cut_head = head if key[1] is None else None
                return part_of(noted, (cut_row, cut_head), n_kv_heads)
        return None

    def later_of(self, part: Part, columns: slice | Tensor, n_kv_heads: int) -> Observed | None:
        """What was noted of a piece while the prompt was repeated, cut to some columns."""
        if self.later is None:
            return None
        own = part_of(self.later, part, n_kv_heads)
        return replace(own, columns=None if own.columns is None else own.columns[..., columns])


def part_of(observed: Observed, part: Part, n_kv_heads: int) -> Observed:
    """The notes of one row and one head out of those of all.

    In sums over tokens, axis 1 counts KV heads, or query heads, which are grouped by KV head.
    """
    row, head = part
    rows = slice(None) if row is None else slice(row, row + 1)

    def cut(states: Tensor) -> Tensor:
        states = states[rows]
        if head is None or states.ndim < 2:
            return states
        group = states.shape[1] // n_kv_heads
        return states[:, head * group : (head + 1) * group]

    columns = None if observed.columns is None else cut(observed.columns)
    totals = {name: cut(total) for name, total in observed.totals.items()}
    return replace(observed, columns=columns, totals=totals)
