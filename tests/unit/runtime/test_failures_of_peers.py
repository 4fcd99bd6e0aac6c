"""What runtimes get wrong, seen in peers: one test for each, in the order of the design page.

Head-level budgets throughout, so that layers, heads and rows all differ; other files test each of
these things at greater length.
"""

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from other_attention import attention_on_cpu
from prompt_runs import run
from transformers import DynamicCache

import kvalloc
from kvalloc.accounting.costs import POSITION_BYTES, full_bytes

CONTEXT = 90


@pytest.fixture
def profile(model):
    return tiny.by_head(tiny.make_profile(model, CONTEXT, 0.5))


def test_1_a_second_prompt_does_not_undo_the_first_ones_eviction(model, profile):
    first, second = kvalloc.make_cache(model, profile), kvalloc.make_cache(model, profile)
    ids, question = tiny.prompt(CONTEXT), tiny.prompt(4, seed=1)
    alone = kvalloc.make_cache(model, profile)
    run(model, ids, alone)
    expected = run(model, question, alone)
    run(model, ids, first)
    stored = first.kept_tokens
    run(model, tiny.prompt(CONTEXT - 7, seed=2), second)
    assert np.array_equal(first.kept_tokens, stored)
    assert torch.equal(run(model, question, first), expected)


def test_2_heads_free_what_they_evict(model, profile):
    cache = kvalloc.make_cache(model, profile)
    run(model, tiny.prompt(CONTEXT, 2), cache)
    assert (profile.budgets[:, 0] != profile.budgets[:, 1]).all()
    storages = {}
    for layer in cache.layers:
        for tensor in layer.stored_tensors():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    expected = int(profile.budgets.sum()) * 2 * (tiny.HEAD_DIM * 2 * 2 + POSITION_BYTES)
    assert sum(storages.values()) == expected == cache.retained_bytes
    assert cache.retained_bytes < 0.6 * cache.full_bytes


def test_3_a_prompt_in_chunks_ends_at_the_budget(model, profile):
    cache = kvalloc.make_cache(model, profile, prompt_tokens=CONTEXT)
    chunk_bytes = 20 * tiny.N_LAYERS * tiny.N_KV_HEADS * profile.shape.bytes_per_entry
    for part in tiny.prompt(CONTEXT).split(20, dim=1):
        run(model, part, cache)
        assert cache.retained_bytes <= profile.retained_bytes + chunk_bytes
    assert np.array_equal(cache.kept_tokens, profile.budgets)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_4_a_question_of_five_tokens_after_compression(attention):
    model = tiny.tiny_model("llama", attention)
    for profile in (
        tiny.make_profile(model, CONTEXT, [6, 20, 50, CONTEXT]),
        tiny.by_head(tiny.make_profile(model, CONTEXT, 0.5)),
    ):
        cache, shadow = kvalloc.make_cache(model, profile), tiny.Shadow(model)
        ids, question = tiny.prompt(CONTEXT), tiny.prompt(5, seed=1)
        run(model, ids, cache)
        shadow.logits(ids)
        shadow.follow(cache)
        assert tiny.worst(run(model, question, cache), shadow.logits(question)) < 1e-4


def test_5_padding_is_never_kept_and_never_counted(model, profile):
    mask = torch.ones(2, CONTEXT, dtype=torch.long)
    mask[1, :50] = 0
    cache = kvalloc.make_cache(model, profile)
    run(model, tiny.prompt(CONTEXT, 2), cache, mask)
    for layer in range(tiny.N_LAYERS):
        kept = cache.kept_indices(layer)[1]
        assert (kept[kept >= 0] >= 50).all()
    assert np.array_equal(cache.kept_tokens_by_row[1], profile.budgets_for(CONTEXT - 50))
    assert cache.full_bytes == full_bytes(profile.shape, CONTEXT) + full_bytes(
        profile.shape, CONTEXT - 50
    )


def test_6_positions_count_the_tokens_seen(model, profile):
    cache = kvalloc.make_cache(model, profile)
    run(model, tiny.prompt(CONTEXT), cache)
    assert [cache.get_seq_length(layer) for layer in range(4)] == [CONTEXT] * 4
    seen = []
    handle = model.model.rotary_emb.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    run(model, tiny.prompt(3), cache)
    handle.remove()
    assert seen[0].tolist() == [[CONTEXT, CONTEXT + 1, CONTEXT + 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_7_half_precision_stays_finite_and_close(dtype):
    model = tiny.tiny_model("llama", "sdpa", dtype, initializer_range=0.08)
    cache = kvalloc.make_cache(model, tiny.by_head(tiny.make_profile(model, CONTEXT, 0.5)))
    shadow, ids, question = tiny.Shadow(model), tiny.prompt(CONTEXT), tiny.prompt(9, seed=1)
    own = tiny.worst(run(model, ids, cache), shadow.logits(ids))
    shadow.follow(cache)
    assert tiny.worst(run(model, question, cache), shadow.logits(question)) <= 2 * own


def test_8_ties_and_tiny_budgets_keep_sinks_and_window(model):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()
    least = tiny.SINKS + tiny.WINDOW
    base = tiny.make_profile(model, CONTEXT, [least] * 4, parameters={"pool": 1})
    budgets = base.budgets.copy()
    budgets[:, 1] += 3
    profile = base.replace(level="head", budgets=budgets)
    cache = kvalloc.make_cache(model, profile)
    run(model, tiny.prompt(CONTEXT), cache)
    window = list(range(CONTEXT - tiny.WINDOW, CONTEXT))
    for layer in range(4):
        first, second = cache.kept_indices(layer)[0].tolist()
        assert first == [*range(tiny.SINKS), *window, -1, -1, -1]
        assert second == [*range(tiny.SINKS + 3), *window]


@pytest.mark.parametrize("tokens", [7, 50, CONTEXT, 300])
def test_9_what_is_stored_is_what_was_granted(model, profile, tokens):
    cache = kvalloc.make_cache(model, profile)
    run(model, tiny.prompt(tokens), cache)
    assert cache.retained_bytes == profile.retained_bytes_at(tokens)
    entry = profile.shape.bytes_per_entry + POSITION_BYTES
    assert cache.retained_bytes == int(profile.budgets_for(tokens).sum()) * entry
    assert cache.share == pytest.approx(profile.share_at(tokens))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", "padding_only"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3"])
def test_10_a_budget_of_everything_changes_no_bit(family, attention):
    model = tiny.tiny_model(family, attention)
    for level in ("layer", "head"):
        profile = tiny.make_profile(model, CONTEXT, 1.0).replace(level=level)
        cache, plain = kvalloc.make_cache(model, profile), DynamicCache(config=model.config)
        for tokens in (CONTEXT, 1, 5, 1):
            ids = tiny.prompt(tokens, 2, seed=tokens)
            with attention_on_cpu(attention):
                assert torch.equal(run(model, ids, cache), run(model, ids, plain))
        assert cache.retained_bytes >= cache.full_bytes
