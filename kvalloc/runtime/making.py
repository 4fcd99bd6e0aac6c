"""A reduced cache for a model, checked before anything runs."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import DynamicCache

from kvalloc.errors import InputError, UnsupportedModelError
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.models.loading import shape_of, warn_if_untested
from kvalloc.models.names import layer_classes, uncompiled
from kvalloc.models.structure import text_config
from kvalloc.runtime import refusals
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.deciding import Decide
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.plan import Plan, Within
from kvalloc.runtime.policies import policy_of
from kvalloc.runtime.prompt import Prompt
from kvalloc.shape import ModelShape


def make_layers(model: nn.Module, shape: ModelShape) -> list[Any]:
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
    full, sliding = layer_classes()
    expected = [full if t == "full" else sliding for t in shape.layer_types]
    found = [type(layer) for layer in layers]
    if found != expected:
        kinds = ", ".join(sorted({kind.__name__ for kind in found})) or "any kind"
        raise UnsupportedModelError(
            f"transformers caches {type(model).__name__} in {len(found)} layers of {kinds}; "
            "kvalloc reduces full attention next to sliding-window attention only"
        )
    return [BudgetLayer() if type(layer) is full else layer for layer in layers]


def make_cache(
    model: nn.Module,
    profile: BudgetProfile,
    *,
    allow_other_model: bool = False,
    prompt_tokens: int | None = None,
    policy: str | Policy | None = None,
    decode_every: int | None = None,
) -> BudgetCache:
    """Make a cache for one conversation that keeps the profile's budgets of its prompt.

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
        chunk cannot be told from a follow-up question.
    policy, decode_every : optional
        How the cache keeps its budgets, see `kvalloc.runtime.CacheOptions`.

    Returns
    -------
    BudgetCache
        Pass it to ``generate()`` as ``cache``, before transformers 5.24 as ``past_key_values``;
        the budgets belong to it, not to the model.

    Raises
    ------
    ModelMismatchError
        If the profile was made for another model.
    UnsupportedModelError
        If the model's attention or cache is of a kind that cannot be reduced.
    UnsupportedRequestError
        If a layer of the model is compiled by itself, or it prefills in chunks of unannounced
        length, or the policy cannot keep the budget while decoding.
    InputError
        If the budgets or the scorer do not fit sinks and window, or there is no such policy.
    """
    if not isinstance(profile, BudgetProfile):
        raise InputError(
            f"the profile is a {type(profile).__name__}, expected a BudgetProfile, such as "
            "kvalloc.load_profile gives, after the model"
        )
    options = CacheOptions(
        policy=policy,
        decode_every=decode_every,
        allow_other_model=allow_other_model,
    )
    return build_cache(model, profile, options, prompt_tokens=prompt_tokens)


def build_cache(
    model: nn.Module,
    profile: BudgetProfile,
    options: CacheOptions,
    *,
    prompt_tokens: int | None = None,
    decide: Decide | None = None,
    longer: BudgetProfile | None = None,
    within: Within | None = None,
) -> BudgetCache:
    """Make a cache as `make_cache` does, from options as they travel inside kvalloc.

    Parameters
    ----------
    model, profile, prompt_tokens
        As for `make_cache`.
    options : CacheOptions
    decide : Decide, optional
        Decides the budgets of each row when the prompt has come; the profile then says which
        entries are kept, and holds for later prompts no more than for this one.
    longer : BudgetProfile, optional
        Budgets of a longer text, by which a conversation goes once it is long enough for their
        share to hold.
    within : callable, optional
        Given a share and a number of tokens, returns the budgets by which a conversation goes that
        outgrows the memory of the options; by those it has, made smaller, without it.
    """
    warn_if_untested()
    profile, model = options.with_policy(profile), uncompiled(model)
    refusals.check_profile(profile)
    refusals.check_model(model, prompt_tokens)
    shape, other = shape_of(model), options.allow_other_model
    profile.shape.require_same_model(shape, allow_other_model=other)
    policy_of(profile.policy).scorer.check_model(shape, allow_other_model=other)
    layers = make_layers(model, shape)
    plan = Plan(profile, model, options, decide=decide, longer=longer, within=within)
    return BudgetCache([Prompt(plan, layers, prompt_tokens)])
