"""The short ways that one decoded token takes on the CPU, against the definitions."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.runtime import even_attention as even_attention_module
from kvalloc.runtime import layers, make_cache
from kvalloc.runtime.even_attention import even_attention
from kvalloc.runtime.ragged import BLOCK_TOKENS, RaggedEntries
from kvalloc.runtime.ragged_decoding import decoding_attention

HEAD_DIM = 8
TOKENS = 60
LENGTHS = [0, 1, 5, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS]


def by_definition(
    queries: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scaling: float,
    biases: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Softmax over each segment's entries, (batch, n_query_heads, head_dim), in float64."""
    flat = queries.double().reshape(len(keys), -1, HEAD_DIM)
    added = [torch.zeros(len(own)) for own in keys] if biases is None else biases
    rows = [
        (asked @ own.double().T * scaling + bias.double()).softmax(-1) @ value.double()
        for asked, own, value, bias in zip(flat, keys, values, added, strict=True)
    ]
    return torch.stack(rows).reshape(queries.shape[0], -1, HEAD_DIM)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_one_token_over_ragged_entries(data: st.DataObject) -> None:
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    counts = np.array(
        [[data.draw(st.sampled_from(LENGTHS)) for _ in range(heads)] for _ in range(batch)]
    )
    sharpness = data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    parts = {
        place: torch.randn(2, int(counts[place]), HEAD_DIM) * sharpness
        for place in np.ndindex(batch, heads)
    }

    biased = data.draw(st.booleans())
    own_bias = {place: torch.randn(int(counts[place])) * biased * 3 for place in parts}

    def piece(row: int, head: int) -> Any:
        keys, values = parts[row, head]
        n = len(keys)
        bias = own_bias[row, head] if biased else None
        return keys, values, torch.arange(n, dtype=torch.int32), bias, torch.arange(n)

    entries = RaggedEntries.collect(counts, piece, biased=biased)
    queries = torch.randn(batch, heads * data.draw(st.integers(1, 3)), 1, HEAD_DIM)
    latest = torch.randn(2, batch, heads, data.draw(st.integers(1, 4)), HEAD_DIM)
    found = decoding_attention(queries, entries, *latest, scaling=0.3)
    joined = [
        [torch.cat([parts[place][i], latest[i][place]]) for place in np.ndindex(batch, heads)]
        for i in range(2)
    ]
    n_latest = latest.shape[3]
    biases = [torch.cat([bias, torch.zeros(n_latest)]) for bias in own_bias.values()]
    expected = by_definition(queries, joined[0], joined[1], 0.3, biases)
    assert found.shape == (batch, 1, queries.shape[1], HEAD_DIM)
    assert (found[:, 0] - expected).abs().max() < 1e-5 * max(1.0, sharpness)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    group=st.integers(1, 3),
    n_kept=st.integers(0, 50),
    n_latest=st.integers(1, 4),
    unbiased=st.integers(0, 50) | st.none(),
    scratch=st.sampled_from([1, 500, 1 << 18]),
)
def test_one_token_over_even_entries(
    dtype: torch.dtype,
    group: int,
    n_kept: int,
    n_latest: int,
    unbiased: int | None,
    scratch: int,
) -> None:
    """Biased are the first entries; the tokens that joined them since then have no bias."""
    queries = torch.randn(2, 3 * group, 1, HEAD_DIM).to(dtype)
    kept = torch.randn(2, 2, 3, n_kept, HEAD_DIM).to(dtype)
    latest = torch.randn(2, 2, 3, n_latest, HEAD_DIM).to(dtype)
    bias = None if unbiased is None else torch.randn(2, 3, max(n_kept - unbiased, 0)) * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(even_attention_module, "SCRATCH_NUMBERS", scratch)
        found = even_attention(queries, tuple(kept), tuple(latest), scaling=0.3, bias=bias)
    assert found.dtype == dtype
    joined = torch.cat([kept, latest], dim=3)
    full = torch.zeros(6, n_kept + n_latest)
    if bias is not None:
        full[:, : bias.shape[-1]] = bias.flatten(0, 1)
    expected = by_definition(
        queries, list(joined[0].flatten(0, 1)), list(joined[1].flatten(0, 1)), 0.3, list(full)
    )
    half_a_step = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    assert (found[:, 0].double() - expected).abs().max() < half_a_step


@pytest.fixture
def model(tiny: ModuleType) -> Any:
    return tiny.tiny_model("phi3")  # keys and values are cut from one larger tensor


@pytest.fixture
def profile(tiny: ModuleType, model: Any) -> Any:
    return tiny.make_profile(model, TOKENS, 0.4)


