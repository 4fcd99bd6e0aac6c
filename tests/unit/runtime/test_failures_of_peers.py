"""Test failures of other runtimes that no other file tests.

Budgets are by head, so that layers, heads and rows all differ. Other files test these failures:

- test_matrix.py: a second prompt undoes the first eviction (arrival ``interleaved``), a question of
  several tokens (``question_of_5``), scored padding (``left_padding``), shifted positions, and NaN
  in half precision;
- test_peaks.py: later chunks of a prompt stay whole;
- tests/property/test_selection.py: ties evict the window, and tiny budgets evict everything.
"""

import pytest
import runtime_oracle as tiny
import torch
from other_attention import attention_on_cpu
from prompt_runs import run
from transformers import DynamicCache

import kvalloc
from kvalloc.accounting.costs import POSITION_BYTES

CONTEXT = 90


@pytest.fixture
def profile(model):
    return tiny.by_head(tiny.make_profile(model, CONTEXT, 0.5))


def test_heads_free_what_they_evict(model, profile):
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


@pytest.mark.parametrize("tokens", [7, 50, CONTEXT, 300])
def test_what_is_stored_is_what_was_granted(model, profile, tokens):
    cache = kvalloc.make_cache(model, profile)
    run(model, tiny.prompt(tokens), cache)
    assert cache.retained_bytes == profile.retained_bytes_at(tokens)
    entry = profile.shape.bytes_per_entry + POSITION_BYTES
    assert cache.retained_bytes == int(profile.budgets_for(tokens).sum()) * entry
    assert cache.share == pytest.approx(profile.share_at(tokens))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", "padding_only"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3"])
def test_a_budget_of_everything_changes_no_bit(family, attention):
    model = tiny.tiny_model(family, attention)
    for level in ("layer", "head"):
        profile = tiny.make_profile(model, CONTEXT, 1.0).replace(level=level)
        cache, plain = kvalloc.make_cache(model, profile), DynamicCache(config=model.config)
        for tokens in (CONTEXT, 1, 5, 1):
            ids = tiny.prompt(tokens, 2, seed=tokens)
            with attention_on_cpu(attention):
                assert torch.equal(run(model, ids, cache), run(model, ids, plain))
        assert cache.retained_bytes >= cache.full_bytes
