"""Which weights a model has: files of other weights are never taken, those of the same always."""

import copy
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from prompt_runs import run
from runtime_oracle import make_profile, prompt
from runtime_oracle import tiny_model as oracle_model
from tiny_models import tiny_model
from torch import nn

import kvalloc
from kvalloc.errors import ModelMismatchError
from kvalloc.formats.fitted import FittedModel
from kvalloc.formats.shipped_profiles import fitted_file
from kvalloc.models import weights
from kvalloc.models.loading import shape_of
from kvalloc.models.structure import decoder_of
from kvalloc.models.weights import known_weights, weights_digest

TOKENS = 96
random = partial(tiny_model, attention="eager")


def digests(model):
    """The digest of fitted files and profiles, and that of saved caches."""
    return known_weights(model), weights_digest(decoder_of(model))


def saved(model, path):
    profile = make_profile(model, TOKENS, 0.5)
    cache = kvalloc.make_cache(model, profile, allow_other_model=True)
    run(model, prompt(TOKENS), cache)
    kvalloc.save_cache(cache, path)


# What changes a forward


class Stored(nn.Module):
    """A layer whose weight is a buffer, as BitLinear's."""

    def __init__(self, layer):
        super().__init__()
        self.register_buffer("weight", layer.weight.detach().clone())

    def forward(self, states):
        return nn.functional.linear(states, self.weight)


def middle_weight(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.01)


def stored_weight(model):
    model.model.layers[1].mlp.up_proj = Stored(model.model.layers[1].mlp.up_proj)
    before = digests(model)
    model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    assert digests(model)[0] != before[0]


def expert(model):
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[1].mul_(1.01)


def written_epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


