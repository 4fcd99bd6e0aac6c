"""The caches that ``kvalloc eval`` compares: of stored budgets, and of budgets for each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvalloc.evaluate.caches import MakeCache
    from kvalloc.evaluate.methods import Method
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel
    from kvalloc.online.per_prompt import PromptTarget


def read_target(target_retention: float | None) -> PromptTarget | None:
    """What each prompt is to reach; None where nothing is asked.

    Raises
    ------
    InputError
        If no prompt can reach it.
    """
    if target_retention is None:
        return None
    from kvalloc.allocation.request import Request
    from kvalloc.online.per_prompt import PromptTarget

    Request.parse(target_retention=target_retention)
    return PromptTarget.parse(target_retention=target_retention)


def check_adapts(profiles: Mapping[str, BudgetProfile], adapt: float | None) -> None:
    """Refuse profiles that prompts cannot move so, before a model is loaded.

    Raises
    ------
    InputError
        If there is no profile, or one that cannot be moved.
    """
    if adapt is None:
        return
    from kvalloc.errors import InputError
    from kvalloc.online.adaptation import check_adapt

    if not profiles:
        raise InputError("--adapt moves the budgets of a --profile; give one")
    for profile in profiles.values():
        check_adapt(profile, adapt)


def cache_methods(
    loaded: LoadedModel,
    profiles: Mapping[str, BudgetProfile],
    *,
    adapt: float | None,
    target: PromptTarget | None,
    allow_other_model: bool,
) -> dict[str, Method]:
    """Ways to make a cache, by the names of their rows.

    Parameters
    ----------
    loaded : LoadedModel
    profiles : mapping of str to BudgetProfile
    adapt : float or None
        Share by which each prompt moves every profile's budgets, beside the profile itself.
    target : PromptTarget or None
        Decided for each prompt.
    allow_other_model : bool

    Raises
    ------
    KVAllocError
        If a profile is of another model, before anything runs.
    """
    from kvalloc.evaluate.methods import CacheMethod
    from kvalloc.online.per_prompt import make_prompt_cache

    makers: dict[str, MakeCache] = {}
    for name, budgets in profiles.items():
        own = partial(budgets.cache, loaded.model, allow_other_model=allow_other_model)
        makers[name] = own
        if adapt is not None:
            makers[f"{name} --adapt {adapt:g}"] = partial(own, adapt=adapt)
    if target is not None:
        makers[f"--target-retention {target.request.target.value:g}"] = partial(
            make_prompt_cache, loaded.model, target
        )
    for make in makers.values():
        make()
    return {name: CacheMethod(make_cache=make) for name, make in makers.items()}
