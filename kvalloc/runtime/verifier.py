"""The full cache beside a reduced one, which verifies what that drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvalloc.accounting.stored import layer_tensors

LONGEST_DRAFT, EVEN_ODDS = 16, 0.5
"""A draft is as long as the odds are even that all of it is accepted, and never longer."""

BEFORE = (4.0, 5.0)
"""Tokens accepted, of those tried, that are taken for granted before any was."""


@dataclass(kw_only=True)
class Verifier:
    """The full cache beside a reduced one, and what verifying with it took.

    Attributes
    ----------
    full : transformers.Cache
        Of all tokens that the reduced one has seen, exact; off the device where that is a GPU.
    tokens : int
        Tokens of each row that were answered.
    rounds : int
        Forwards that verified, each of which read the full cache once.
    tried, accepted : int
        Drafted tokens that were compared, and those that stayed.
    ties : int
        Tokens of greedy answers whose runner-up was within rounding.
    bytes_read : int
        Bytes of the full cache that verifying read.
    """

    full: Any = field(repr=False)
    tokens: int = 0
    rounds: int = 0
    tried: int = 0
    accepted: int = 0
    ties: int = 0
    bytes_read: int = 0

    @property
    def acceptance(self) -> float | None:
        """Return the share of the drafted tokens that stayed; None before any was tried."""
        return self.accepted / self.tried if self.tried else None

    @property
    def tokens_per_round(self) -> float | None:
        """Return the answered tokens for each read of the full cache; None before any."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def full_bytes(self) -> int:
        """Return the bytes of K and V that the full cache holds."""
        return sum(own.nbytes for layer in self.full.layers for own in layer_tensors(layer))

    @property
    def facts(self) -> dict[str, int]:
        """Return everything that was counted, as plain values."""
        names = ("tokens", "rounds", "tried", "accepted", "ties", "bytes_read")
        return {"full_bytes": self.full_bytes, **{name: getattr(self, name) for name in names}}

    @property
    def draft_tokens(self) -> int:
        """Return the length of the next draft, by the acceptance so far.

        Of a share a of tokens that stay, drafts of k stay whole with a^k, and a round gives
        (1 - a^(k + 1)) / (1 - a) tokens (Leviathan et al. 2023).
        """
        share = (BEFORE[0] + self.accepted) / (BEFORE[1] + self.tried)
        longest = math.log(EVEN_ODDS) / math.log(min(share, 1 - 1e-6)) if share > 0 else 1
        return max(1, min(LONGEST_DRAFT, int(longest)))
