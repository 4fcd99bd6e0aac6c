"""What holds for all prompts of a cache: whose budgets, and who chooses."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
from torch import nn

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import rotates_halves
from kvalloc.models.structure import context_limit, decoder_of
from kvalloc.runtime import refusals
from kvalloc.runtime.deciding import Decide
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.policies import policy_of
from kvalloc.runtime.schedule import Schedule, schedule_of
from kvalloc.shape import HALF_BYTES

Within = Callable[[float, int], BudgetProfile]


class Plan:
    """What holds for all prompts of a cache, and is shared by its copies.

    Attributes
    ----------
    profile : BudgetProfile
        Budgets and policy; decided ones may take their place, prompt by prompt.
    policy : EvictionPolicy
        Who chooses.
    options : CacheOptions
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
    longer : BudgetProfile or None
        Budgets of a longer text, by which a conversation goes once their share holds.
    within : callable or None
        Gives the profile of a share and a length, for a conversation that outgrows the memory.
    limit : int or None
        Tokens that the model was made for.
    after : EvictionPolicy
        Who chooses among what is kept and what has followed the prompt.

    Raises
    ------
    UnsupportedRequestError
        If the policy cannot bound the memory.
    """

    def __init__(
        self,
        profile: BudgetProfile,
        model: nn.Module,
        options: CacheOptions,
        *,
        decide: Decide | None,
        longer: BudgetProfile | None = None,
        within: Within | None = None,
    ) -> None:
        self.policy, tokens = policy_of(profile.policy), options.decode_every
        counts = tokens is None or (type(tokens) is int and tokens >= 1)
        refusals.refuse(no_decode_every=not counts and (tokens,))
        self.profile, self.options, self.decide = profile, options, decide
        self.decoder, self.name = weakref.ref(decoder_of(model)), type(model).__name__
        beyond = self.schedule(in_chunks=False).holds or self.policy.combines
        refusals.refuse(beyond_memory=profile.fits_a_peak and beyond and self.policy.name)
        wide = next(model.parameters()).itemsize > HALF_BYTES
        every, widths = wide and profile.reduces, profile.widths
        full = profile.shape.full_layers
        self.bits = {own: widths[own] for own in full if every or (widths[own] != 16).any()}
        halves = {layer: np.full_like(own, 16) for layer, own in self.bits.items()}
        self.halves = halves if wide else {}
        self.longer, self.within = longer, within
        self.limit = context_limit(model)
        self.after = self.policy.again(rotates=rotates_halves(model))

    def __deepcopy__(self, memo: object) -> Plan:
        return self

    def schedule(self, *, in_chunks: bool) -> Schedule:
        """Return when entries go of a prompt that comes in one forward, or in chunks."""
        return schedule_of(self.profile, self.policy, self.options, in_chunks=in_chunks)
