"""Storage of different lengths, attention over it, and what a cache does with its rows."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvalloc.runtime.attention import torch as by_torch
from kvalloc.runtime.kept import BLOCK_TOKENS, RaggedEntries

CONTEXT = 300
TOKENS, HEAD_DIM = 3 * BLOCK_TOKENS, 8


def run(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
    return logits


def entries_of(counts: Any, seed: int = 0, *, biased: bool = False) -> RaggedEntries:
    """Random entries; counts (batch, n_kv_heads)."""
    generator = torch.Generator().manual_seed(seed)
    counts = np.asarray(counts, dtype=np.int64)

    def piece(row: int, head: int) -> Any:
        kept = torch.randperm(TOKENS, generator=generator)[: counts[row, head]].sort().values
        keys = torch.randn(TOKENS, HEAD_DIM, generator=generator)
        values = torch.randn(TOKENS, HEAD_DIM, generator=generator)
        bias = torch.rand(TOKENS, generator=generator) if biased else None
        return keys, values, torch.arange(TOKENS, dtype=torch.int32), bias, kept

    return RaggedEntries.collect(counts, piece, biased=biased)


def test_nothing_is_padded_and_segments_come_back_in_order() -> None:
    counts = np.array([[130, 64], [7, 300]])
    entries = entries_of(counts)
    assert entries.keys.untyped_storage().nbytes() == int(counts.sum()) * HEAD_DIM * 4
    assert entries.values.untyped_storage().nbytes() == int(counts.sum()) * HEAD_DIM * 4
    for row, head in np.ndindex(2, 2):
        positions = entries.piece(row, head)[2]
        assert positions.numel() == counts[row, head]
        assert (positions.diff() > 0).all()
    swapped = entries.rows(torch.tensor([1, 0, 1]))
    assert swapped.lengths.tolist() == [[7, 300], [130, 64], [7, 300]]
    for head in range(2):
        for part in range(3):
            assert torch.equal(swapped.piece(2, head)[part], entries.piece(1, head)[part])


def test_prefill_needs_what_is_kept_and_one_layer_in_full(
    tiny: ModuleType, peak_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak of all tensors alive, above that of the same forward without any cache."""
    monkeypatch.setattr(by_torch, "SCRATCH_ELEMENTS", 1 << 14)
    tokens, chunk = 1000, 100
    model = tiny.tiny_model()
    ids = tiny.prompt(tokens)
    layer_bytes = tokens * tiny.N_KV_HEADS * 2 * tiny.HEAD_DIM * 4
    base = tiny.make_profile(model, tokens, 0.2)
    for profile in (base, tiny.by_head(base, spread=60)):
        cache = profile.cache(model)

        def prefill(cache: Any = cache) -> None:
            model(ids, past_key_values=cache, logits_to_keep=1)

        def in_chunks(cache: Any = cache) -> None:
            cache.reset()
            with cache.prefill():
                for part in ids.split(chunk, dim=1):
                    model(part, past_key_values=cache, logits_to_keep=1)

        with torch.no_grad():
            alone = peak_bytes(lambda: model(ids, use_cache=False, logits_to_keep=1))
            above = peak_bytes(prefill) - alone
            assert above <= cache.retained_bytes + layer_bytes
            alone = peak_bytes(lambda: model(ids[:, :chunk], use_cache=False, logits_to_keep=1))
            above = peak_bytes(in_chunks) - alone
            scratch = 5 * (1 << 14) * 4 + layer_bytes * chunk // tokens
            assert above <= cache.retained_bytes + layer_bytes + scratch


@pytest.fixture
def model(tiny: ModuleType) -> Any:
    return tiny.tiny_model()


@pytest.fixture
def profile(tiny: ModuleType, model: Any) -> Any:
    return tiny.by_head(tiny.make_profile(model, CONTEXT, 0.6), spread=70)


