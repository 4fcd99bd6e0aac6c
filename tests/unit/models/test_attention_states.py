"""What the attention door hands over is what the model computes with, whatever the family."""

from dataclasses import replace

import pytest
from scorer_oracle import make_states

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvalloc.errors import ModelMismatchError, UnsupportedModelError  # noqa: E402
from kvalloc.models.attention import intercept_attention  # noqa: E402
from kvalloc.models.loading import shape_of  # noqa: E402
from kvalloc.models.rope import layer_frequencies, rotate  # noqa: E402
from kvalloc.models.structure import weights_digest  # noqa: E402
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
}
UNUSUAL = {
    "Afmoe": {"layer_types": KINDS[::-1], "num_dense_layers": 2},
    "Exaone4": {"layer_types": KINDS[::-1]},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Cohere": {},
}
"""Which do not rotate the queries of all layers, or rotate neighbours."""
N_TOKENS = 12


def model_of(family, attention="eager"):
    name, more = FAMILIES.get(family) or (family, UNUSUAL[family])
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    config = getattr(transformers, config_name)(**{**SIZES, **more})
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


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt-oss"}))
def test_frequencies_turn_queries_back(family):
    """The same token everywhere: turned back, its queries are the same at every position."""
    same = torch.full((1, N_TOKENS), 7)
    for states, _ in states_of(model_of(family), same):
        back = rotate(states.queries, -torch.arange(N_TOKENS), states.frequencies)
        assert (states.queries[:, :, 1:] - states.queries[:, :, :1]).abs().max() > 0.01
        torch.testing.assert_close(back, back[:, :, :1].expand_as(back), atol=1e-4, rtol=1e-4)


def test_models_that_turn_neighbours_give_no_frequencies(ids):
    found = states_of(model_of("Cohere"), ids)[0][0].frequencies
    assert found == "CohereAttention does not rotate halves of its queries"


@pytest.mark.parametrize("family", ["Afmoe", "Exaone4", "SmolLM3"])
def test_layers_that_do_not_turn_their_queries_give_no_frequencies(family):
    """The same token everywhere: where its queries are the same as they are, nothing is turned."""
    found = states_of(model_of(family), torch.full((1, N_TOKENS), 7))
    assert len(found) == 2
    for (states, _), turned in zip(found, (True, False), strict=True):
        moved = (states.queries[:, :, 1:] - states.queries[:, :, :1]).abs().max()
        assert (moved > 0.01) == turned == isinstance(states.frequencies, torch.Tensor)


def only_sometimes(self, hidden_states, position_embeddings, mask):
    if hidden_states.shape[1] > 2:
        apply_rotary_pos_emb(hidden_states, hidden_states, *position_embeddings)  # noqa: F821


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (eval("lambda self, *args, **kwargs: None"), "cannot be read"),
        (only_sometimes, "does not show it"),
        (lambda self: None, "does not show it"),
    ],
    ids=["no source", "a condition of its own", "no rotation"],
)
def test_a_layer_whose_source_shows_nothing_is_not_taken_for_a_plain_one(forward, said):
    model = model_of("llama")
    layer, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    assert isinstance(layer_frequencies(layer, rotary), torch.Tensor)
    kind = type(layer)
    layer.__class__ = type("Hidden", (kind,), {"forward": forward, "__module__": kind.__module__})
    found = layer_frequencies(layer, rotary)
    said = f"not known when Hidden does so: the source of its forward {said}"
    assert said in found
    states = make_states(frequencies=found)
    with pytest.raises(UnsupportedModelError, match=f"expected_attention .*{said}.*snapkv"):
        ExpectedAttention().score(states, sinks=0)


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
