"""Late eviction in bounded memory: twice the budgets first, the budgets afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run

from kvalloc.runtime import make_cache
from kvalloc.runtime.prompt import State

CONTEXT, AWAITED = 90, 5


def late(model: Any, level: str = "head") -> Any:
    parameters = {"tokens": AWAITED, "pool": 3}
    profile = tiny.make_profile(model, CONTEXT, 0.3, scorer="lookahead", parameters=parameters)
    return tiny.by_head(profile, spread=9) if level == "head" else profile


def mixed(model: Any) -> Any:
    """Each prompt hands out the entries, and what is evicted goes into what stays."""
    profile = late(model)
    own = profile.policy.replace(
        name="attention_matching", parameters={"rows": 12, "following": AWAITED}
    )
    return profile.replace(policy=own, by_prompt=True)


def adding(scorer: str) -> Any:
    """A policy that matches the prompt's last queries, and whose scorer adds up those so far."""

    def kind(model: Any) -> Any:
        policy = late(model).policy.replace(
            name="attention_matching",
            parameters={"rows": 30, "following": AWAITED},
            scorer=scorer,
            scorer_parameters={"window": tiny.WINDOW},
        )
        return late(model).replace(policy=policy)

    return kind


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("chunk", [CONTEXT, 25])
def test_twice_the_budget_is_kept_until_enough_has_followed(
    family: str, level: str, chunk: int
) -> None:
    model = tiny.tiny_model(family)
    profile, ids = late(model, level), tiny.prompt(CONTEXT, 2)
    cache = make_cache(model, profile, bounded=True, prompt_tokens=CONTEXT)
    shadow, full = tiny.Shadow(model), list(profile.shape.full_layers)
    budgets = profile.budgets_for(CONTEXT)[full]
    for part in ids.split(chunk, dim=1):
        assert tiny.worst(run(model, part, cache), shadow.logits(part)) < 1e-4
        shadow.follow(cache)
    assert cache.state is State.HELD
    assert (cache.kept_tokens[full] == np.minimum(2 * budgets, CONTEXT)).all()
    early = tiny.kept_of(cache)
    for tokens in (3, 2, 1, 6):
        asked = tiny.prompt(tokens, 2, seed=tokens)
        assert tiny.worst(run(model, asked, cache), shadow.logits(asked)) < 1e-4
        shadow.follow(cache)
    followed = cache.get_seq_length() - CONTEXT
    assert (cache.kept_tokens[full] - followed == budgets).all()
    for layer, kept in tiny.kept_of(cache).items():
        for row, head in np.ndindex(2, 2):
            before = set(early[layer][row, head].tolist())
            assert set(kept[row, head].tolist()) <= before | {-1}


@pytest.mark.parametrize(
    "kind", [late, mixed, adding("h2o"), adding("a2sf"), adding("expected_attention")]
)
def test_a_bound_that_does_not_bind_keeps_what_late_eviction_keeps(model: Any, kind: Any) -> None:
    profile, ids = kind(model), tiny.prompt(CONTEXT, 2)
    profile = profile.replace(budgets=profile.budgets.clip(CONTEXT // 2))
    caches = [
        make_cache(model, profile, bounded=bound, prompt_tokens=CONTEXT) for bound in (False, True)
    ]
    for cache in caches:
        for chunk in ids.split(40, dim=1):
            run(model, chunk, cache)
        assert not cache.reduced
        run(model, tiny.prompt(AWAITED, 2, seed=3), cache)
        assert cache.reduced
    assert tiny.same_kept(*caches)
    question = tiny.prompt(4, 2, seed=7)
    one, other = (run(model, question, cache) for cache in caches)
    assert torch.allclose(one, other, atol=1e-4)
