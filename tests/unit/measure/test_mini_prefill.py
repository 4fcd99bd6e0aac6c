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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_layers_are_seen_in_order_with_their_own_states(kind, attention):
    model = tiny_model(kind, attention=attention)
    seen = []

    def look(states):
        seen.append(states.layer)
        assert states.queries.shape == (1, 6, 40, 8)
        assert states.keys.shape == states.values.shape == (1, 2, 40, 8)

    mini_prefill(model, IDS, look, layers=(0, 1, 2))
    assert seen == [0, 1, 2]


def test_nothing_runs_after_the_last_attention():
    model = tiny_model()
    with ran(model) as names:
        mini_prefill(model, IDS, lambda states: None, layers=(0, 1, 2))
    assert "model.layers.1.mlp" in names
    assert "model.layers.2.self_attn.k_proj" in names
    for late in (
        "model.layers.2.self_attn.o_proj",
        "model.layers.2.post_attention_layernorm",
        "model.layers.2.mlp",
        "model.norm",
        "lm_head",
    ):
        assert late not in names


def test_layers_after_the_last_wanted_one_do_not_run():
    model = tiny_model("gemma3")
    with ran(model) as names:
        mini_prefill(model, IDS, lambda states: None, layers=(1,))
    assert "model.layers.1.self_attn.q_proj" in names
    assert not any(name.startswith("model.layers.2") for name in names)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_states_are_those_of_a_plain_forward(attention):
    model = tiny_model(attention=attention)
    keys = {}
    mini_prefill(
        model, IDS, lambda states: keys.update({states.layer: states.keys.clone()}), layers=(0, 2)
    )
    with torch.no_grad():
        cache = model(IDS, use_cache=True).past_key_values
    assert torch.equal(keys[2], cache.layers[2].keys)
    assert 1 not in keys


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_the_same_afterwards(fails):
    model = tiny_model(attention_dropout=0.5).train()
    model.model.layers[1].eval()
    flags = [module.training for module in model.modules()]
    before = model.config.to_dict()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    results = []

    def look(states):
        results.append(states.keys.clone())
        if fails and states.layer == 1:
            raise RuntimeError("from the scorer")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="scorer") if fails else contextlib.nullcontext():
            mini_prefill(model, IDS, look, layers=(0, 1, 2))
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"
    assert [module.training for module in model.modules()] == flags
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    # dropout was off: both runs saw the same
    half = len(results) // 2
    assert all(torch.equal(a, b) for a, b in zip(results[:half], results[half:], strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_layer_that_is_never_seen_is_an_error():
    with pytest.raises(UnsupportedModelError, match="layer 7"):
        mini_prefill(tiny_model(), IDS, lambda states: None, layers=(0, 7))