def run(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
    return logits


def runs_of(tensors: list[torch.Tensor]) -> list[int]:
    """How many have the same storage, for each storage."""
    places = [tensor.data_ptr() for tensor in tensors]
    return [places.count(place) for place in dict.fromkeys(places)]


@pytest.mark.usefixtures("either_way")
def test_what_is_kept_stays_where_it_is_while_decoding(
    tiny: ModuleType, model: Any, profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "APART_TOKENS", 5)
    cache, ids = profile.cache(model), tiny.prompt(TOKENS, 2)
    run(model, ids, cache)
    oracle = tiny.Oracle(model, ids, tiny.kept_of(cache))
    layer = cache.layers[0]
    places = []
    for step in range(1, 13):
        token = tiny.prompt(1, 2, seed=step)
        assert tiny.worst(run(model, token, cache), oracle.logits(token)) < 1e-4
        places.append(layer.kept_apart[0])  # held, or its place would be given again
        added = 2 * step * tiny.N_LAYERS * tiny.N_KV_HEADS * profile.shape.bytes_per_entry
        assert cache.retained_bytes == 2 * profile.retained_bytes + added
        assert layer.following_tokens == step
    assert runs_of(places) == [5, 5, 2]


@pytest.mark.usefixtures("either_way")
def test_what_is_held_apart_joins_for_everything_else(
    tiny: ModuleType, model: Any, profile: Any
) -> None:
    """Questions of several tokens, rows, copies and cuts see one tensor."""
    cache, ids = profile.cache(model), tiny.prompt(TOKENS, 2)
    run(model, ids, cache)
    oracle = tiny.Oracle(model, ids, tiny.kept_of(cache))
    question = tiny.prompt(3, 2, seed=5)
    for new in (tiny.prompt(1, 2, seed=1), question, tiny.prompt(1, 2, seed=2)):
        assert tiny.worst(run(model, new, cache), oracle.logits(new)) < 1e-4
    assert cache.layers[0].holds_apart
    other = copy.deepcopy(cache)
    expected = run(model, question, other)
    assert cache.layers[0].holds_apart
    cache.reorder_cache(torch.tensor([1, 0]))
    assert tiny.worst(run(model, question.flip(0), cache), expected.flip(0)) < 1e-5
    cache.crop(-8)
    assert cache.retained_bytes == 2 * profile.retained_bytes
    oracle = tiny.Oracle(model, ids.flip(0), tiny.kept_of(cache))
    assert tiny.worst(run(model, question, cache), oracle.logits(question)) < 1e-4
    cache.reset()
    assert cache.retained_bytes == 0


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("policy", ["compensate", "attention_matching"])
def test_biased_entries_of_equal_number_stay_where_they_are(
    tiny: ModuleType, model: Any, profile: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when tokens without a bias have joined them."""
    monkeypatch.setattr(layers, "APART_TOKENS", 3)
    cache, ids = make_cache(profile, model, policy=policy), tiny.prompt(TOKENS, 2)
    shadow = tiny.Shadow(model)
    shadow.logits(ids)
    run(model, ids, cache)
    shadow.follow(cache)
    shadow.take_combined(cache)
    biased = [layer for layer in cache.layers if layer.logit_bias is not None]
    assert biased
    assert any(bool((layer.logit_bias != 0).any()) for layer in biased)
    places = []
    for step in range(1, 8):
        token = tiny.prompt(1, 2, seed=step)
        assert tiny.worst(run(model, token, cache), shadow.logits(token)) < 1e-4
        assert all(layer.holds_apart for layer in biased)
        places.append(biased[0].kept_apart[0])  # held, or its place would be given again
    assert runs_of(places) == [3, 3, 1]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("policy", [None, "compensate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_holds_apart_and_loses_no_more_than_the_model(
    tiny: ModuleType, dtype: torch.dtype, policy: str | None
) -> None:
    model = tiny.tiny_model("llama", dtype=dtype, initializer_range=0.08)
    profile, ids = tiny.make_profile(model, TOKENS, 0.4), tiny.prompt(TOKENS, 2)
    exact = tiny.Shadow(model)
    with torch.no_grad():
        plain = model(ids).logits
    allowed = 2 * tiny.worst(plain, exact.logits(ids))
    cache = make_cache(profile, model, policy=policy) if policy else profile.cache(model)
    run(model, ids, cache)
    exact.follow(cache)
    if policy:
        exact.take_combined(cache)
    for step in range(1, 4):
        token = tiny.prompt(1, 2, seed=step)
        assert tiny.worst(run(model, token, cache), exact.logits(token)) <= allowed
        assert cache.layers[0].holds_apart


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("policy", [None, "compensate"])
def test_a_models_soft_cap(tiny: ModuleType, policy: str | None) -> None:
    """Gemma 2 caps logits: the kernel does as well, the short way leaves it to the model."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": tiny.N_QUERY_HEADS,
        "num_key_value_heads": tiny.N_KV_HEADS,
        "head_dim": tiny.HEAD_DIM,
        "vocab_size": tiny.VOCABULARY,
        "layer_types": ["full_attention", "full_attention"],
        "attn_logit_softcapping": 0.5,
        "initializer_range": 0.2,
    }
    model = Gemma2ForCausalLM._from_config(Gemma2Config(**sizes), attn_implementation="eager")
    model.eval().config._name_or_path = "tiny"
    profile, ids = tiny.make_profile(model, TOKENS, 0.4), tiny.prompt(TOKENS)
    cache = make_cache(profile, model, policy=policy) if policy else profile.cache(model)
    shadow = tiny.Shadow(model)
    shadow.logits(ids)
    run(model, ids, cache)
    shadow.follow(cache)
    if policy:
        shadow.take_combined(cache)
    for step in range(3):
        token = tiny.prompt(1, seed=step)
        assert tiny.worst(run(model, token, cache), shadow.logits(token)) < 1e-4
