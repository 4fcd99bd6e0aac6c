"""Second read of the prompt; see `Scorer.later`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CARRIED_TOKENS = 8
"""Last tokens of a repeated piece that precede the next one, as in KVzip."""

SMALLEST_CHUNK = 16
"""Smallest number of tokens of a repeated piece."""


SHOWN_FIRST = 4
"""First tokens of the prompt that each repetition sees: they get much attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Later:
    """The prompt repeated after itself, teacher-forced, and removed afterwards.

    Each further piece begins with the previous one's last `CARRIED_TOKENS`.

    Attributes
    ----------
    tokens : int
        Longest piece.
    nearby : int or None
        Prompt tokens around a piece that its repetition sees, besides it and the first tokens; None
        for all.
    """

    tokens: int
    nearby: int | None = None

    def furthest(self, n_tokens: int) -> int:
        """Return the most tokens that a repetition adds to a prompt."""
        first, rest = min(self.tokens, n_tokens), min(self.tokens, n_tokens - self.tokens)
        return first if rest <= 0 else max(first, min(CARRIED_TOKENS, self.tokens) + rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterStep:
    """A piece of the second read.

    Attributes
    ----------
    n_prompt : int
        Entries of the prompt.
    shown : Tensor of int64, (n_shown,), or None
        Prompt columns that are the first keys, in order; None for all. Other keys are later
        tokens'; the last of these have the queries.
    repeated : Tensor of int64, (n_repeated,)
        Prompt columns repeated now, in all rows.
    leading : Tensor of int64, (n_leading,), or None
        Sinks not in `repeated`.
    """

    n_prompt: int
    repeated: Tensor
    leading: Tensor | None = None
    shown: Tensor | None = None

    @property
    def n_shown(self) -> int:
        """Index of the first key of a later token."""
        return self.n_prompt if self.shown is None else int(self.shown.numel())

    def places(self, columns: Tensor) -> Tensor:
        """Return the indices of prompt columns among the keys."""
        import torch

        return columns if self.shown is None else torch.searchsorted(self.shown, columns)
