"""Samples that run in chunks: the same scores, and memory of one layer."""

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, tiny_model, tiny_profile

from kvalloc.errors import InputError
from kvalloc.measure.job import CHUNK_TOKENS, Job
from kvalloc.measure.mini_prefill import mini_prefill
from kvalloc.measure.sampling import SampleSet
from kvalloc.scorers import attention_rows, get_scorer


def check_same(found, whole):
    for name in ("curves", "masses", "shared_curves", "losses"):
        one, other = getattr(found, name), getattr(whole, name)
        if other is None:
            assert one is None
        else:
            np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 13, 59])
def test_every_attention_gives_the_same_by_chunks(kind, attention, chunk):
    model = tiny_model(kind, attention=attention)
    check_same(tiny_profile(model, chunk=chunk), tiny_profile(model))


@pytest.mark.parametrize(
    "options",
    [{"share_length": 2}, {"loss": "fast", "bits": (8, 4)}, {"scorer": "h2o"}],
)
def test_what_else_is_measured_is_the_same_by_chunks(options):
    model = tiny_model(num_hidden_layers=5)
    check_same(tiny_profile(model, chunk=16, **options), tiny_profile(model, **options))


@pytest.mark.parametrize("scorer", ["snapkv", "cake", "criticalkv"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_window_by_heads_gives_the_same(monkeypatch, kind, scorer):
    model = tiny_model(kind, attention="eager")
    whole = tiny_profile(model, scorer=scorer, window=12)
    monkeypatch.setattr(attention_rows, "_WINDOW_ELEMENTS", 1)
    check_same(tiny_profile(model, scorer=scorer, window=12), whole)


def test_each_layer_sees_all_chunks_before_the_next_one():
    model, seen = tiny_model(), []
    ids = torch.arange(40).remainder(VOCABULARY).view(1, 40)

    def look(states):
        assert states.keys.shape[2] == states.values.shape[2]
        seen.append((states.layer, states.queries.shape[2], states.keys.shape[2]))

    mini_prefill(model, ids, look, layers=(0, 2), chunk=15)
    assert seen == [
        (layer, n, end) for layer in (0, 2) for n, end in ((10, 10), (15, 25), (15, 40))
    ]


def test_long_samples_run_in_chunks_by_themselves():
    whole = {"shape": None, "sinks": 4}
    whole["samples"] = SampleSet(samples=(), description="")
    job = Job(**whole, context_tokens=8192, scorer=get_scorer("xkv"))
    assert [job.chunk_of(n) for n in (60, 4096, 8192)] == [60, 4096, CHUNK_TOKENS]
    assert Job(**whole, context_tokens=60, scorer=get_scorer("snapkv"), chunk=3).chunk_of(60) == 64
    with pytest.raises(InputError, match="the chunk is 0 tokens"):
        tiny_profile(chunk=0)
