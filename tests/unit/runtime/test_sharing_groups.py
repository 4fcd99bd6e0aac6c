"""Layers of a sharing group keep the same entries, chosen once by their joint scores."""

import numpy as np
import pytest
import runtime_oracle as tiny
import tiny_models
import torch
from prompt_runs import run, states_seen

import kvalloc
from kvalloc.accounting.costs import POSITION_BYTES
from kvalloc.runtime import make_cache
from kvalloc.scorers import get_scorer

CONTEXT, LAYERS = 120, 7
GROUPS = ((2, 3), (4, 5, 6))


def shared_model(family="llama", **changes):
    return tiny.tiny_model(family, num_hidden_layers=LAYERS, **changes)


def shared_profile(model, level="head", share=0.4):
    profile = tiny.make_profile(model, CONTEXT, share)
    profile = tiny.by_head(profile, spread=20) if level == "head" else profile
    budgets = profile.budgets.copy()
    for group in GROUPS:
        budgets[list(group)] = budgets[group[0]]
    return profile.replace(budgets=budgets, share_groups=GROUPS)


def agree(cache):
    """All layers of a group keep the same entries, and the groups differ."""
    for group in GROUPS:
        for layer in group[1:]:
            assert torch.equal(cache.kept_indices(layer), cache.kept_indices(group[0]))
    first, second = (cache.kept_indices(group[0]) for group in GROUPS)
    assert first.shape != second.shape or not torch.equal(first, second)


def layer_scores(model, ids, scorer, sinks):
    """Scores of every layer for a whole prompt, float64 (batch, n_kv_heads, n_tokens)."""
    seen = states_seen(model, ids).values()
    return [scorer.score(states, sinks=sinks).double().numpy() for states in seen]


@pytest.mark.parametrize("level", ["layer", "head"])
def test_a_group_keeps_the_best_by_its_joint_scores(level):
    """Each layer's scores over their sum over all heads, added up; written down once more."""
    model = shared_model()
    profile = shared_profile(model, level)
    ids, cache = tiny.prompt(CONTEXT, 2), make_cache(model, profile)
    run(model, ids, cache)
    agree(cache)
    policy = profile.policy
    scorer = get_scorer(policy.scorer, **policy.scorer_parameters)
    scores = layer_scores(model, ids, scorer, policy.sinks)
    first, end = policy.sinks, CONTEXT - policy.window
    moved = 0
    for group in [(0,), (1,), *GROUPS]:
        own = [scores[layer][..., first:end] for layer in group]
        joint = sum(rows / rows.sum(axis=(1, 2), keepdims=True) for rows in own)
        for row, head in np.ndindex(2, tiny.N_KV_HEADS):
            count = int(profile.budgets[group[0], head]) - policy.protected_tokens
            best = np.argsort(-joint[row, head], kind="stable")[:count] + first
            always = [*range(first), *range(end, CONTEXT)]
            expected = sorted([*best.tolist(), *always])
            for layer in group:
                kept = cache.kept_indices(layer)[row, head]
                assert kept[kept >= 0].tolist() == expected
            alone = np.argsort(-own[0][row, head], kind="stable")[:count] + first
            moved += len(group) > 1 and set(alone.tolist()) != set(best.tolist())
    assert moved  # the first layer of a group would have chosen others
    assert (cache.kept_tokens == profile.budgets).all()
    assert cache.retained_bytes == profile.retained_bytes_at(CONTEXT, 2)


@pytest.mark.parametrize("level", ["layer", "head"])
def test_the_cache_keeps_what_the_solver_predicts(level):
    """Score mass kept on the measured text itself, summed from the cache's own indices."""
    model = tiny_models.tiny_model(num_hidden_layers=LAYERS)
    tokenizer, text = tiny_models.WordTokenizer(), tiny_models.words(CONTEXT)
    scores = kvalloc.profile(model, tokenizer, [text], samples=1, context=CONTEXT, share_length=3)
    asked = {"budget": "35%", "share_groups": "2-3,4-6", "level": level}
    profile = kvalloc.solve(scores, **asked)
    assert profile.share_groups == GROUPS
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    cache = make_cache(model, profile)
    run(model, ids, cache)
    agree(cache)
    assert cache.retained_bytes == profile.retained_bytes
    policy = profile.policy
    scorer = get_scorer(policy.scorer, **policy.scorer_parameters)
    measured = layer_scores(model, ids, scorer, policy.sinks)
    kept_share = []
    for layer in range(LAYERS):
        own, kept = measured[layer][0], cache.kept_indices(layer)[0]
        own = own[:, policy.sinks : CONTEXT - policy.window]
        mass = 0.0
        for head in range(own.shape[0]):
            here = kept[head][kept[head] >= 0].numpy() - policy.sinks
            mass += own[head, here[(here >= 0) & (here < own.shape[1])]].sum()
        kept_share.append(mass / own.sum())
    assert np.mean(kept_share) == pytest.approx(profile.retention, abs=1e-9)


@pytest.mark.parametrize("policy", ["score", "attention_matching"])
def test_a_group_keeps_a_whole_prompt_of_which_some_layers_have_fewer_bits(policy):
    """Nothing is evicted, and still a layer waits for the last one of its group."""
    model = shared_model()
    profile = shared_profile(model, "layer", share=1.0)
    bits = np.full_like(profile.budgets, 16)
    bits[[GROUPS[0][0], GROUPS[1][1]]] = 8
    cache = make_cache(model, profile.replace(bits=bits), policy=policy)
    run(model, tiny.prompt(CONTEXT), cache)
    assert (cache.kept_tokens == CONTEXT).all()
    for index, layer in enumerate(cache.layers):
        assert (layer.entries is not None and layer.entries.is_packed) == bool(
            (bits[index] == 8).any()
        )
    plain = model.config.num_hidden_layers - 2
    entry = profile.shape.bytes_per_entry + POSITION_BYTES
    one = CONTEXT * profile.shape.n_kv_heads * entry
    assert one * plain < cache.retained_bytes < one * (plain + 1.5)
    run(model, tiny.prompt(3, seed=1), cache)
    assert (cache.kept_tokens == CONTEXT + 3).all()
