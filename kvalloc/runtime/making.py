"""A reduced cache for a model, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.models.loading import shape_of
from kvalloc.runtime import refusals
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.deciding import Decide
from kvalloc.runtime.policies import changed_policy, policy_class
from kvalloc.runtime.sizes import make_layers

__all__ = ["make_cache", "with_policy"]


def make_cache(
    profile: BudgetProfile,
    model: nn.Module,
    *,
    allow_other_model: bool = False,
    prompt_tokens: int | None = None,
    policy: str | Policy | None = None,
    policy_options: Mapping[str, Any] | None = None,
    decode_every: int | None = None,
    decide: Decide | None = None,
) -> BudgetCache:
    """A cache for one conversation that keeps the profile's budgets of its prompt.

    Parameters
    ----------
    profile : BudgetProfile
        Budgets at layer or head level. They are scaled to the length of each row of the prompt.
    model : transformers.PreTrainedModel
        The model that will use the cache, on sdpa, eager, flash or flex attention.
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

    Returns
    -------
    BudgetCache

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
    profile = with_policy(profile, policy, policy_options)
    refusals.check_profile(profile)
    refusals.check_model(model, prompt_tokens)
    for each in profile.policies:
        refusals.check_decoding(policy_class(each.name), decode_every)
    shape = shape_of(model)
    profile.shape.require_same_model(shape, allow_other_model=allow_other_model)
    layers = make_layers(model, shape)
    return BudgetCache(
        profile,
        model,
        layers=layers,
        prompt_tokens=prompt_tokens,
        decode_every=decode_every,
        decide=decide,
    )


def with_policy(
    profile: BudgetProfile, policy: str | Policy | None, options: Mapping[str, Any] | None
) -> BudgetProfile:
    """The profile with another way to pick the entries, where one is named."""
    if isinstance(policy, str):
        return profile.with_policy(changed_policy(profile.policy, policy, options))
    if options:
        raise InputError("policy_options belong to a policy: name it with policy=")
    if policy is None:
        return profile
    if not isinstance(policy, Policy):
        raise InputError(
            f"policy is {policy!r}; name a policy or a scorer, or give a Policy, as of a profile"
        )
    return profile.with_policy(policy)
