"""Caches whose KV heads have policies of their own, however the tokens arrive."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from prompt_runs import run

import kvalloc
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime import make_cache
from kvalloc.runtime.policies import changed_policy, policies_of, policy_of

CONTEXT = 150
NAMES = ("tova", "critical", "keydiff", "nacl")


def mixed(tiny: ModuleType, model: Any, level: str, names: tuple[str, ...] = NAMES) -> Any:
    """Every head another policy: 0, 1, 2, ... and over again."""
    profile: BudgetProfile = tiny.make_profile(model, CONTEXT, 0.5)
    if level == "head":
        profile = tiny.by_head(profile, spread=40)
    others = tuple(changed_policy(profile.policy, name).replace(label=name) for name in names)
    shape = profile.shape
    table = np.zeros_like(profile.budgets)
    for place, layer in enumerate(shape.full_layers):
        heads = 2 * place + np.arange(shape.n_kv_heads)
        table[layer] = (heads if level == "head" else heads[:1]) % (1 + len(names))
    return profile.replace(other_policies=others, unit_policies=table)


def heads_kept(cache: Any, layer: int, head: int, row: int = 0) -> list[int]:
    kept = cache.kept_indices(layer)[row, head]
    return [int(place) for place in kept if place >= 0]


@pytest.mark.parametrize("chunk", [CONTEXT, 50])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_each_head_keeps_what_its_policy_alone_would(
    tiny: ModuleType, level: str, chunk: int
) -> None:
    """In chunks in the first layer, which sees the same whatever was evicted before."""
    model = tiny.tiny_model()
    profile = mixed(tiny, model, level)
    alone = [profile.with_policy(policy) for policy in profile.policies]
    cache, *caches = (make_cache(model, each, prompt_tokens=CONTEXT) for each in (profile, *alone))
    for each in (cache, *caches):
        for part in tiny.prompt(CONTEXT).split(chunk, dim=1):
            run(model, part, each)
    differ, budgets = 0, profile.budgets if chunk == CONTEXT else profile.budgets[:1]
    for layer, head in np.ndindex(budgets.shape):
        place = int(profile.unit_policies[layer, head])
        kept = heads_kept(cache, layer, head)
        assert kept == heads_kept(caches[place], layer, head)
        differ += kept != heads_kept(caches[(place + 1) % len(caches)], layer, head)
    assert differ >= budgets.size // 2


def test_a_saved_cache_goes_on_with_its_policies(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.tiny_model()
    profile = mixed(tiny, model, "head")
    cache = make_cache(model, profile)
    run(model, tiny.prompt(CONTEXT), cache)
    cache.save(tmp_path / "c.safetensors")
    loaded = kvalloc.load_cache(tmp_path / "c.safetensors", model)
    question = tiny.prompt(5, seed=5)
    assert torch.equal(run(model, question, loaded), run(model, question, cache))
    assert loaded.profile.other_policies == profile.other_policies
    loaded.reset()
    other = tiny.prompt(CONTEXT, seed=8)
    fresh = make_cache(model, profile)
    assert torch.equal(run(model, other, loaded), run(model, other, fresh))
    assert (loaded.kept_tokens == fresh.kept_tokens).all()


def test_a_policy_that_is_named_counts_for_all_heads(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    profile = mixed(tiny, model, "head")
    cache = make_cache(model, profile, policy="streaming")
    assert cache.profile.unit_policies is None
    run(model, tiny.prompt(CONTEXT), cache)
    budget = int(profile.budgets[0, 0])
    kept = heads_kept(cache, 0, 0)
    assert kept == [0, 1, *range(CONTEXT - budget + 2, CONTEXT)]


def test_layers_with_one_policy_ask_only_that_one(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    profile = mixed(tiny, model, "layer", ("tova", "keydiff"))
    policy = policies_of(profile)
    looked: list[tuple[str, int]] = []
    for each in policy.policies:  # type: ignore[attr-defined]
        keep = each.keep

        def watched(states: Any, *args: Any, own: Any = (each, keep), **kwargs: Any) -> Any:
            looked.append((own[0].scorer.name, states.layer))
            return own[1](states, *args, **kwargs)

        object.__setattr__(each, "keep", watched)  # the dataclass is frozen
    cache = make_cache(model, profile)
    object.__setattr__(cache._prompt.plan, "policy", policy)
    run(model, tiny.prompt(CONTEXT), cache)
    wanted = [
        (profile.policies[int(profile.unit_policies[layer, 0])].scorer, layer)
        for layer in profile.shape.full_layers
    ]
    assert looked == wanted


def test_one_policy_is_itself(tiny: ModuleType) -> None:
    profile = tiny.make_profile(tiny.tiny_model(), CONTEXT)
    assert type(policies_of(profile)) is type(policy_of(profile.policy))
