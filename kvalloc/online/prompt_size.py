"""The size of a prompt that has not been read yet, by which its cache is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvalloc.accounting import IntArray


@dataclass(frozen=True, kw_only=True)
class PromptSize:
    """The size of a prompt; each kind of target makes its cache from one.

    Attributes
    ----------
    tokens : int or None
        Length, padding included; None where it is not known.
    lengths : tuple of int
        Tokens of each row, without padding; empty for a single row without any.
    chunked : bool
        Whether it comes in several forwards.
    rows : tuple of ndarray of int64, (n_tokens,)
        Token ids of each row, without padding; empty where they are not known.
    """

    tokens: int | None = None
    lengths: tuple[int, ...] = ()
    chunked: bool = False
    rows: tuple[IntArray, ...] = ()

    @property
    def columns(self) -> int:
        """Return the length, padding included; 0 if it is not known."""
        return self.tokens or 0

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return max(self.lengths or (self.columns,))

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return len(self.lengths) or 1

    def of_rows(self, indices: Sequence[int]) -> PromptSize:
        """Return the size of some rows, at least 1 token each, without their ids."""
        lengths = self.lengths or (self.columns,)
        return replace(self, lengths=tuple(max(lengths[row], 1) for row in indices), rows=())

    @property
    def announced(self) -> int | None:
        """Return what `kvalloc.make_cache` takes as ``prompt_tokens``."""
        return (self.tokens or 1) if self.chunked else None


UNKNOWN = PromptSize()
"""Size of a prompt that has not come yet."""
