"""Late eviction in bounded memory: twice the budgets first, the budgets afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run

from kvalloc.runtime import make_cache

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
