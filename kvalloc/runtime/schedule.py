"""When entries go: the events of a prompt and of what follows it, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.sharing_groups import Groups
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.policies.base import EvictionPolicy
from kvalloc.scorers.base import awaited_tokens

EVERY, OF_SEEN = 64, 16
"""Tokens after which a conversation is brought back within its budget: a full block of keys, and
where more of this share of the tokens seen, so that to do so takes the same part of the time."""


class When(Enum):
    """What has happened when entries go."""

    LAYER_READ = "a layer, or the last of a group, has read a forward of the prompt"
    PROMPT_READ = "the prompt is complete"
    FOLLOWED = "so many tokens have followed the prompt"
    EVERY = "so many tokens have followed the latest eviction, or a turn has been answered"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One time at which entries go.

    Attributes
    ----------
    when : When
    scope : Groups
        Layers that evict at once. Where each prompt hands out the budgets, their heads compete.
    tokens : int or None
        Number of tokens of ``FOLLOWED`` and ``EVERY``; None where it grows with the tokens seen.
    memory : int or None
        Number of bytes that the budgets of all tokens seen, and what may follow, never exceed.
    """

    when: When
    scope: Groups
    tokens: int | None = None
    memory: int | None = None

    def together(self, layer: int) -> tuple[int, ...]:
        """Return the layers that evict at once with this one, in order."""
        return next(layers for layers in self.scope if layer in layers)

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
    """When entries of a prompt go, and of what follows it; None where nothing ever goes."""

    prompt: Event
    every: Event | None

    @property
    def holds(self) -> bool:
        """Return whether a prompt stays whole until all layers evict at once."""
        return self.prompt.when is not When.LAYER_READ

    @property
    def awaited(self) -> int:
        """Return the number of tokens that have to follow a prompt before anything of it goes."""
        return self.prompt.tokens or 0


def layer_groups(profile: BudgetProfile) -> Groups:
    """Return the layers that keep the same entries, in order; most are alone."""
    together = {layer: group for group in profile.share_groups for layer in group}
    full = profile.shape.full_layers
    return tuple(dict.fromkeys(together.get(layer, (layer,)) for layer in full))


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
    full = profile.shape.full_layers
    later = [scorer for layer in full for scorer in policy.later_scorers(layer)]
    # a group evicts after its last layer, when the queries of its others have gone
    whole = policy.holds and (in_chunks or bool(profile.share_groups))
    if awaited := awaited_tokens(later):
        prompt = Event(when=When.FOLLOWED, scope=(full,), tokens=awaited)
    elif later or whole or (profile.by_prompt and not options.by_layer):
        prompt = Event(when=When.PROMPT_READ, scope=(full,))
    else:
        prompt = Event(when=When.LAYER_READ, scope=layer_groups(profile))
    tokens, memory = options.decode_every, options.memory
    every = Event(when=When.EVERY, scope=(full,), tokens=tokens, memory=memory)
    return Schedule(prompt, every if profile.reduces else None)
