"""Storage of different lengths, attention over it, and what a cache does with its rows."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.runtime import ragged_attention as module
from kvalloc.runtime.ragged import BLOCK_TOKENS, RaggedEntries
from kvalloc.runtime.ragged_attention import ragged_attention

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


def by_hand(
    queries: torch.Tensor,
    entries: RaggedEntries,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """One query head after the other, in float64."""
    batch, n_query_heads, n_new, _ = queries.shape
    group = n_query_heads // keys.shape[1]
    out = torch.empty(batch, n_new, n_query_heads, HEAD_DIM, dtype=torch.float64)
    for row in range(batch):
        for head in range(n_query_heads):
            own_keys, own_values, _, bias, _ = entries.piece(row, head // group)
            all_keys = torch.cat([own_keys, keys[row, head // group]]).double()
            all_values = torch.cat([own_values, values[row, head // group]]).double()
            logits = queries[row, head].double() @ all_keys.T * 0.3
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            kept, total = own_keys.shape[0], all_keys.shape[0]
            if bias is not None:
                logits[:, :kept] += bias
            shown = torch.ones(n_new, total).tril(total - n_new).bool()
            own = shown & ~torch.ones(n_new, total).tril(total - n_new - 1).bool()
            if visible is not None:
                shown[:, kept:] &= visible[row]
            logits = logits.masked_fill(~(shown | own), float("-inf"))
            if sink_logits is not None:
                extra = sink_logits[head].double().expand(n_new, 1)
                logits = torch.cat([logits, extra], dim=1)
            weights = logits.softmax(-1)[:, :total]
            out[row, :, head] = weights @ all_values
    return out


@pytest.mark.usefixtures("either_way")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_attention_equals_the_softmax_over_each_heads_own_entries(data: st.DataObject) -> None:
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    lengths = st.sampled_from([0, 1, 5, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, TOKENS])
    counts = [[data.draw(lengths) for _ in range(heads)] for _ in range(batch)]
    entries = entries_of(counts, biased=data.draw(st.booleans()))
    n_new = data.draw(st.integers(1, 6))
    following = n_new + data.draw(st.integers(0, 4))
    queries = torch.randn(batch, heads * data.draw(st.integers(1, 3)), n_new, HEAD_DIM)
    keys, values = torch.randn(2, batch, heads, following, HEAD_DIM)
    visible = torch.rand(batch, following) > 0.3 if data.draw(st.booleans()) else None
    softcap = data.draw(st.sampled_from([None, 2.0]))
    sinks = torch.randn(queries.shape[1]) if data.draw(st.booleans()) else None
    found = ragged_attention(
        queries,
        entries,
        keys,
        values,
        scaling=0.3,
        visible=visible,
        softcap=softcap,
        sink_logits=sinks,
    )
    expected = by_hand(queries, entries, keys, values, visible, softcap, sinks)
    assert (found - expected).abs().max() < 1e-5


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


def test_the_scratch_of_attention_is_bounded(
    peak_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = entries_of([[200, 300]])
    queries = torch.randn(1, 4, 500, HEAD_DIM)
    keys, values = torch.randn(2, 1, 2, 500, HEAD_DIM)
    peaks = []
    for scratch in (1 << 16, 1 << 23):
        monkeypatch.setattr(module, "SCRATCH_ELEMENTS", scratch)
        found = []

        def attend(found: list[Any] = found) -> None:
            found.append(ragged_attention(queries, entries, keys, values, scaling=0.3))

        peaks.append(peak_bytes(attend))
        expected = by_hand(queries, entries, keys, values, None, None, None)
        assert (found[0] - expected).abs().max() < 1e-5
    results = 2 * queries.nbytes
    assert peaks[0] <= results + 5 * (1 << 16) * 4 < peaks[1]


def test_prefill_needs_what_is_kept_and_one_layer_in_full(
    tiny: ModuleType, peak_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak of all tensors alive, above that of the same forward without any cache."""
    monkeypatch.setattr(module, "SCRATCH_ELEMENTS", 1 << 14)
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