CHANGES = [middle_weight, stored_weight, expert, written_epsilon, frequencies]
FIELDS = [
    ("llama", {"rms_norm_eps": 1e-2}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ("gemma3", {"query_pre_attn_scalar": 64}),
    ("gemma3", {"attn_logit_softcapping": 30.0}),
    ("gemma3", {"final_logit_softcapping": 30.0}),
    ("gpt-oss", {"num_experts_per_tok": 1}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_another_weight_of_any_layer_is_another_model(change):
    made = "gpt-oss" if change is expert else "llama"
    model, twin = random(made), random(made)
    before = digests(model)
    assert before == digests(twin)
    change(model)
    assert all(one != other for one, other in zip(digests(model), before, strict=True))
    with pytest.raises(ModelMismatchError, match="has other weights"):
        shape_of(twin).require_same_model(shape_of(model))


@pytest.mark.parametrize(("family", "field"), FIELDS)
def test_a_config_that_changes_a_forward_is_another_model(family, field):
    one, other = digests(random(family)), digests(random(family, **field))
    assert one[0] != other[0]
    assert one[1] != other[1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_another_type_or_place_is_the_same_model(family):
    plain, twin = random(family), random(family, attention_dropout=0.1)
    twin.config.eos_token_id, twin.name_or_path = 5, "elsewhere"
    assert digests(twin) == digests(plain)
    compiled = copy.deepcopy(plain)
    compiled.model.layers[1] = torch.compile(compiled.model.layers[1], backend="eager")
    assert digests(compiled) == digests(plain)
    linked = copy.deepcopy(plain)  # as kvpress leaves a model
    for layer in linked.model.layers:
        layer.self_attn.rotary_emb = linked.model.rotary_emb
    assert digests(linked) == digests(plain)
    for dtype in (torch.bfloat16, torch.float16):
        cast, other = copy.deepcopy(plain).to(dtype), random(family, seed=1).to(dtype)
        assert shape_of(plain).has_weights_of(shape_of(cast)) is True
        assert shape_of(plain).has_weights_of(shape_of(other)) is False
        assert digests(cast)[1] != digests(plain)[1]  # their entries have another type


def test_frequencies_that_follow_the_length_read_change_nothing():
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny_model(max_position_embeddings=32, rope_parameters=scaled)
    before = digests(model)
    model(prompt(TOKENS))
    assert digests(model) == before


# Adapters


def adapted(model=None, **settings):
    from peft import LoraConfig, get_peft_model

    settings |= {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(1)
    wrapped = get_peft_model(model or tiny_model(), lora, adapter_name="a").eval()
    wrapped.add_adapter("b", lora)
    return wrapped


def test_adapters_count_as_they_are_set(tmp_path):
    base, file = tiny_model(), tmp_path / "a.kv"
    plain, model = digests(base), adapted(layers_to_transform=[1])
    inner = model.get_base_model()
    saved(inner, file)
    by_a = digests(model)
    assert digests(inner) == by_a
    assert kvalloc.load_cache(file, model).get_seq_length() == TOKENS
    with model.disable_adapter():
        assert digests(model) == plain
        with pytest.raises(ModelMismatchError, match="other weights"):
            kvalloc.load_cache(file, model)
    model.set_adapter("b")
    found = [plain, by_a, digests(model)]
    with pytest.raises(ModelMismatchError, match="other weights"):
        kvalloc.load_cache(file, model)
    model.set_adapter("a")
    assert digests(model) == by_a
    inner.model.layers[1].self_attn.q_proj.set_scale("a", 3.0)
    found.append(digests(model))
    model.merge_adapter()
    found.append(digests(model))
    for each in zip(*found, strict=True):
        assert len({*each}) == len(found)
    assert digests(model.merge_and_unload()) == found[-1]


# Offloaded weights


def on_cpu(model, folder):
    import accelerate

    return accelerate.cpu_offload(model, "cpu")


def on_disk(model, folder):
    import accelerate

    return accelerate.disk_offload(model, folder / "disk", "cpu", offload_buffers=True)


def partly_on_disk(model, folder):
    model.save_pretrained(folder / "model")
    names = [*(f"model.{name}" for name in ("embed_tokens", "norm", "rotary_emb")), "lm_head"]
    places = dict.fromkeys([*names, "model.layers.0", "model.layers.2"], "cpu")
    places["model.layers.1"] = "disk"
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=folder / "disk"
    )


@pytest.mark.parametrize("offloaded", [on_cpu, on_disk, partly_on_disk])
def test_offloaded_weights_are_those_of_the_model(tmp_path, offloaded, monkeypatch):
    plain, model = tiny_model(), offloaded(tiny_model(), tmp_path)
    assert digests(model) == digests(plain)
    assert digests(offloaded(tiny_model(seed=1), tmp_path / "other")) != digests(plain)
    saved(model, tmp_path / "c.kv")
    for one in (model, plain):
        loaded = kvalloc.load_cache(tmp_path / "c.kv", one)
        expected = run(plain, prompt(5), kvalloc.load_cache(tmp_path / "c.kv", plain))
        assert torch.equal(run(one, prompt(5), loaded), expected)
    monkeypatch.setattr(weights, "_digests", None)  # not read again after a forward
    assert known_weights(model) == known_weights(plain)


# Quantized forms


class Packed(torch.Tensor):
    """A weight of int8 with scales, as torchao's, that no operation but a linear layer knows."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.scales = weight.detach().abs().amax(1, keepdim=True) / 127
        self.numbers = (weight.detach() / self.scales).round().to(torch.int8)

    def __tensor_flatten__(self):
        return ["numbers", "scales"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            args = args[0], args[1].numbers * args[1].scales, *args[2:]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


def packed(model):
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Packed(module.weight), requires_grad=False)
    return model


def dynamic(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


@pytest.mark.parametrize("quantized", [packed, dynamic])
def test_a_quantized_form_is_a_model_of_its_own(tmp_path, quantized):
    plain, model, other = (quantized(tiny_model(seed=seed)) for seed in (0, 0, 1))
    assert digests(plain) == digests(model)
    assert len(known_weights(model)) == 1
    assert shape_of(other).has_weights_of(shape_of(model)) is False
    assert shape_of(tiny_model()).has_weights_of(shape_of(model)) is None  # its name decides
    with kvalloc.apply(model, budget="50%"):
        kvalloc.save_cache(model(prompt(TOKENS)).past_key_values, tmp_path / "c.kv")
    assert kvalloc.load_cache(tmp_path / "c.kv", plain).get_seq_length() == TOKENS
    for one in (other, tiny_model()):
        with pytest.raises(ModelMismatchError, match="other weights"):
            kvalloc.load_cache(tmp_path / "c.kv", one)


# Which file is taken


FITTED = Path(__file__).parents[2] / "golden" / "data" / "version_1" / "fitted.safetensors"


def detail(model, **options):
    """The line of detail and the rest, which is logged."""
    with (
        patch("kvalloc.online.default._LOG") as log,
        kvalloc.apply(model, budget="25%", **options),
    ):
        model.generate(prompt(TOKENS), max_new_tokens=2, do_sample=False)
    return "; ".join(str(one) for call in log.mock_calls for one in call.args[1:])


def test_the_file_of_the_same_weights_is_found_and_of_others_is_named(tmp_path, fitted_here):
    fitted, other, stored = oracle_model(), oracle_model(), FittedModel.load(FITTED)
    middle_weight(other)
    shape = shape_of(fitted)
    parts = stored.surrogate.replace(shape=shape), stored.scores.replace(shape=shape)
    file = fitted_file(shape)
    file.parent.mkdir(exist_ok=True)
    FittedModel.of(*parts).save(file)
    assert f"as solved from {file}" in detail(copy.deepcopy(fitted).to(torch.bfloat16))
    assert f"as solved from {file}" in detail(on_cpu(copy.deepcopy(fitted), tmp_path))
    for model in (other, adapted(copy.deepcopy(fitted)), dynamic(copy.deepcopy(fitted))):
        told = detail(model)
        assert "reads the prompt twice" in told
        assert f"{file} was fitted to other weights of the same sizes" in told
        assert f"fitted='{file}' and allow_other_model=True take it" in told
        told = detail(model, fitted=str(file), allow_other_model=True)
        assert f"as solved from {file}" in told
        assert "fitted to other weights" in told
        assert "take it" not in told
    assert "same sizes" not in detail(tiny_model())


def test_weights_are_read_once_and_again_where_they_changed(monkeypatch):
    reads, digest = [], weights._digests
    monkeypatch.setattr(weights, "_digests", lambda parts: reads.append(0) or digest(parts))
    model = adapted()
    detail(model)
    detail(model)
    assert len(reads) == 2  # the decoder and the head
    known, layer = {known_weights(model)}, model.get_base_model().model.layers[1].self_attn
    for change in (
        lambda: middle_weight(model.get_base_model()),
        lambda: layer.o_proj.load_state_dict({"weight": torch.ones_like(layer.o_proj.weight)}),
        lambda: setattr(layer, "o_proj", copy.deepcopy(layer.q_proj)),
        lambda: model.set_adapter("b"),
        lambda: layer.q_proj.scale_layer(2.0),
        model.disable_adapter_layers,
    ):
        change()
        known.add(known_weights(model))
    assert len(known) == 7
