"""Caches whose KV heads have policies of their own, however the tokens arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import head_entries, run

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime import make_cache
from kvalloc.runtime.policies import changed_policy
from kvalloc.runtime.policies.score import Score

CONTEXT = 150
NAMES = ("tova", "critical", "keydiff", "nacl")


def mixed(model: Any, level: str, names: tuple[str, ...] = NAMES) -> Any:
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


@pytest.mark.parametrize("chunk", [CONTEXT, 50])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_each_head_keeps_what_its_policy_alone_would(model: Any, level: str, chunk: int) -> None:
    """In chunks in the first layer, which sees the same whatever was evicted before."""
    profile = mixed(model, level)
    alone = [profile.with_policy(policy) for policy in profile.policies]
    cache, *caches = (make_cache(model, each, prompt_tokens=CONTEXT) for each in (profile, *alone))
    for each in (cache, *caches):
        for part in tiny.prompt(CONTEXT).split(chunk, dim=1):
            run(model, part, each)
    differ, budgets = 0, profile.budgets if chunk == CONTEXT else profile.budgets[:1]
    for layer, head in np.ndindex(budgets.shape):
        place = int(profile.unit_policies[layer, head])
        kept = head_entries(cache, layer, head)
        assert kept == head_entries(caches[place], layer, head)
        differ += kept != head_entries(caches[(place + 1) % len(caches)], layer, head)
    assert differ >= budgets.size // 2


def test_a_policy_that_is_named_counts_for_all_heads(model: Any) -> None:
    profile = mixed(model, "head")
    cache = make_cache(model, profile, policy="streaming")
    assert cache.profile.unit_policies is None
    run(model, tiny.prompt(CONTEXT), cache)
    budget = int(profile.budgets[0, 0])
    kept = head_entries(cache, 0, 0)
    assert kept == [0, 1, *range(CONTEXT - budget + 2, CONTEXT)]


def test_layers_with_one_policy_ask_only_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looked = tiny.tiny_model(), list[tuple[str, int]]()
    profile, scores = mixed(model, "layer", ("tova", "keydiff")), Score.scores

    def watched(self: Score, states: Any, *, sinks: int) -> torch.Tensor:
        looked.append((self.scorer.name, states.layer))
        return scores(self, states, sinks=sinks)

    monkeypatch.setattr(Score, "scores", watched)
    run(model, tiny.prompt(CONTEXT), make_cache(model, profile))
    places = profile.unit_policies[:, 0]
    wanted = [(profile.policies[place].scorer, layer) for layer, place in enumerate(places)]
    assert looked == wanted
