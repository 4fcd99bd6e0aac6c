"""What the attention door hands over is what the model computes with, whatever the family."""

import copy
import gc
import pickle
import threading
import weakref
from dataclasses import replace

import pytest
from scorer_oracle import make_states

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvalloc.errors import ModelMismatchError, UnsupportedModelError  # noqa: E402
from kvalloc.models import attention  # noqa: E402
from kvalloc.models.attention import (  # noqa: E402
    intercept_attention,
    rotary_frequencies,
    rotates_halves,
)
from kvalloc.models.loading import shape_of  # noqa: E402
from kvalloc.models.rope import rotate  # noqa: E402
from kvalloc.models.weights import weights_digest  # noqa: E402
from kvalloc.scorers.attention_rows import attention_rows  # noqa: E402
from kvalloc.scorers.expected_attention import ExpectedAttention  # noqa: E402
from kvalloc.scorers.projected_values import projected_value_norms  # noqa: E402

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
KINDS = ["full_attention", "sliding_attention"]
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", {}),
    "phi3, half rotated": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "gemma3": ("Gemma3", {"layer_types": KINDS, "sliding_window": 16}),
    "gemma2": ("Gemma2", {"attn_logit_softcapping": 1.5, "layer_types": KINDS}),
    "gpt-oss": (
        "GptOss",
        {"layer_types": KINDS, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "olmo3": ("Olmo3", {"layer_types": KINDS, "sliding_window": 16}),
    "hunyuan": ("HunYuanDenseV1", {}),
}
UNUSUAL = {
    "Afmoe": {"layer_types": KINDS[::-1], "num_dense_layers": 2},
    "Exaone4": {"layer_types": KINDS[::-1]},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Cohere2": {"layer_types": KINDS[::-1]},
    "Llama4": {"no_rope_layers": [1, 0], "num_local_experts": 2, "intermediate_size_mlp": 48},
    "Cohere": {},
    "Glm": {},
}
"""Which do not rotate the queries of all layers, or rotate neighbours."""
DROPOUT = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attention_dropout": 0.3}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "plain": ("Llama", {}),
    "dynamic": ("Llama", {"max_position_embeddings": 128, "rope_parameters": DYNAMIC}),
    "longrope": (
        "Phi3",
        {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONG,
        },
    ),
    "training": ("Phi3", DROPOUT),
    "checkpointing": ("Phi3", DROPOUT),
}
N_TOKENS = 12


def model_of(family, attention="eager"):
    name, more = VARIANTS.get(family) or FAMILIES.get(family) or (family, UNUSUAL[family])
    part = "Text" if name in ("Gemma3", "Llama4") else ""
    config = getattr(transformers, f"{name}{part}Config")(**{**SIZES, **more})
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model = model_class._from_config(config, attn_implementation=attention).eval()
    for key, weight in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(weight, std=2.0)
    return model


def states_of(model, ids):
    """What each layer's attention sees, and the weights that it answers with."""
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


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_turn_queries_back(family):
    """The same token everywhere: turned back, its queries are the same at every position.

    Each layer sees the output of the layer before at a single position: sinks give each another.
    """
    model, queries = model_of(family), {}

    def note(states, compute):
        queries[states.layer] = states.queries, states.frequencies
        return torch.zeros_like(states.queries.transpose(1, 2)), None

    with torch.no_grad(), intercept_attention(model, note):
        model(torch.full((1, N_TOKENS), 7))
    assert len(queries) == 2
    for turned, frequencies in queries.values():
        back = rotate(turned, -torch.arange(N_TOKENS), frequencies)
        assert (turned[:, :, 1:] - turned[:, :, :1]).abs().max() > 0.01
        torch.testing.assert_close(back, back[:, :, :1].expand_as(back), atol=1e-4, rtol=1e-4)


def test_each_kind_of_layer_has_frequencies_of_its_own():
    full, sliding = rotary_frequencies(model_of("gemma3"))
    assert not torch.equal(full, sliding)


@pytest.mark.parametrize("family", ["Cohere", "Glm"])
def test_models_that_turn_neighbours_give_no_frequencies(family, ids):
    found = states_of(model_of(family), ids)[0][0].frequencies
    assert found.startswith(f"{family}Attention does not rotate halves of its queries")


@pytest.mark.parametrize("family", ["Afmoe", "Exaone4", "SmolLM3", "Cohere2", "Llama4"])
def test_layers_that_do_not_turn_their_queries_give_no_frequencies(family):
    """The same token everywhere: where its queries are the same as they are, nothing is turned."""
    found = states_of(model_of(family), torch.full((1, N_TOKENS), 7))
    assert len(found) == 2
    neighbours = family in ("Cohere2", "Llama4")
    for (states, _), turned in zip(found, (True, False), strict=True):
        moved = (states.queries[:, :, 1:] - states.queries[:, :, :1]).abs().max()
        assert (moved > 0.01) == turned
        assert (turned and not neighbours) == isinstance(states.frequencies, torch.Tensor)
    assert "does not rotate its queries" in states.frequencies


