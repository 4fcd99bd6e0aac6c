"""What a layer remembers of a prompt that has not arrived completely."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvalloc.models.attention import Observed

__all__ = ["Part", "Unfinished", "part_of", "parts"]

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


@dataclass(slots=True)
class Unfinished:
    """Notes of one layer about the chunks of a prompt so far.

    Attributes
    ----------
    grain : int
        The finest pieces that the layer was looked at in so far, see `parts`.
    observed : dict of Observed
        What the policy noted of each piece.
    queries : dict of Tensor, each (batch or 1, n_query_heads, n, head_dim)
        The last queries of all rows (key None) or of each row.
    places : dict of Tensor of int32, each (n,)
        Columns of the tokens that those queries belong to.
    following : Tensor or None, (batch, n_query_heads, n, head_dim)
        Queries of tokens that followed a held prompt; which ones, `Followers` says.
    later : dict of Observed
        What scorers noted while the prompt was repeated, by their `later_key`: of all rows, and
        with all columns of the prompt, padding included.
    """

    grain: int = 0
    observed: dict[Part, Observed] = field(default_factory=dict)
    queries: dict[int | None, Tensor] = field(default_factory=dict)
    places: dict[int | None, Tensor] = field(default_factory=dict)
    following: Tensor | None = None
    later: dict[Hashable, Observed] = field(default_factory=dict)

    def keep_queries(self, tokens: int) -> None:
        """Hold back no more than so many of the last queries."""
        for row, held in self.queries.items():
            first = max(int(held.shape[2]) - tokens, 0)
            if first:
                self.queries[row], self.places[row] = (
                    held[:, :, first:].clone(),
                    self.places[row][first:].clone(),
                )

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
        self.queries = {
            to: held[rows.to(held.device)] if row is None else held
            for row, held in self.queries.items()
            for to in now(row)
        }
        self.places = {to: held for row, held in self.places.items() for to in now(row)}
        if self.following is not None:
            self.following = self.following[rows.to(self.following.device)]
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

    def queries_of(self, row: int | None, queries: Tensor, tokens: int) -> Tensor:
        """The last queries of a row or of all rows, old and new.

        Parameters
        ----------
        row : int or None
            Which row; None for all.
        queries : Tensor, (batch or 1, n_query_heads, n_new_tokens, head_dim)
            Queries of this chunk.
        tokens : int
            How many of the last queries the policy wants.

        Returns
        -------
        Tensor, (batch or 1, n_query_heads, n, head_dim)
            This chunk's, preceded by older ones where the chunk is shorter than ``tokens``.
        """
        missing = tokens - int(queries.shape[-2])
        if missing <= 0:
            return queries
        older = self.queries.get(row)
        if older is None and row is not None and None in self.queries:
            older = self.queries[None][row : row + 1]
        if older is None:
            return queries
        return torch.cat([older[..., -missing:, :], queries], dim=-2)

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

    def places_of(self, row: int | None, places: Tensor, tokens: int) -> Tensor:
        """Columns of the tokens whose queries `queries_of` gives, (n,).

        Parameters
        ----------
        row, tokens
            As there.
        places : Tensor of int32, (n_new_tokens,)
            Columns of this chunk's tokens.
        """
        missing = tokens - int(places.shape[0])
        older = self.places.get(row, self.places.get(None))
        if missing <= 0 or older is None:
            return places
        return torch.cat([older[-missing:], places])


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
