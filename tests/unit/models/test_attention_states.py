"""Test that attention is intercepted with the tensors of the model, in every family."""

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from dataclasses import replace

import families
import pytest
import torch
from scorer_oracle import make_states

from kvalloc.errors import UnsupportedModelError, UnsupportedRequestError
from kvalloc.models import attention
from kvalloc.models.attention import (
    intercept_attention,
    probe_of,
)
from kvalloc.models.rope import NO_ROTATION, rotate
from kvalloc.scorers.attention_rows import attention_rows
from kvalloc.scorers.expected_attention import ExpectedAttention
from kvalloc.scorers.projected_values import projected_value_norms

FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "phi3 half rotated", "gemma3", "gemma2"),
    *("gpt-oss", "olmo3", "hunyuan"),
]
UNUSUAL = ["cohere", "ernie4.5", "glm", "glm4", "gpt-j", "gpt-neox", "phi", "nanochat"]
"""Families that rotate neighbours, a part of a head, or backwards."""
LAST_UNROTATED = ["afmoe", "exaone4", "smollm3", "cohere2", "llama4 half rotated"]
N_TOKENS = 12


def model_of(name):
    model = families.family(name)
    model.set_attn_implementation("eager")
    for key, weight in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(weight, std=2.0)
    return model


def states_of(model, ids):
    """Return the states that each layer's attention sees, and its weights."""
    seen = []

    def note(states, compute):
        output, weights = compute(states.mask)
        seen.append((states, weights))
        return output, weights

    with torch.no_grad(), intercept_attention(model, note):
        model(ids)
    return seen


@pytest.fixture
def ids():
    return torch.randint(2, 61, (2, N_TOKENS), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_recomputed_as_the_model_has_them(family, ids):
    model = model_of(family)
    for states, weights in states_of(model, ids):
        layer = model.model.layers[states.layer].self_attn
        assert states.output_projection is layer.o_proj.weight
        found = attention_rows(states, 3, N_TOKENS)
        torch.testing.assert_close(found.flatten(1, 2), weights[:, :, 3:], atol=1e-5, rtol=0)


def test_caps_and_sinks_matter_here(ids):
    """Or the test above would prove nothing of them."""
    capped, plain = (states_of(model_of(one), ids)[0][0] for one in ("gemma2", "llama"))
    assert capped.softcap == 1.5
    assert plain.softcap is None
    assert plain.sink_logits is None
    sinks, weights = states_of(model_of("gpt-oss"), ids)[0]
    assert sinks.sink_logits.shape == (4,)
    assert weights.sum(dim=-1).min() < 0.9


@pytest.mark.parametrize("family", [*FAMILIES, *UNUSUAL, *LAST_UNROTATED])
def test_a_rotation_turns_queries_back(family):
    """The same token everywhere: turned back, its queries are the same at every position.

    Each layer sees the output of the layer before at a single position: sinks give each another.
    """
    model, queries = model_of(family), {}

    def note(states, compute):
        queries[states.layer] = states.queries, states.rotation
        return torch.zeros_like(states.queries.transpose(1, 2)), None

    with torch.no_grad(), intercept_attention(model, note):
        model(torch.full((1, N_TOKENS), 7))
    assert len(queries) == 2
    for layer, (turned, rotation) in queries.items():
        back = rotate(turned, -torch.arange(N_TOKENS), rotation)
        moved = (turned[:, :, 1:] - turned[:, :, :1]).abs().max() > 0.01
        assert moved == (layer == 0 or family not in LAST_UNROTATED)
        assert moved == (rotation != NO_ROTATION)
        torch.testing.assert_close(back, back[:, :, :1].expand_as(back), atol=1e-4, rtol=1e-4)


OWN = """
class Own(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, *args, **kwargs):
        cos, sin = position_embeddings
        angles = torch.atan2(sin, cos) * {factor}
        return super().forward(hidden_states, (angles.cos(), angles.sin()), *args, **kwargs)
"""


@pytest.mark.parametrize("factor", [1.0, -1.0, 2.0])
def test_a_layer_is_judged_by_what_it_computes(factor):
    """Its source cannot be read, and nothing in it is named as in transformers."""
    model = model_of("llama")
    names = {"LlamaAttention": type(model.model.layers[0].self_attn), "torch": torch}
    exec(OWN.format(factor=factor), names)
    for layer in model.model.layers:
        layer.self_attn.__class__ = names["Own"]
    for rotation in probe_of(model).rotations.values():
        rates = rotation.frequencies
        assert (rates is model.model.rotary_emb.inv_freq) == (abs(factor) == 1.0)
        assert (rotation.first.start > rotation.second.start) == (factor < 0)
        torch.testing.assert_close(rates, abs(factor) * model.model.rotary_emb.inv_freq)


def test_angles_that_do_not_grow_with_the_position_are_no_rotation():
    """An angle of more than half a turn is negative, and half as much again is another place."""
    model = model_of("llama")
    names = {"LlamaAttention": type(model.model.layers[0].self_attn), "torch": torch}
    exec(OWN.format(factor=1.5), names)
    model.model.layers[1].self_attn.__class__ = names["Own"]
    assert not probe_of(model).knows_rotations
    said = "queries and keys of Own change with the position, and not by one rotation"
    assert probe_of(model).rotations[1].fixed == said


@pytest.mark.parametrize("norm", ["query_layernorm", "key_layernorm"])
@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 1.0), (torch.bfloat16, 0.08)])
def test_what_happens_after_the_rotation_counts(norm, dtype, spread):
    """HunYuan scales queries, and keys, dimension by dimension after it, each by its factor.

    Factors that are close to each other are told from the rounding to 16 bits.
    """
    model = model_of("hunyuan").to(dtype)
    weight = getattr(model.model.layers[1].self_attn, norm).weight
    torch.nn.init.normal_(weight, 1.0, spread)
    states = states_of(model, torch.full((1, N_TOKENS), 7))[1][0]
    assert states.rotation.scales[norm == "key_layernorm"]() is weight
    for keys, turned in enumerate((states.queries, states.keys)):
        back = rotate(turned, -torch.arange(N_TOKENS), states.rotation, keys=bool(keys))
        rounding = 100 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.02
        at_zero = back[:, :, :1].expand_as(back)
        assert (back - at_zero).norm() < rounding * at_zero.norm()
    setattr(model.model.layers[1].self_attn, norm, families.Factor(weight))
    assert "change with the position, and not by one rotation" in probe_of(model).rotations[1].fixed


