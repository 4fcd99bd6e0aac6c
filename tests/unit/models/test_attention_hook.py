"""The hook sees every layer, changes nothing by itself, and leaves nothing behind."""

import copy
import threading

import pytest
import torch
import transformers
from tiny_models import tiny_model

from kvalloc.models.attention import AttentionSwitch, base_implementation, intercept_attention


def look(states, compute):
    return compute(states.mask)


def noting():
    """A list, and a handler that adds each layer that it sees to it."""
    layers = []

    def note(states, compute):
        layers.append(states.layer)
        return compute(states.mask)

    return layers, note


@pytest.fixture
def ids():
    return torch.arange(2 * 9).reshape(2, 9) + 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_looking_is_bit_identical_and_sees_every_layer(attention, ids):
    model = tiny_model(attention=attention)
    seen = []

    def note(states, compute):
        seen.append((states.layer, tuple(states.queries.shape), tuple(states.keys.shape)))
        assert states.values.shape == states.keys.shape
        assert states.scaling == pytest.approx(8**-0.5)
        return compute(states.mask)

    with torch.no_grad():
        plain = model(ids).logits
        with intercept_attention(model, note):
            own = model.model.layers[0].self_attn.config
            assert own._attn_implementation == f"kvalloc_{attention}"
            assert base_implementation(model.config) == attention
            seen_logits = model(ids).logits
        after = model(ids).logits
        layers, note = noting()
        with intercept_attention(model.model, note):  # without its head
            model.model(ids)
    assert layers == [0, 1, 2]
    assert torch.equal(plain, seen_logits)
    assert torch.equal(plain, after)
    assert seen == [(layer, (2, 6, 9, 8), (2, 2, 9, 8)) for layer in range(3)]
    assert model.config._attn_implementation == attention


def test_the_innermost_handler_answers_and_the_outer_one_comes_back(ids):
    model = tiny_model()
    calls = []

    def named(name):
        return lambda states, compute: (calls.append(name), compute(states.mask))[1]

    with torch.no_grad(), intercept_attention(model, named("outer")):
        model(ids)
        with intercept_attention(model, named("inner")):
            model(ids)
        model(ids)
    assert calls == ["outer"] * 3 + ["inner"] * 3 + ["outer"] * 3
    assert model.config._attn_implementation == "sdpa"


def test_another_model_inside_the_with_is_left_alone(ids):
    model, other = tiny_model(), tiny_model(seed=1)
    # Even one that shares the config.
    twin = transformers.LlamaForCausalLM(model.config).eval()
    layers, note = noting()
    with torch.no_grad():
        expected = other(ids).logits
        with intercept_attention(model, note):
            assert torch.equal(other(ids).logits, expected)
            twin(ids)
            assert layers == []
            model(ids)
    assert layers == [0, 1, 2]


def test_the_config_in_a_module_is_a_view_of_the_model_s():
    """Of its type, with its attributes, and copied as the config itself."""
    model = tiny_model()
    config, module = model.config, model.model.layers[0].self_attn
    with intercept_attention(model, look):
        view = module.config
        assert view is not config
        assert isinstance(view, transformers.LlamaConfig)
        assert view.hidden_size == 24
        view.hidden_size = 33
        assert config.hidden_size == 33
        config.hidden_size = 24
        assert copy.copy(view) is config
        assert not _reads_a_wrapper(module)
    assert module.config is config


def _reads_a_wrapper(module):
    """In a thread of its own, where nothing is intercepted."""
    found = []
    thread = threading.Thread(target=lambda: found.append(module.config._attn_implementation))
    thread.start()
    thread.join()
    return found[0].startswith("kvalloc_")


def test_an_implementation_chosen_inside_the_with_stays(ids):
    model = tiny_model()
    with intercept_attention(model, look):
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model(ids)
    assert model.config._attn_implementation == "eager"


def test_a_switch_is_shared_as_long_as_it_is_held(ids):
    """Others in between change nothing of it; later one of the model as it is then is made."""
    model, twin = tiny_model(), tiny_model()
    switch = AttentionSwitch.of(model)
    with torch.no_grad(), intercept_attention(model, look):
        model(ids)
    assert AttentionSwitch.of(model.get_decoder()) is switch is not AttentionSwitch.of(twin)
    del switch
    layers, note = noting()
    model.model.layers[1].self_attn = twin.model.layers[1].self_attn
    with torch.no_grad(), AttentionSwitch.of(model).intercepting(note):
        model(ids)
    assert layers == [*range(len(model.model.layers))]


def test_a_layers_attention_is_the_module_that_attends():
    """Routers may have the number of their layer, too, as in HunYuan's experts."""
    model = tiny_model()
    for number, layer in enumerate(model.model.layers):
        layer.layer_idx = layer.mlp.layer_idx = number
        layer.config = model.config
    attention = AttentionSwitch(model).attention
    assert dict(attention) == {n: one.self_attn for n, one in enumerate(model.model.layers)}


def test_leaving_from_another_context_is_safe():
    model = tiny_model()
    switch = AttentionSwitch(model)
    tokens = []
    thread = threading.Thread(target=lambda: tokens.append(switch.enter(look)))
    thread.start()
    thread.join()
    switch.leave(tokens[0])
    assert model.config._attn_implementation == "sdpa"


def test_a_package_that_wraps_every_attention_function_may_call_ours(ids, monkeypatch):
    """As kvpress does where it is imported afterwards: dropout comes by its place then."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, calls = tiny_model(), []
    with torch.no_grad(), intercept_attention(model, look):
        plain = model(ids).logits

    def wrapped(function):
        def wrapper(module, query, key, value, mask, dropout, **more):
            calls.append(function)
            return function(module, query, key, value, mask, dropout, **more)

        return wrapper

    for name, function in dict(ALL_ATTENTION_FUNCTIONS.items()).items():
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, wrapped(function))
    with torch.no_grad(), intercept_attention(model, look):
        found = model(ids).logits
    assert torch.equal(plain, found)
    assert len(calls) == 3  # ours, once a layer
