"""What every policy must do, what each one does, and that all go through the cache right."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import runtime_oracle as tiny
import scorer_oracle
import torch
from prompt_runs import AT_ONCE, policy, run
from runtime_cells import COMBINING
from scorer_oracle import SCORERS, make_states

from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.runtime import make_cache
from kvalloc.runtime.policies import (
    get_policy,
    policy_names,
)
from kvalloc.scorers.projected_values import projected_value_norms

N_TOKENS = 40
LIMITS = {"sinks": 2, "window": 4}


def states_of(**changes: Any) -> Any:
    values = {"batch": 2, "n_tokens": N_TOKENS, "hidden_size": 9}
    return make_states(**{**values, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", policy_names())
def test_budgets_are_met_exactly_for_each_row_and_head(name: str, dtype: torch.dtype) -> None:
    budgets = torch.tensor([[6, 13], [40, 7]])
    states = states_of(dtype=dtype)
    kept = policy(name).keep(states, budgets, **LIMITS)
    assert kept.dtype == torch.bool
    assert torch.equal(kept.sum(dim=-1), budgets)
    assert kept[..., :2].all()
    assert kept[..., -4:].all()
    assert torch.equal(kept, policy(name).keep(states, budgets, **LIMITS))


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("budget", [5, 41])
def test_budgets_that_cannot_be_are_refused(name: str, budget: int) -> None:
    budgets = torch.full((2, 2), 20)
    budgets[1, 0] = budget
    with pytest.raises(InputError, match=f"budget of {budget} entries"):
        policy(name).keep(states_of(), budgets, **LIMITS)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_critical_takes_its_two_stages(alpha: float) -> None:
    states = states_of(batch=1)
    made = policy("critical", alpha=alpha)
    budget, sinks, window = 16, 2, 4
    kept = made.keep(states, torch.full((1, 2), budget), sinks=sinks, window=window)
    scores = made.scorer.score(states, sinks=sinks)
    norms = projected_value_norms(states)
    for head in range(2):
        free = set(range(sinks, N_TOKENS - window))
        room = budget - sinks - window
        first = sorted(free, key=lambda t: (-scores[0, head, t].item(), t))[: int(alpha * room)]
        weighted = (scores[0, head] + 1e-4) * norms[0, head]
        rest = sorted(free - set(first), key=lambda t: (-weighted[t].item(), t))
        expected = {0, 1, *range(36, 40), *first, *rest[: room - len(first)]}
        assert set(kept[0, head].nonzero()[:, 0].tolist()) == expected
    by_score = policy("score").keep(states, torch.full((1, 2), budget), **LIMITS)
    assert torch.equal(kept, by_score) == (alpha == 1)


def naive_proxy_scores(states: Any, proxies: list[int]) -> np.ndarray:
    attention = scorer_oracle.full_attention(states)[:, :, proxies].sum(axis=2)
    batch, heads, tokens = attention.shape
    found: np.ndarray = attention.reshape(batch, 2, heads // 2, tokens).mean(axis=2)
    return found


@pytest.mark.parametrize(
    ("named", "proxies"),
    [({}, [36, 37, 38, 39]), ({"proxy_start": 20, "proxy_stop": 25}, list(range(20, 25)))],
)
def test_nacl_without_chance_keeps_proxies_and_their_best(
    named: dict[str, int], proxies: list[int]
) -> None:
    states = states_of()
    made = policy("nacl", random_share=0.0, **named)
    kept = made.keep(states, torch.full((2, 2), 17), sinks=2, window=1)
    scores = naive_proxy_scores(states, proxies)
    must = {0, 1, 39, *proxies}
    for place in np.ndindex(2, 2):
        free = sorted(set(range(40)) - must, key=lambda t: -scores[*place, t])
        expected = must | set(free[: 17 - len(must)])
        assert set(kept[place].nonzero()[:, 0].tolist()) == expected


def test_nacl_draws_by_seed_layer_and_head() -> None:
    # All scores are equal, so only chance can tell heads, layers and seeds apart.
    states = states_of(batch=1)
    states = replace(states, keys=torch.zeros_like(states.keys))
    budgets = torch.full((1, 2), 20)

    def drawn(seed: int, layer: int) -> torch.Tensor:
        made = policy("nacl", seed=seed, random_share=1.0)
        return made.keep(replace(states, layer=layer), budgets, **LIMITS)

    first = drawn(0, 0)
    assert torch.equal(first, drawn(0, 0))
    assert not torch.equal(first, drawn(1, 0))
    assert not torch.equal(first, drawn(0, 1))
    assert not torch.equal(first[0, 0], first[0, 1])
    # a head that is shown alone draws what it draws next to the others
    alone = replace(
        states,
        queries=states.queries[:, 3:],
        keys=states.keys[:, 1:],
        values=states.values[:, 1:],
        first_head=1,
    )
    made = policy("nacl", seed=0, random_share=1.0)
    second = made.keep(alone, budgets[:, 1:], **LIMITS)
    assert torch.equal(second[0, 0], first[0, 1])


def test_nacl_draws_from_the_softmax_of_its_scores() -> None:
    # One entry is drawn of two; its frequency over many seeds is its share of the softmax.
    states = states_of(batch=1, n_kv_heads=1, group=1, n_tokens=4)
    scores = scorer_oracle.full_attention(states)[0, 0, -1]
    counts = np.zeros(4)
    n_seeds = 600
    for seed in range(n_seeds):
        made = policy("nacl", seed=seed, random_share=1.0, proxy_share=0.25)
        kept = made.keep(states, torch.tensor([[3]]), sinks=1, window=1)
        counts += kept[0, 0].numpy()
    expected = np.exp(scores[1]) / (np.exp(scores[1]) + np.exp(scores[2]))
    # five standard deviations
    assert abs(counts[1] / n_seeds - expected) < 5 * np.sqrt(0.25 / n_seeds)


def test_nacl_with_more_proxies_than_budget_keeps_the_last_ones() -> None:
    kept = policy("nacl", proxy_share=0.5).keep(states_of(), torch.full((2, 2), 10), **LIMITS)
    assert kept[1, 1].nonzero()[:, 0].tolist() == [0, 1, *range(32, 40)]


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("nacl", {"proxy_start": 3}, "nacl: proxy_start 3 and proxy_stop None name no range"),
        ("nacl", {"proxy_stop": 3}, "proxy_stop 3 name no range"),
        ("nacl", {"proxy_start": 4, "proxy_stop": 4}, "give both, with 0 <= start < stop"),
        ("nacl", {"random_share": 1.2}, "random_share is 1.2, expected less than or equal to 1"),
        ("nacl", {"proxy_share": -0.1}, "proxy_share is -0.1"),
        ("nacl", {"seed": -1}, "policy nacl: seed is -1, expected greater than or equal to 0"),
        ("merge", {"threshold": 1.5}, "threshold is 1.5"),
        ("merge", {"weights": "mean"}, "expected 'exponential' or 'gaussian'"),
        ("mpcache", {"coarse_tokens": 24}, "coarse_tokens 24 is no multiple of fine_tokens 16"),
        ("mpcache", {"coarse_tokens": 8}, "no multiple"),
        ("mpcache", {"alpha": 2.0}, "alpha is 2.0"),
        ("mpcache", {"fine_share": 0.0}, "fine_share is 0.0"),
        ("attention_matching", {"rows": 0, "following": 0}, "nothing to match"),
        ("attention_matching", {"rows": -1}, "policy attention_matching: rows is -1"),
        ("attention_matching", {"following": 1.5}, "policy attention_matching: following is 1.5"),
    ],
)
def test_parameters_out_of_range(name: str, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        policy(name, **parameters)


def test_nacl_proxies_beyond_the_prompt_are_refused() -> None:
    made = policy("nacl", proxy_start=2, proxy_stop=50)
    with pytest.raises(InputError, match="proxy_stop is 50"):
        made.keep(states_of(), torch.full((2, 2), 20), **LIMITS)


# through the cache

CONTEXT = 120


@pytest.mark.parametrize("name", [*policy_names(), *SCORERS])
def test_chunks_keep_the_same_entries(model: Any, name: str) -> None:
    """As long as nothing has to go before the last chunk."""
    ids = tiny.prompt(CONTEXT, 2)
    for budget, sizes in ((60, [20, 3, 37, CONTEXT - 60]), (CONTEXT - 6, [50, 3, CONTEXT - 60, 7])):
        profile = tiny.make_profile(model, CONTEXT, [budget] * tiny.N_LAYERS)
        whole = make_cache(model, profile, policy=name)
        in_chunks = make_cache(model, profile, policy=name, prompt_tokens=CONTEXT)
        run(model, ids, whole)
        if name in COMBINING and not in_chunks._prompt.plan.policy.holds:
            with pytest.raises(UnsupportedRequestError, match="in one piece"):
                run(model, ids[:, :50], in_chunks)
            continue
        for chunk in ids.split(sizes, dim=1):
            run(model, chunk, in_chunks)
        for cache in (whole, in_chunks):  # some wait for what follows
            run(model, tiny.prompt(16, 2, seed=3), cache)
            assert cache.reduced
        assert tiny.same_kept(whole, in_chunks)


SPECIAL = {
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gpt-oss": ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}),
}


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *itertools.product(SPECIAL, [{}, {"policy": "h2o"}, {"policy": "cake"}]),
        ("gemma2", AT_ONCE),  # the other rotates its queries otherwise
    ],
)
def test_soft_caps_and_sink_logits_are_carried(
    monkeypatch: Any, family: str, options: dict[str, Any], level: str
) -> None:
    """Entries are ranked and attended to with the logits that these models have."""
    prefix, more = SPECIAL[family]
    classes = (f"{prefix}Config", f"{prefix}ForCausalLM")
    layer_types = ["sliding_attention", "full_attention"] * 2
    more = {**more, "sliding_window": 16, "layer_types": layer_types}
    monkeypatch.setitem(tiny.FAMILIES, family, (*classes, more))
    model = tiny.tiny_model(family, "eager")
    for key, weight in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(weight, std=2.0)
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    profile = tiny.by_head(profile) if level == "head" else profile
    cache, shadow = make_cache(model, profile, **options), tiny.Shadow(model)
    for tokens in (CONTEXT, 7, 1):
        ids = tiny.prompt(tokens, 2, seed=tokens)
        assert tiny.worst(run(model, ids, cache), shadow.logits(ids)) < 1e-4
        if tokens == CONTEXT:
            shadow.follow(cache, combined=options is AT_ONCE)


def test_parameters_build_the_policy_again() -> None:
    own = {"attention_matching": {"rows": 5, "following": 0, "biases": False}}
    for name in policy_names():
        made = policy(name, **own.get(name, {}))
        assert get_policy(name, scorer=made.scorer, **made.parameters()) == made


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "no policy or scorer 'nothing'.*nacl.*tova"),
        ("score:alpha=1", "no option 'alpha'"),
        ("tova:pool=3", "no option 'pool'"),
        ("critical:alpha=2", "alpha is 2.0"),
        ("snapkv:window=60", "they must agree"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_the_choices(
    model: Any, name: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        make_cache(model, tiny.make_profile(model, CONTEXT, 0.3), policy=name)