def test_rows_can_be_reordered_repeated_and_selected(
    tiny: ModuleType, model: Any, profile: Any
) -> None:
    ids, question = tiny.prompt(CONTEXT, 3), tiny.prompt(4, 3, seed=1)
    order = torch.tensor([2, 0, 0])
    cache, expected = profile.cache(model), profile.cache(model)
    run(model, ids, cache)
    run(model, question, cache)
    before = cache.kept_indices(1)
    cache.reorder_cache(order)
    run(model, ids[order], expected)
    run(model, question[order], expected)
    assert torch.equal(cache.kept_indices(1), before[order])
    assert cache.retained_bytes == expected.retained_bytes
    logits = run(model, question, cache)
    assert (logits - run(model, question, expected)).abs().max() < 1e-4
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.kept_indices(1), before[[0, 0]])
    added = 8 * tiny.N_LAYERS * tiny.N_KV_HEADS * profile.shape.bytes_per_entry
    assert cache.retained_bytes == 2 * (profile.retained_bytes + added)


def test_cropping_back_to_the_prompt_asks_another_question(
    tiny: ModuleType, model: Any, profile: Any
) -> None:
    from kvalloc.errors import UnsupportedRequestError

    cache = profile.cache(model)
    run(model, tiny.prompt(CONTEXT), cache)
    question = tiny.prompt(6, seed=1)
    first = run(model, question, cache)
    cache.crop(-6)
    assert cache.get_seq_length() == CONTEXT
    assert cache.retained_bytes == profile.retained_bytes
    assert torch.equal(run(model, question, cache), first)
    with pytest.raises(UnsupportedRequestError, match="only 6 tokens followed"):
        cache.crop(-7)


def test_a_copy_goes_on_by_itself(tiny: ModuleType, model: Any, profile: Any) -> None:
    cache = profile.cache(model)
    run(model, tiny.prompt(CONTEXT), cache)
    other = copy.deepcopy(cache)
    question = tiny.prompt(6, seed=1)
    expected = run(model, question, cache)
    del cache
    assert torch.equal(run(model, question, other), expected)


@pytest.mark.usefixtures("either_way")
def test_decoding_by_beams_samples_streams_and_embeddings(
    tiny: ModuleType, model: Any, profile: Any
) -> None:
    from transformers.generation.streamers import BaseStreamer

    class Noted(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    ids = tiny.prompt(CONTEXT)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    greedy = model.generate(ids, past_key_values=profile.cache(model), **options)
    streamer = Noted()
    model.generate(ids, past_key_values=profile.cache(model), streamer=streamer, **options)
    assert streamer.tokens == [*greedy[0].tolist(), -1]
    embedded = model.generate(
        inputs_embeds=model.get_input_embeddings()(ids),
        past_key_values=profile.cache(model),
        **options,
    )
    assert torch.equal(embedded[0], greedy[0, CONTEXT:])
    one_beam_more = model.generate(
        ids,
        past_key_values=profile.cache(model),
        num_beams=3,
        num_return_sequences=2,
        **options,
    )
    assert one_beam_more.shape == (2, CONTEXT + 8)
    cache = profile.cache(model)
    torch.manual_seed(0)
    sampled = model.generate(
        ids, past_key_values=cache, num_return_sequences=3, **{**options, "do_sample": True}
    )
    assert sampled.shape == (3, CONTEXT + 8)
    assert cache.batch == 3


def test_beam_search_equals_the_oracles(tiny: ModuleType, model: Any, profile: Any) -> None:
    from transformers import DynamicCache

    from kvalloc.models.attention import intercept_attention

    ids = tiny.prompt(CONTEXT)
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "num_beams": 3,
        "num_return_sequences": 3,
        "output_scores": True,
        "return_dict_in_generate": True,
        "attention_mask": torch.ones_like(ids),
    }
    cache = profile.cache(model)
    found = model.generate(ids, past_key_values=cache, **options)
    twin = tiny.eager_twin(model)
    hidden = tiny.Oracle(model, ids.repeat(3, 1), tiny.kept_of(cache)).hidden

    def hide(states: Any, compute: Any) -> Any:
        if states.queries.shape[2] > 1:
            return compute(states.mask)
        mask = torch.zeros(3, tiny.N_QUERY_HEADS, 1, states.keys.shape[2])
        mask[..., :CONTEXT] += hidden[states.layer]
        return compute(mask)

    with intercept_attention(twin, hide):
        expected = twin.generate(ids, past_key_values=DynamicCache(config=twin.config), **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert (found.sequences_scores - expected.sequences_scores).abs().max() < 1e-4
