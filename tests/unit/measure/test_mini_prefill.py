"""The forward pass that stops early and leaves no trace."""

import contextlib

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model

from kvalloc.errors import UnsupportedModelError
from kvalloc.measure.mini_prefill import mini_prefill

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
