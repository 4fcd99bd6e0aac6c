"""What holds for all prompts of a cache: whose budgets, who chooses, and when."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import within_bytes
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import rotates_halves
from kvalloc.models.structure import context_limit, decoder_of
from kvalloc.runtime import refusals
from kvalloc.runtime.deciding import Decide
from kvalloc.runtime.eviction import groups_by_layer
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.packed import rounded_layers
from kvalloc.runtime.policies import EvictionPolicy, policies_of
from kvalloc.runtime.repetition import Wanted
from kvalloc.scorers import Scorer
from kvalloc.scorers.base import awaited_tokens
from kvalloc.shape import HALF_BYTES

__all__ = ["Plan", "due_after"]

EVERY, OF_SEEN = 64, 16
"""Tokens after which a conversation is brought back within its budget: a full block of keys, and
where more of this share of the tokens seen, so that to do so takes the same part of the time."""


def due_after(settled: int) -> int:
    """Return after how many tokens what follows so many competes, by default."""
    return max(EVERY, settled // OF_SEEN)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What holds for all prompts of a cache, and is shared by its copies.

    Attributes
    ----------
    profile : BudgetProfile
        Budgets and policies; decided ones may take their place, prompt by prompt.
    policy : EvictionPolicy
        Who chooses.
    decide : Decide or None
        Decides budgets before anything of a prompt is stored.
    decoder : weakref of nn.Module
        The model without its head.
    name : str
        Class of the model.
    bits : mapping
        Of layers whose entries are rounded when the prompt is complete, those of each KV head.
    halves : mapping
        The same of layers that are rounded to 16 bits before, where anything is evicted.
    groups : mapping
        Of layers that share entries, their group.
    wanted : mapping of int to tuple of Scorer
        For each layer, the scorers that look beyond the prompt.
    holds, holds_chunks : bool
        Whether a prompt that comes in one forward, or in several, is held whole until all layers
        evict at once; else each layer evicts when it has read a forward.
    by_layer : bool
        Whether the heads of a layer share what it may keep, and each prompt hands it out as it is
        read.
    limit : int or None
        Tokens that the model was made for.
    reduces : bool
        Whether anything is, and so what follows a prompt competes with what is kept of it.
    every : int or None
        Tokens after which it does; None where these grow with the tokens seen.
    memory : int or None
        Bytes that all entries and what followed never exceed.
    after : EvictionPolicy
        Who chooses then.
    """

    profile: BudgetProfile
    policy: EvictionPolicy
    decide: Decide | None
    decoder: weakref.ref[nn.Module]
    name: str
    bits: Mapping[int, IntArray]
    halves: Mapping[int, IntArray]
    groups: Mapping[int, tuple[int, ...]]
    wanted: Wanted
    holds: bool
    holds_chunks: bool
    by_layer: bool
    limit: int | None
    reduces: bool
    every: int | None
    memory: int | None
    after: EvictionPolicy

    def __deepcopy__(self, memo: object) -> Plan:
        return self

    @classmethod
    def of(
        cls,
        profile: BudgetProfile,
        model: nn.Module,
        options: CacheOptions,
        *,
        decide: Decide | None,
    ) -> Plan:
        """Return the plan of a cache.

        Raises
        ------
        UnsupportedRequestError
            If the policy cannot bound the memory.
        """
        policy, every = policies_of(profile), options.decode_every
        refusals.refuse(
            no_decode_every=every is not None and not refusals.at_least_1(every) and (every,)
        )
        looks = {layer: policy.later_scorers(layer) for layer in profile.shape.full_layers}
        wanted = {layer: each for layer, each in looks.items() if each}
        by_layer = options.by_layer and profile.by_prompt
        holds = bool(wanted) or (profile.by_prompt and not by_layer)
        # a group evicts after its last layer, when the queries of its others have gone
        holds |= policy.holds and bool(profile.share_groups)
        beyond = profile.fits_a_peak and (holds or policy.combines)
        refusals.refuse(beyond_memory=beyond and policy.name)
        wide = next(model.parameters()).itemsize > HALF_BYTES
        bits = rounded_layers(profile, every=wide and profile.reduces)
        return cls(
            profile=profile,
            policy=policy,
            decide=decide,
            decoder=weakref.ref(decoder_of(model)),
            name=type(model).__name__,
            bits=bits,
            halves={layer: np.full_like(own, 16) for layer, own in bits.items()} if wide else {},
            groups=groups_by_layer(profile.share_groups),
            wanted=wanted,
            holds=holds,
            holds_chunks=holds or policy.holds,
            by_layer=by_layer,
            limit=context_limit(model),
            reduces=profile.reduces,
            every=every,
            memory=options.memory,
            after=policy.again(rotates=rotates_halves(model)),
        )

    @property
    def scorers(self) -> list[Scorer]:
        """All scorers that look beyond the prompt."""
        return [scorer for scorers in self.wanted.values() for scorer in scorers]

    @property
    def awaited(self) -> int:
        """Tokens that have to follow a prompt before anything of it is evicted."""
        return awaited_tokens(self.scorers)

    def rounds(self, layer: int) -> bool:
        """Return whether a layer is rounded, or one that it chooses entries with."""
        return any(one in self.bits for one in self.groups.get(layer, (layer,)))

    # How what follows is brought back within the budget

    def every_from(self, settled: int, token_bytes: int) -> int:
        """Return after how many tokens what follows so many competes.

        Parameters
        ----------
        settled : int
            Tokens seen when it did last.
        token_bytes : int
            Of a token of each row, as the model makes it: they take at most a quarter of the
            memory.
        """
        every = self.every or due_after(settled)
        if self.memory is None:
            return every
        return max(min(every, self.memory // (4 * token_bytes)), 1)

    def due(self, settled: int, end: int, token_bytes: int) -> Iterator[int]:
        """Yield the columns before `end` at which what follows so many competes."""
        while self.reduces and (settled := settled + self.every_from(settled, token_bytes)) < end:
            yield settled

    def within_memory(
        self, profile: BudgetProfile, budgets: IntArray, tokens: IntArray, taken: int
    ) -> IntArray:
        """Return budgets that the memory holds, of which so many bytes are taken.

        Where the memory is all that is asked, they take as much of it as rows of so many tokens
        can, in the proportions that were decided.

        Parameters
        ----------
        profile : BudgetProfile
            Whose budgets hold.
        budgets : ndarray of int64, (batch, n_layers, n_kv_heads)
        tokens : ndarray of int64, (batch,)
        taken : int
        """
        assert self.memory is not None
        result, full = budgets.copy(), list(profile.shape.full_layers)
        for row, own in enumerate(budgets[:, full]):
            if profile.fits_a_peak:
                own = np.minimum(own * tokens[row] // max(own.min(), 1), tokens[row])
            result[row, full] = within_bytes(
                own,
                (self.memory - taken) // len(budgets),
                16 if profile.bits is None else profile.bits[full],
                profile.shape,
                least=profile.policy.protected_tokens,
                biased=profile.policy.biased,
            )
        return result