def fails(model):
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(3, 3))


def has_no_weights(model):
    model.to("meta")


def has_no_numbers(model):
    for part in ("q_proj", "k_proj"):
        torch.nn.init.zeros_(getattr(model.model.layers[0].self_attn, part).weight)


def is_compiled(model):
    model.model.layers[0].compile()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (fails, "it raises RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (has_no_weights, "it raises"),
        (is_compiled, "a layer of this model is compiled by itself"),
    ],
)
def test_a_model_that_does_not_run_over_a_few_tokens_is_refused(change, said):
    model = model_of("llama")
    change(model)
    with pytest.raises((UnsupportedModelError, UnsupportedRequestError), match=said) as caught:
        probe_of(model)
    assert "\n" not in str(caught.value)


def test_a_layer_that_shows_nothing_is_not_taken_for_a_plain_one():
    model, said = model_of("llama"), "a probe finds zeros"
    has_no_numbers(model)
    found = probe_of(model).rotations[0]
    assert found.fixed.startswith("it is not known when LlamaAttention rotates its queries: ")
    assert said in found.fixed
    states = make_states(rotation=found)
    with pytest.raises(UnsupportedModelError, match=f"expected_attention .*{said}.*snapkv"):
        ExpectedAttention().score(states, sinks=0)


def test_of_a_layer_that_does_not_attend_nothing_is_known():
    """As a convolution does not, which is no reason to fit no values to other layers."""
    model = model_of("llama")
    attention = model.model.layers[0].self_attn
    attention.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    assert [*probe_of(model).rotations] == [1]
    assert probe_of(model).knows_rotations


@pytest.mark.parametrize("change", [fails, has_no_numbers])
def test_what_came_right_since_is_probed_again(change):
    model = model_of("llama")
    layer = model.model.layers[0]
    parts = layer.mlp.down_proj, layer.self_attn.q_proj, layer.self_attn.k_proj
    weights = [own.weight.clone() for own in parts]
    change(model)
    with contextlib.suppress(UnsupportedModelError):
        assert not probe_of(model).knows_rotations
    layer.mlp.down_proj.weight = torch.nn.Parameter(weights[0])
    with torch.no_grad():
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            part.weight.copy_(weight)
    assert probe_of(model).knows_rotations


@pytest.mark.parametrize("kept", [True, False])
def test_a_rotary_module_that_was_replaced_is_not_asked(kept):
    model, other = model_of("llama"), model_of("llama")
    before = model.model.rotary_emb
    assert probe_of(model).knows_rotations
    other.model.rotary_emb.inv_freq **= 2
    model.model.rotary_emb = other.model.rotary_emb
    if not kept:
        del before
    assert torch.equal(probe_of(model).rotations[0].frequencies, other.model.rotary_emb.inv_freq)


def test_a_hook_of_the_users_that_fails_is_said():
    model = model_of("llama")

    def reads_one_row(module, args):
        assert len(args[0]) == 1, "one row"

    handle = model.model.layers[1].register_forward_pre_hook(reads_one_row)
    with pytest.raises(UnsupportedModelError, match="does not run over a few tokens.*one row"):
        probe_of(model)
    handle.remove()
    assert probe_of(model).knows_rotations