OWN = """
class Own(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, *args, **kwargs):
        cos, sin = position_embeddings
        angles = torch.atan2(sin, cos) * {factor}
        return super().forward(hidden_states, (angles.cos(), angles.sin()), *args, **kwargs)
"""


@pytest.mark.parametrize(("factor", "recognised"), [(1.0, True), (-1.0, False), (1.5, False)])
def test_a_layer_is_judged_by_what_it_computes(factor, recognised):
    """Its source cannot be read, and nothing in it is named as in transformers."""
    model = model_of("llama")
    names = {"LlamaAttention": type(model.model.layers[0].self_attn), "torch": torch}
    exec(OWN.format(factor=factor), names)
    for layer in model.model.layers:
        layer.self_attn.__class__ = names["Own"]
    found = rotary_frequencies(model)
    assert rotates_halves(model) == recognised
    if recognised:
        assert all(one is model.model.rotary_emb.inv_freq for one in found)
    else:
        assert all(one.startswith("Own does not rotate halves of its queries") for one in found)


def test_what_happens_after_the_rotation_counts():
    """HunYuan scales rotated queries dimension by dimension, in each half by another factor."""
    model = model_of("hunyuan")
    assert rotates_halves(model)
    scaled = model_of("hunyuan")
    torch.nn.init.normal_(scaled.model.layers[1].self_attn.query_layernorm.weight)
    assert "does not rotate halves" in rotary_frequencies(scaled)[1]


def fails(model):
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(3, 3))


def asks_nothing(model):
    model.model.layers[0].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)


def has_no_weights(model):
    model.to("meta")


def has_no_numbers(model):
    torch.nn.init.zeros_(model.model.layers[0].self_attn.q_proj.weight)


def is_compiled(model):
    model.model.layers[0].compile()


@pytest.mark.filterwarnings("ignore:it is not known how")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (fails, "a probe raises RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (asks_nothing, "a probe calls no attention of it"),
        (has_no_weights, "a probe raises"),
        (has_no_numbers, "a probe finds zeros"),
        (is_compiled, "its layers are compiled"),
    ],
)
def test_a_layer_that_cannot_be_probed_is_not_taken_for_a_plain_one(change, said):
    model = model_of("llama")
    change(model)
    found = rotary_frequencies(model)[0]
    assert found.startswith("it is not known when LlamaAttention rotates its queries: ")
    assert said in found
    assert "\n" not in found
    states = make_states(frequencies=found)
    with pytest.raises(UnsupportedModelError, match=f"expected_attention .*{said}.*snapkv"):
        ExpectedAttention().score(states, sinks=0)


@pytest.mark.filterwarnings("ignore:it is not known how")
def test_a_probe_that_failed_is_tried_again():
    model = model_of("llama")
    projection = model.model.layers[1].mlp.down_proj
    weight = projection.weight
    fails(model)
    assert not rotates_halves(model)
    projection.weight = weight
    assert rotates_halves(model)


def test_a_verdict_of_training_is_no_verdict_of_evaluation():
    model = model_of("training").train()
    said = "Phi3Attention in training mode does not rotate halves of its queries"
    assert rotary_frequencies(model)[-1].startswith(said)
    assert rotates_halves(model.eval())


def test_weights_that_come_later_are_probed_again():
    model = model_of("llama")
    projection = model.model.layers[0].self_attn.q_proj.weight
    weights = projection.detach().clone()
    torch.nn.init.zeros_(projection)
    assert not rotates_halves(model)
    with torch.no_grad():
        projection.copy_(weights)
    assert rotates_halves(model)


@pytest.mark.parametrize("kept", [True, False])
def test_a_rotary_module_that_was_replaced_is_not_asked(kept):
    model, other = model_of("llama"), model_of("llama")
    before = model.model.rotary_emb
    assert rotates_halves(model)
    other.model.rotary_emb.inv_freq **= 2
    model.model.rotary_emb = other.model.rotary_emb
    if not kept:
        del before
    assert torch.equal(rotary_frequencies(model)[0], other.model.rotary_emb.inv_freq)


def test_a_hook_of_the_users_that_fails_in_a_probe_is_said():
    model = model_of("llama")

    def reads_one_row(module, args):
        assert len(args[0]) == 1, "one row"

    handle = model.model.layers[1].register_forward_pre_hook(reads_one_row)
    with pytest.warns(UserWarning, match="not known how LlamaModel rotates.*one row"):
        assert not rotates_halves(model)
    handle.remove()
    assert rotates_halves(model)


