"""What is known of a prompt before it is read, by which its cache is made."""

from __future__ import annotations

from dataclasses import dataclass

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
    def announced(self) -> int | None:
        """Return what `kvalloc.make_cache` takes as ``prompt_tokens``."""
        return (self.tokens or 1) if self.chunked else None


UNKNOWN = PromptSize()
"""Size of a prompt that has not come yet."""
