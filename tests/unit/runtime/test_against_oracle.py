"""The reduced cache answers as a full cache does whose evicted entries are hidden."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from transformers import DynamicCache

CONTEXT, BATCH = 120, 2
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3"]
ATTENTIONS = ["sdpa", "eager"]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_tokens_can_follow(tiny: ModuleType, family: str, attention: str) -> None:
    model = tiny.tiny_model(family, attention)
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    cache, plain = profile.cache(model), DynamicCache(config=model.config)
    ids = tiny.prompt(CONTEXT, BATCH)
    with torch.no_grad():
        prompt_logits = model(ids, past_key_values=cache).logits
        # The prompt itself attends to everything.
        assert torch.equal(prompt_logits, model(ids, past_key_values=plain).logits)
        oracle = tiny.Oracle(model, ids, tiny.kept_of(cache))
        moved = 0.0
        for tokens in (1, 5, 100, 1):
            question = tiny.prompt(tokens, BATCH, seed=tokens)
            logits = model(question, past_key_values=cache).logits
            assert (logits - oracle.logits(question)).abs().max() < 1e-4
            moved = (logits - model(question, past_key_values=plain).logits).abs().max().item()
        # Or the oracle would prove nothing.
        assert moved > 0.1
    assert cache.get_seq_length() == CONTEXT + 107


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_entries_kept_is_bit_identical(tiny: ModuleType, family: str, attention: str) -> None:
    model = tiny.tiny_model(family, attention)
    cache, plain = (
        tiny.make_profile(model, CONTEXT, 1.0).cache(model),
        DynamicCache(config=model.config),
    )
    with torch.no_grad():
        for tokens in (CONTEXT, 1, 5, 1):
            ids = tiny.prompt(tokens, BATCH, seed=tokens)
            reduced = model(ids, past_key_values=cache).logits
            assert torch.equal(reduced, model(ids, past_key_values=plain).logits)
    assert cache.retained_bytes >= cache.full_bytes


@pytest.mark.parametrize("scorer", ["xkv", "snapkv", "streaming"])
def test_every_scorer_works(tiny: ModuleType, scorer: str) -> None:
    model = tiny.tiny_model()
    cache = tiny.make_profile(model, CONTEXT, 0.3, scorer=scorer).cache(model)
    ids, question = tiny.prompt(CONTEXT), tiny.prompt(7, seed=1)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        oracle = tiny.Oracle(model, ids, tiny.kept_of(cache))
        logits = model(question, past_key_values=cache).logits
    assert (logits - oracle.logits(question)).abs().max() < 1e-4


def test_layers_with_and_without_evictions_mix(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    budgets = [CONTEXT, 6, CONTEXT, 40]
    cache = tiny.make_profile(model, CONTEXT, budgets).cache(model)
    ids, question = tiny.prompt(CONTEXT, BATCH), tiny.prompt(5, BATCH, seed=1)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        assert cache.kept_tokens[:, 0].tolist() == budgets
        oracle = tiny.Oracle(model, ids, tiny.kept_of(cache))
        logits = model(question, past_key_values=cache).logits
    assert (logits - oracle.logits(question)).abs().max() < 1e-4


def test_what_is_kept_are_each_heads_best(tiny: ModuleType) -> None:
    """Selection recomputed from the full prompt's states, layer by layer."""
    from kvalloc.models.attention import intercept_attention
    from kvalloc.scorers import get_scorer

    model = tiny.tiny_model()
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    cache = profile.cache(model)
    ids = tiny.prompt(CONTEXT, BATCH)
    scores = {}
    policy = profile.policy
    scorer = get_scorer(policy.scorer, **policy.scorer_parameters)

    def note(states: object, compute: object) -> object:
        scores[states.layer] = scorer.score(states, sinks=policy.sinks)  # type: ignore[attr-defined]
        return compute(states.mask)  # type: ignore[operator, attr-defined]

    with torch.no_grad():
        model(ids, past_key_values=cache)
        with intercept_attention(model, note):
            model(ids)
    differ = 0
    for layer, score in scores.items():
        kept = cache.kept_indices(layer)
        budget = int(profile.budgets[layer, 0])
        assert kept.shape == (BATCH, tiny.N_KV_HEADS, budget)
        assert kept.dtype == torch.int32
        for row in range(BATCH):
            for head in range(tiny.N_KV_HEADS):
                mine = set(kept[row, head].tolist())
                must = {*range(policy.sinks), *range(CONTEXT - policy.window, CONTEXT)}
                assert must <= mine
                free = sorted(
                    set(range(CONTEXT)) - must, key=lambda t: (-score[row, head, t].item(), t)
                )
                assert mine == must | set(free[: budget - len(must)])
        differ += int((kept[:, 0] != kept[:, 1]).any())
    assert differ == tiny.N_LAYERS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_half_precision_agrees_with_the_float32_oracle(
    tiny: ModuleType, attention: str, dtype: torch.dtype
) -> None:
    # Smaller weights than elsewhere: with peaky attention the rounding of the model itself, which
    # is not the cache's, would be most of the difference.
    model = tiny.tiny_model("llama", attention, dtype, initializer_range=0.08)
    cache = tiny.make_profile(model, CONTEXT, 0.3).cache(model)
    ids = tiny.prompt(CONTEXT, BATCH)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        oracle = tiny.Oracle(model, ids, tiny.kept_of(cache))
        for tokens in (1, 5, 40):
            question = tiny.prompt(tokens, BATCH, seed=tokens)
            logits = model(question, past_key_values=cache).logits.float()
            expected = oracle.logits(question)
            assert torch.isfinite(logits).all()
            tolerance = 0.02 if dtype == torch.float16 else 0.15
            assert (logits - expected).abs().max() < tolerance * expected.abs().max()
    assert cache.layers[0].keys.dtype == dtype
