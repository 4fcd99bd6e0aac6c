"""What a layer remembers of a prompt that has not arrived completely."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvalloc.models.attention import Observed

__all__ = ["Asked", "Latest", "Part", "Unfinished", "part_of", "parts"]

#: A row and a KV head of a layer; None stands for all of them.
Part: TypeAlias = tuple[int | None, int | None]

LAYER: Part = (None, None)


def parts(grain: int, batch: int, n_kv_heads: int) -> list[Part]:
    """Pieces in which a policy looks at a layer.

    Parameters
    ----------
    grain : int
        0: the layer at once. 1: row by row, where rows have padding in different places. 2: head
        by head, where heads hold different entries already.
    batch, n_kv_heads : int
        Size of the layer.
    """
    if grain == 0:
        return [LAYER]
    if grain == 1:
        return [(row, None) for row in range(batch)]
    return [(row, head) for row in range(batch) for head in range(n_kv_heads)]


class Asked(NamedTuple):
    """Queries of one row, or of all, and where their tokens stand.

    Attributes
    ----------
    queries : Tensor, (batch or 1, n_query_heads, n, head_dim)
    places : Tensor of int32, (n,)
        Columns of the tokens.
    """

    queries: Tensor
    places: Tensor

    def last(self, tokens: int) -> Asked:
        """A copy of so many of the last ones."""
        first = max(int(self.places.shape[0]) - tokens, 0)
        return Asked(self.queries[:, :, first:].clone(), self.places[first:].clone())


@dataclass(slots=True)
class Latest:
    """The latest queries of tokens that came one forward after the other.

    Attributes
    ----------
    pieces : list of Tensor, each (batch, n_query_heads, n_new_tokens, head_dim)
        One a forward.
    tokens : int
        How many these are.
    end : int
        Column behind the last of them.
    """

    pieces: list[Tensor] = field(default_factory=list)
    tokens: int = 0
    end: int = 0

    def add(self, queries: Tensor, end: int, most: int) -> None:
        """Add queries that end before a column, and forget what is not among so many."""
        first = max(int(queries.shape[2]) - most, 0)
        self.pieces.append(queries[:, :, first:].clone() if first else queries)
        self.tokens, self.end = self.tokens + int(queries.shape[2]) - first, end
        while (left := self.tokens - int(self.pieces[0].shape[2])) >= most and len(self.pieces) > 1:
            del self.pieces[0]
            self.tokens = left

    def crop(self, end: int) -> None:
        """Forget those from a column on."""
        gone, self.end = max(self.end - end, 0), min(self.end, end)
        left = max(self.tokens - gone, 0)
        if left < self.tokens:
            self.pieces, self.tokens = [self.queries[:, :, :left]], left

    def rows(self, rows: Tensor) -> Latest:
        """Return those of these rows."""
        pieces = [own[rows.to(own.device)] for own in self.pieces]
        return Latest(pieces, self.tokens, self.end)

    @property
    def queries(self) -> Tensor:
        """All of them, (batch, n_query_heads, tokens, head_dim)."""
        return torch.cat(self.pieces, dim=2)


@dataclass(slots=True)
class Unfinished:
    """Notes of one layer about the chunks of a prompt so far.

    Attributes
    ----------
    grain : int
        The finest pieces that the layer was looked at in so far, see `parts`.
    observed : dict of Observed
        What the policy noted of each piece.
    asked : dict of Asked
        The last queries of all rows (key None) or of each row.
    following : Tensor or None, (batch, n_query_heads, n, head_dim)
        Queries of tokens that followed a held prompt; which ones, `Followers` says.
    latest : Latest
        Queries of tokens since anything was evicted.
    later : dict of Observed
        What scorers noted while the prompt was repeated, by their `later_key`: of all rows, and
        with all columns of the prompt, padding included.
    """

    grain: int = 0
    observed: dict[Part, Observed] = field(default_factory=dict)
    asked: dict[int | None, Asked] = field(default_factory=dict)
    following: Tensor | None = None
    latest: Latest = field(default_factory=Latest)
    later: dict[Hashable, Observed] = field(default_factory=dict)

    def select(self, rows: Tensor) -> None:
        """Let row i go on with the notes of row ``rows[i]``."""
        numbers = rows.tolist()

        def now(row: int | None) -> list[Any]:
            """Where what was noted of a row belongs; of all rows (None), to all."""
            return (
                [to for to, was in enumerate(numbers) if was == row] if row is not None else [None]
            )

        self.observed = {
            (to, head): found.rows(rows) if row is None else found
            for (row, head), found in self.observed.items()
            for to in now(row)
        }
        self.asked = {
            to: own._replace(queries=own.queries[rows.to(own.places.device)])
            if row is None
            else own
            for row, own in self.asked.items()
            for to in now(row)
        }
        if self.following is not None:
            self.following = self.following[rows.to(self.following.device)]
        self.latest = self.latest.rows(rows)
        self.later = {key: noted.rows(rows) for key, noted in self.later.items()}

    def observed_of(self, part: Part, n_kv_heads: int) -> Observed | None:
        """What was noted of a piece, if need be cut from the notes of a larger one."""
        row, head = part
        for key in (part, (row, None), LAYER):
            found = self.observed.get(key)
            if found is not None:
                cut_row = row if key[0] is None else None
                cut_head = head if key[1] is None else None
                return part_of(found, (cut_row, cut_head), n_kv_heads)
        return None

    def asked_of(self, row: int | None, new: Asked, tokens: int) -> Asked:
        """The last queries of a row or of all rows, old and new.

        Parameters
        ----------
        row : int or None
            Which row; None for all.
        new : Asked
            Those of this chunk.
        tokens : int
            How many of the last queries the policy wants.

        Returns
        -------
        Asked
            This chunk's, preceded by older ones where the chunk is shorter than ``tokens``.
        """
        missing = tokens - int(new.places.shape[0])
        older = self.asked.get(row, self.asked.get(None))
        if missing <= 0 or older is None:
            return new
        own = slice(None) if row in self.asked or row is None else slice(row, row + 1)
        queries = torch.cat([older.queries[own, :, -missing:], new.queries], dim=2)
        return Asked(queries, torch.cat([older.places[-missing:], new.places]))

    def later_of(
        self, part: Part, columns: slice | Tensor, n_kv_heads: int
    ) -> dict[Hashable, Observed]:
        """What was noted of a piece while the prompt was repeated, cut to some columns."""
        found = {}
        for key, noted in self.later.items():
            own = part_of(noted, part, n_kv_heads)
            cut = None if own.columns is None else own.columns[..., columns]
            found[key] = replace(own, columns=cut)
        return found


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