def test_slow_pairs_that_carry_the_queries_do_not_hide_fast_ones():
    slow = {"rope_type": "default", "rope_theta": 1e6}
    config = transformers.Qwen2Config(**{**SIZES, "rope_parameters": slow})
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.view(4, 8)[:, [3, 7]] = 2000.0
    assert rotates_halves(model)


def test_a_context_of_one_position_shows_nothing():
    config = transformers.LlamaConfig(**{**SIZES, "max_position_embeddings": 1})
    with pytest.warns(UserWarning, match="single position"):
        assert not rotates_halves(transformers.LlamaForCausalLM(config))


def contents(model):
    """What each module carries: values of attributes, numbers of buffers, hooks."""
    found = {}
    for name, part in model.named_modules():
        for key, value in vars(part).items():
            copied = isinstance(value, dict | list | set | torch.Tensor)
            found[name, key] = copy.copy(value) if copied else value
        found |= {(name, key): own.clone() for key, own in part.named_buffers(recurse=False)}
    return found


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("variant", ["plain", "dynamic", "training", "checkpointing"])
def test_a_probe_leaves_nothing_behind(variant):
    model = model_of(variant)
    training = variant in ("training", "checkpointing")
    model.train(training)
    if variant == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before, state = contents(model), torch.get_rng_state()
    assert rotates_halves(model) is not training
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
    assert rotates_halves(model.eval())


@pytest.mark.parametrize("variant", ["dynamic", "longrope"])
def test_frequencies_are_those_of_the_text_that_runs(variant):
    model = model_of(variant)
    short, _ = states_of(model, torch.full((1, 8), 7))[0]
    first = short.frequencies.clone()
    long, _ = states_of(model, torch.full((1, 150), 7))[0]
    assert not torch.equal(first, long.frequencies)
    assert long.frequencies is rotary_frequencies(model)[0]


def test_a_probe_keeps_no_model_alive_and_goes_into_no_copy():
    model = model_of("llama")
    assert rotates_halves(model)
    assert b"kvalloc" not in pickle.dumps(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.rotary_emb.inv_freq *= 2
    assert rotary_frequencies(other)[0] is other.model.rotary_emb.inv_freq
    gone = weakref.ref(model.model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_enough(dtype):
    for family in FAMILIES:
        assert rotates_halves(model_of(family).to(dtype))
    for family in UNUSUAL:
        assert not rotates_halves(model_of(family).to(dtype))


def test_a_model_is_probed_within_its_own_forward_and_beside_it(ids):
    """Frequencies may be asked for in an attention call, or while another thread runs a forward."""
    model = model_of("llama")
    with torch.no_grad():
        expected = model(ids).logits

    def ask(states, compute):
        attention._probes.pop(model.model)
        assert rotates_halves(model)
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
        assert rotates_halves(model)
    assert len(answers) == 20
    assert all(torch.equal(answer, expected) for answer in answers)


def test_a_model_whose_weights_are_elsewhere_is_probed(tmp_path, ids):
    accelerate = pytest.importorskip("accelerate")
    model = model_of("gpt-oss")
    with torch.no_grad():
        expected = model(ids).logits
        model = accelerate.disk_offload(model, tmp_path, "cpu", offload_buffers=True)
        assert rotates_halves(model)
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.filterwarnings("ignore:.*quant.*")
def test_quantized_layers_are_probed():
    quantized = torch.ao.quantization.quantize_dynamic(model_of("llama"), {torch.nn.Linear})
    assert rotates_halves(quantized)


@pytest.mark.filterwarnings("ignore:.*quant.*")
def test_quantized_layers_show_their_output_projection(ids):
    """`quantize_dynamic` makes the weight a method; its numbers are those that the layer uses."""
    model = model_of("llama")
    plain = states_of(model, ids)[0][0]
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    states = states_of(quantized, ids)[0][0]
    assert callable(states.output_projection)
    weight = states.output_projection().dequantize()
    found = projected_value_norms(states)
    expected = projected_value_norms(replace(states, output_projection=weight))
    torch.testing.assert_close(found, expected)
    near = projected_value_norms(replace(states, output_projection=plain.output_projection))
    torch.testing.assert_close(found, near, atol=0.0, rtol=0.05)


@pytest.mark.filterwarnings("ignore:.*quant.*")
def test_quantized_weights_are_not_taken_for_another_models():
    """A profile of the model fits it, by its name, and a digest of what it computes with differs.

    Their linear layers have no parameters any more: the embedding alone looked like others.
    """
    model = model_of("llama")
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    shape, found = shape_of(model), shape_of(quantized)
    shape.require_same_model(found)
    with pytest.raises(ModelMismatchError, match="the model is another"):
        shape.require_same_model(replace(found, model_id="another"))
    digest = weights_digest(quantized)
    quantized.model.layers[0].mlp.up_proj = quantized.model.layers[1].mlp.up_proj
    assert weights_digest(quantized) != digest != weights_digest(model)
