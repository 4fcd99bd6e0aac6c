"""A reduced cache for a model, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from kvalloc.errors import InputError, UnsupportedModelError
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.models.loading import shape_of
from kvalloc.models.structure import text_config
from kvalloc.runtime import refusals
from kvalloc.runtime.arrival import Arrival
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.deciding import Decide
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.policies import changed_policy, policy_of
from kvalloc.runtime.prompt import Plan
from kvalloc.shape import ModelShape

__all__ = ["make_cache", "make_layers", "with_policy"]


def make_layers(model: nn.Module, shape: ModelShape) -> list[CacheLayerMixin]:
    """Cache layers for the model, its full-attention ones replaced by `BudgetLayer`.

    Sliding layers are transformers' own: they hold a constant number of entries anyway.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder-only model.
    shape : ModelShape
        Its sizes, which say which layers get budgets.

    Returns
    -------
    list of CacheLayerMixin, one a model layer

    Raises
    ------
    UnsupportedModelError
        If a layer caches anything but keys and values of full or sliding attention.
    """
    layers: list[Any] = DynamicCache(config=text_config(model)).layers
    expected = [
        DynamicLayer if t == "full" else DynamicSlidingWindowLayer for t in shape.layer_types
    ]
    found = [type(layer) for layer in layers]
    if found != expected:
        kinds = ", ".join(sorted({kind.__name__ for kind in found}))
        raise UnsupportedModelError(
            f"transformers caches {type(model).__name__} in {len(found)} layers of {kinds}; "
            "kvalloc reduces full attention next to sliding-window attention only"
        )
    return [BudgetLayer() if type(layer) is DynamicLayer else layer for layer in layers]


def make_cache(
    model: nn.Module,
    profile: BudgetProfile,
    *,
    allow_other_model: bool = False,
    prompt_tokens: int | None = None,
    policy: str | Policy | None = None,
    policy_options: Mapping[str, Any] | None = None,
    decode_every: int | None = None,
    decide: Decide | None = None,
    bounded: bool = False,
) -> BudgetCache:
    """A cache for one conversation that keeps the profile's budgets of its prompt.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model that will use the cache, on sdpa, eager, flash or flex attention.
    profile : BudgetProfile
        Budgets at layer or head level. They are scaled to the length of each row of the prompt.
    allow_other_model : bool
        Accept a model of another name with the same sizes, e.g. a fine-tune.
    prompt_tokens : int, optional
        Length, padding included, of a prompt that arrives in several forwards: its budgets hold
        from the first one on. By default the first forward is the whole prompt, since a second
        chunk could not be told from a follow-up question; see also `BudgetCache.prefill`.
    policy : str or Policy, optional
        How the entries are picked, instead of the profile's own policy; a name stands for a
        policy or a scorer, see `kvalloc.runtime.policies.changed_policy`.
    policy_options : mapping, optional
        Parameters of the policy or scorer that is named.
    decode_every : int, optional
        Keep the budget while decoding: whenever so many tokens have followed, the policy goes
        back to the budgets of the prompt, decoded tokens among the candidates, the latest of them
        in the window. 1 is a hard cap. By default what follows the prompt is never evicted.
    decide : callable, optional
        Decides the budgets of each row when the prompt has come, see `Decide`; the profile then
        says which entries are kept, and holds for later prompts no more than for this one.
        `kvalloc.online.per_prompt` makes such callables.
    bounded : bool
        For policies that look at what follows the prompt: hold no full cache until then, but keep
        twice the budgets while the prompt is read. By default they hold the whole prompt. Where
        each prompt hands the budgets out and nothing is waited for: the heads of each layer compete
        as it is read, not those of all layers.

    Returns
    -------
    BudgetCache
        Pass it as ``past_key_values``; the budgets belong to it, not to the model.

    Raises
    ------
    ModelMismatchError
        If the profile was made for another model.
    UnsupportedModelError
        If the model's attention or cache is of a kind that cannot be reduced.
    UnsupportedRequestError
        If the model is compiled, or prefills in chunks of unannounced length, or the policy
        cannot keep the budget while decoding.
    InputError
        If the budgets or the scorer do not fit sinks and window, or there is no such policy.
    """
    if not isinstance(profile, BudgetProfile):
        raise InputError(
            f"the profile is a {type(profile).__name__}, expected a BudgetProfile, such as "
            "kvalloc.load_profile gives, after the model"
        )
    profile = with_policy(profile, policy, policy_options)
    refusals.check_profile(profile)
    refusals.check_model(model, prompt_tokens)
    shape = shape_of(model)
    profile.shape.require_same_model(shape, allow_other_model=allow_other_model)
    for each in profile.policies:
        policy_of(each).scorer.check_model(shape, allow_other_model=allow_other_model)
    layers = make_layers(model, shape)
    plan = Plan.of(profile, model, decide=decide, decode_every=decode_every, bounded=bounded)
    return BudgetCache(plan, layers, Arrival(profile, prompt_tokens, decode_every))


def with_policy(
    profile: BudgetProfile, policy: str | Policy | None, options: Mapping[str, Any] | None
) -> BudgetProfile:
    """The profile with another way to pick the entries, where one is named."""
    if isinstance(policy, str):
        return profile.with_policy(changed_policy(profile.policy, policy, options))
    other = policy is not None and not isinstance(policy, Policy)
    refusals.refuse(options_alone=options, no_policy=other and (policy,))
    return profile if policy is None else profile.with_policy(policy)
