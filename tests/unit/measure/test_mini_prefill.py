"""The forward pass that stops early and leaves no trace, of short and long samples."""

import contextlib

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, tiny_model, tiny_profile

from kvalloc.errors import UnsupportedModelError
from kvalloc.measure.job import CHUNK_TOKENS, Job
from kvalloc.measure.mini_prefill import mini_prefill
from kvalloc.measure.sampling import SampleSet
from kvalloc.models.attention import probe_of
from kvalloc.scorers import attention_rows, get_scorer

# The forward pass that stops early and leaves no trace


IDS = torch.arange(40).remainder(VOCABULARY).view(1, 40)


@contextlib.contextmanager
def ran(model):
    """Names of the modules whose forward was entered."""
    names = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: names.append(name))
        for name, module in model.named_modules()
    ]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("kind", "layers", "last"),
    [("llama", (0, 1, 2), 2), ("qwen3", (0, 2), 2), ("gemma3", (1,), 1)],
)
def test_nothing_runs_after_the_last_attention(kind, layers, last):
    model, seen = tiny_model(kind), []
    assert probe_of(model).knows_rotations  # once for a model, all of it runs over a few tokens
    with ran(model) as names:
        mini_prefill(model, IDS, lambda states: seen.append(states.layer), layers=layers)
    assert tuple(seen) == layers
    own = {name for name in names if name.startswith(f"model.layers.{last}.self_attn.")}
    assert {name.rsplit(".", 1)[1] for name in own} >= {"q_proj", "k_proj", "v_proj"}
    assert f"model.layers.{last - 1}.mlp" in names
    after = {f"layers.{last}.self_attn.o_proj", f"layers.{last}.mlp", f"layers.{last + 1}", "norm"}
    assert not {name for name in names for one in after if name.startswith(f"model.{one}")}
    assert "lm_head" not in names


@pytest.mark.parametrize("chunk", [None, 15])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_the_same_afterwards(fails, chunk):
    model = tiny_model(attention_dropout=0.5).train()
    model.model.layers[1].eval()
    flags = [module.training for module in model.modules()]
    before = model.config.to_dict()
    results = []

    def look(states):
        results.append(states.keys.clone())
        if fails and states.layer == 1:
            raise RuntimeError("from the scorer")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="scorer") if fails else contextlib.nullcontext():
            mini_prefill(model, IDS, look, layers=(0, 1, 2), chunk=chunk)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"
    assert [module.training for module in model.modules()] == flags
    modules = [*model.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert not any("forward" in module.__dict__ for module in modules)
    # dropout was off: both runs saw the same
    half = len(results) // 2
    assert all(torch.equal(a, b) for a, b in zip(results[:half], results[half:], strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_layer_that_is_never_seen_is_an_error():
    with pytest.raises(UnsupportedModelError, match="layer 7"):
        mini_prefill(tiny_model(), IDS, lambda states: None, layers=(0, 7))


# Samples that run in chunks: the same scores, and memory of one layer


def check_same(found, whole):
    for name in ("curves", "masses", "losses"):
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


@pytest.mark.parametrize("options", [{"loss": "fast", "bits": (8, 4)}, {"scorer": "h2o"}])
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
