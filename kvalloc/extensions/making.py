"""Construction of a reduced cache with its extensions."""

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
        The model that will use the cache, on sdpa, eager, flash or flex attention.
    profile : BudgetProfile
        Budgets at layer or head level. They are scaled to the length of each row of the prompt.
    allow_other_model : bool
        Accept a model of another name with the same sizes, such as a fine-tune.
    prompt_tokens : int, optional
        Length, padding included, of a prompt that arrives in several forwards: its budgets hold
        from the first one on. By default the first forward is the whole prompt, since a second
        chunk looks like a follow-up question.
    policy, decode_every : optional
        Options of the cache, see `kvalloc.runtime.options.CacheOptions`.

    Returns
    -------
    BudgetCache
        Pass it to ``generate()`` as ``cache``, before transformers 5.24 as ``past_key_values``.

    Raises
    ------
    ModelMismatchError
        If the profile was made for another model.
    UnsupportedModelError
        If the model's attention or cache is of a kind that cannot be reduced.
    UnsupportedRequestError
        If a single layer of the model is compiled, it prefills in chunks of unannounced length, or
        the policy cannot keep the budget while decoding.
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
    way = Way(profile=profile, options=options)
    return extended(build_rows(model, [way], prompt_tokens=prompt_tokens))
