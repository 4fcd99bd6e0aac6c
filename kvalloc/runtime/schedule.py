"""When entries go of a prompt and of what follows it, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.policies.base import EvictionPolicy

EVERY, OF_SEEN = 64, 16
"""Tokens after which a conversation is brought back within its budget: a full block of keys, and
where more of this share of the tokens seen, so that to do so takes the same part of the time."""


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """When what follows a prompt competes: every so many tokens, and when a turn is answered.

    Attributes
    ----------
    tokens : int or None
        Number of tokens after the latest eviction; None where it grows with the tokens seen.
    memory : int or None
        Number of bytes that the budgets of all tokens seen, and what may follow, never exceed.
    """

    tokens: int | None
    memory: int | None

    def interval(self, settled: int, token_bytes: int) -> int:
        """Return the number of tokens after which what follows so many competes.

        Parameters
        ----------
        settled : int
            Number of tokens that had been seen at the latest eviction.
        token_bytes : int
            Bytes of a token of each row, as the model makes it: all that follow take at most a
            quarter of the memory.
        """
        tokens = self.tokens or default_interval(settled)
        if self.memory is None:
            return tokens
        return max(min(tokens, self.memory // (4 * token_bytes)), 1)

    def columns(self, settled: int, end: int, token_bytes: int) -> Iterator[int]:
        """Yield the columns before `end` at which what follows so many competes."""
        while (settled := settled + self.interval(settled, token_bytes)) < end:
            yield settled


class Schedule(NamedTuple):
    """When entries of a prompt go, and of what follows it.

    Attributes
    ----------
    holds : bool
        Whether a prompt stays whole until it is complete and all layers evict at once; else a
        layer evicts once it has read it.
    every : Settlement or None
        None where nothing ever goes of what follows.
    """

    holds: bool
    every: Settlement | None


def default_interval(settled: int) -> int:
    """Return after how many tokens what follows so many competes, by default."""
    return max(EVERY, settled // OF_SEEN)


def schedule_of(
    profile: BudgetProfile, policy: EvictionPolicy, options: CacheOptions, *, in_chunks: bool
) -> Schedule:
    """Return the schedule of a prompt and of what follows it.

    Parameters
    ----------
    profile : BudgetProfile
    policy : EvictionPolicy
        The profile's, which chooses.
    options : CacheOptions
    in_chunks : bool
        Whether the prompt comes in several forwards.
    """
    again, whole = policy.scorer.later is not None, policy.holds and in_chunks
    holds = again or whole or (profile.by_prompt and not options.by_layer)
    every = Settlement(tokens=options.decode_every, memory=options.memory)
    goes = profile.reduces or options.memory is not None
    return Schedule(holds, every if goes else None)
