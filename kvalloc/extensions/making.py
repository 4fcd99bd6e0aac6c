"""Construction of a reduced cache."""

from __future__ import annotations

from torch import nn

from kvalloc.errors import InputError
from kvalloc.extensions.assisted import Drafts
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions


def extended(cache: BudgetCache) -> BudgetCache:
    """Return a cache that assisted generation may use."""
    cache.extensions.append(Drafts())
    return cache


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
        On sdpa, eager, flash or flex attention.
    profile : BudgetProfile
        Of layer or head level; scaled to each row's length.
    prompt_tokens : int, optional
        Length, padding included, of a prompt in several forwards; by default the first is the whole
        prompt.
    allow_other_model, policy, decode_every : optional
        See `kvalloc.runtime.options.CacheOptions`.

    Returns
    -------
    BudgetCache
        For ``generate()``'s ``cache``, before transformers 5.24 ``past_key_values``.

    Raises
    ------
    ModelMismatchError
        If the profile is another model's.
    UnsupportedModelError
        If the model's attention or cache cannot be reduced.
    UnsupportedRequestError
        If a single layer is compiled, the model prefills in unannounced chunks, or the policy
        cannot keep the budget while decoding.
    InputError
        If budgets or scorer do not fit sinks and window, or the policy is unknown.
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
    way = Way(profile=profile, options=options)
    return extended(build_rows(model, [way], prompt_tokens=prompt_tokens))