def test_a_model_that_makes_its_own_positions_shows_nothing():
    """Its queries are the same at all positions of a probe, and still are rotated in a text."""
    model = model_of("llama")
    rotary = model.model.rotary_emb
    rotary.forward = lambda states, position_ids: type(rotary).forward(
        rotary, states, torch.arange(states.shape[1])[None]
    )
    why = "the queries of LlamaModel are the same at all positions of a probe"
    assert probe_of(model).rotations[0].fixed == why
    assert not probe_of(model).moves_queries


def test_slow_pairs_that_carry_the_queries_do_not_hide_fast_ones():
    model = model_of("qwen2 with slow pairs")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.view(4, 8)[:, [3, 7]] = 2000.0
    assert probe_of(model).knows_rotations


def test_a_context_of_one_position_shows_nothing():
    assert "a single position" in probe_of(model_of("llama of one position")).rotations[0].fixed


def contents(model):
    """Return all that each module carries: values of attributes, numbers of buffers, hooks."""
    found = {}
    for name, part in model.named_modules():
        for key, value in vars(part).items():
            copied = isinstance(value, dict | list | set | torch.Tensor)
            found[name, key] = copy.copy(value) if copied else value
        found |= {(name, key): own.clone() for key, own in part.named_buffers(recurse=False)}
    return found


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize(
    ("family", "training", "checkpointing"),
    [
        ("llama", False, False),
        ("llama dynamic", False, False),
        ("phi3 with dropout", True, False),
        ("phi3 with dropout", True, True),
    ],
)
def test_a_probe_leaves_nothing_behind(family, training, checkpointing):
    model = model_of(family).train(training)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before, state = contents(model), torch.get_rng_state()
    assert probe_of(model).knows_rotations
    assert torch.equal(torch.get_rng_state(), state)
    after = contents(model)
    assert after.keys() == before.keys()
    for key, value in after.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[key])
        elif isinstance(value, dict):
            assert [*map(id, value.values())] == [*map(id, before[key].values())]
        else:
            assert value is before[key] or value == before[key]


@pytest.mark.parametrize("family", ["llama dynamic", "phi3 longrope"])
def test_frequencies_are_those_of_the_text_that_runs(family):
    model = model_of(family)
    short, _ = states_of(model, torch.full((1, 8), 7))[0]
    first = short.rotation.frequencies.clone()
    long, _ = states_of(model, torch.full((1, 150), 7))[0]
    assert not torch.equal(first, long.rotation.frequencies)
    assert long.rotation == probe_of(model).rotations[0]


def test_a_probe_keeps_no_model_alive_and_goes_into_no_copy():
    model = model_of("llama")
    assert probe_of(model).knows_rotations
    assert b"kvalloc" not in pickle.dumps(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.rotary_emb.inv_freq *= 2
    assert probe_of(other).rotations[0].frequencies is other.model.rotary_emb.inv_freq
    gone = weakref.ref(model.model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_enough(dtype):
    for family in (*FAMILIES, *UNUSUAL, *LAST_UNROTATED):
        single, half = model_of(family), model_of(family).to(dtype)
        for layer, rotation in probe_of(single).rotations.items():
            found = probe_of(half).rotations[layer]
            assert (found.first, found.second) == (rotation.first, rotation.second)
            rates = rotation.frequencies
            torch.testing.assert_close(found.frequencies.float(), rates, atol=1e-5, rtol=1e-2)


def test_a_model_is_probed_within_its_own_forward_and_beside_it(ids):
    """Frequencies may be asked for in an attention call, or while another thread runs a forward."""
    model = model_of("llama")
    with torch.no_grad():
        expected = model(ids).logits

    def ask(states, compute):
        attention._probes.pop(model.model)
        assert probe_of(model).knows_rotations
        return compute(states.mask)

    with torch.no_grad(), intercept_attention(model, ask):
        assert torch.equal(model(ids).logits, expected)
    answers = []

    def run():
        with torch.no_grad():
            answers.extend(model(ids).logits for _ in range(20))

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        attention._probes.pop(model.model, None)
        assert probe_of(model).knows_rotations
    assert len(answers) == 20
    assert all(torch.equal(answer, expected) for answer in answers)


@pytest.mark.filterwarnings("ignore:.*quant.*")
def test_quantized_layers_are_probed_and_show_their_output_projection(ids):
    """`quantize_dynamic` makes the weight a method; its numbers are those that the layer uses."""
    model = model_of("llama")
    plain = states_of(model, ids)[0][0]
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert probe_of(quantized).knows_rotations
    states = states_of(quantized, ids)[0][0]
    assert callable(states.output_projection)
    weight = states.output_projection().dequantize()
    found = projected_value_norms(states)
    expected = projected_value_norms(replace(states, output_projection=weight))
    torch.testing.assert_close(found, expected)
    near = projected_value_norms(replace(states, output_projection=plain.output_projection))
    torch.testing.assert_close(found, near, atol=0.0, rtol=0.05)
