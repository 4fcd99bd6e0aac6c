"""What users of transformers do, one by one: it works with a reduced cache, or is refused by name.

Layers on two devices are in test_several_devices.py, compiled whole models in test_compiled.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import runtime_oracle as tiny
import tokenizers
import torch
import transformers
from prompt_runs import NEW, generate
from torch import nn

import kvalloc
from kvalloc.errors import UnsupportedModelError, UnsupportedRequestError

CONTEXT = 60
TRIED = ("5.2", "5.23")
"""Versions of transformers whose private names `kvalloc.models` uses were tried, first and last."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A word for each number of the vocabulary."""
    words = {"<pad>": 0, "<end>": 1} | {
        f"w{number}": number for number in range(2, tiny.VOCABULARY)
    }
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
    )


@pytest.mark.parametrize("level", ["layer", "head"])
def test_a_pipeline_takes_the_cache(tokenizer: Any, level: str) -> None:
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    profile = tiny.make_profile(model, CONTEXT, 0.4)
    profile = tiny.by_head(profile, 6) if level == "head" else profile
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    cache = kvalloc.make_cache(model, profile)
    answers = pipeline(
        tokenizer.decode(ids[0]),
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        return_full_text=False,
    )
    tokens = tokenizer(answers[0]["generated_text"], return_tensors="pt")["input_ids"]
    expected = generate(model, ids, past_key_values=kvalloc.make_cache(model, profile))
    assert torch.equal(tokens, expected[:, CONTEXT:])
    assert cache.retained_bytes < cache.full_bytes


# Models that are not quite as they were made


class _Adapted(nn.Module):
    """A linear layer with two small ones beside it, as PEFT puts it in the layer's place."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.up(self.down(states))
        return self.base_layer(states) + added


class _Wrapper(nn.Module):
    """A model around another that answers for it, as PEFT's does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


def adapters(folder: Path) -> Any:
    model = tiny.tiny_model()
    for layer in model.model.layers:
        layer.self_attn.q_proj = _Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = _Adapted(layer.self_attn.v_proj)
    return _Wrapper(model)


def peft_lora(folder: Path) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny.tiny_model(), config)


def device_map(folder: Path) -> Any:
    pytest.importorskip("accelerate")
    tiny.tiny_model().save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu").eval()


def quantised_weights(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(tiny.tiny_model(), {nn.Linear})


@pytest.mark.parametrize("made", [adapters, peft_lora, device_map, quantised_weights])
def test_the_model_works(tmp_path: Path, made: Any) -> None:
    """With all entries kept to the bit as without kvalloc, and with fewer it stores fewer."""
    model = made(tmp_path)
    plain = tiny.make_profile(tiny.tiny_model(), CONTEXT, 1.0)
    ids = tiny.prompt(CONTEXT)
    expected = generate(model, ids)
    for profile in (plain, tiny.by_head(tiny.make_profile(tiny.tiny_model(), CONTEXT, 0.4), 6)):
        cache = kvalloc.make_cache(model, profile, allow_other_model=True)
        found = generate(model, ids, past_key_values=cache)
        assert found.shape == expected.shape
        assert profile is not plain or torch.equal(found, expected)
    assert cache.retained_bytes < 0.7 * cache.full_bytes


# What cannot be served


def in_torch_compile(model: Any) -> None:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers[1].compile(backend="eager"),
        lambda model: model.model.layers[1].self_attn.compile(backend="eager"),
        in_torch_compile,
    ],
)
def test_compiled_layers_are_refused(change: Any) -> None:
    """Before the cache is made, before its prompt comes, and after it."""
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    profile = tiny.by_head(tiny.make_profile(model, CONTEXT, 0.4), 6)
    empty, filled = kvalloc.make_cache(model, profile), kvalloc.make_cache(model, profile)
    with torch.no_grad():
        model(ids, past_key_values=filled)
    change(model)
    with pytest.raises(UnsupportedRequestError, match="compile the whole model"):
        kvalloc.make_cache(model, profile)
    with torch.no_grad():
        with pytest.raises(UnsupportedRequestError, match="compile the whole model"):
            model(ids, past_key_values=empty)
        for _ in range(2):  # what was refused was not read
            with pytest.raises(UnsupportedModelError, match="do not compile its layers"):
                model(tiny.prompt(1), past_key_values=filled)
            assert filled.get_seq_length() == CONTEXT


def test_the_private_names_of_transformers_are_those_that_were_tried(model: Any) -> None:
    """`kvalloc.models` uses them, each in one function; another version may have other names."""
    first, last = (tuple(map(int, version.split("."))) for version in TRIED)
    own = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert model.config._attn_implementation == "sdpa"  # models.attention
    assert type(model.model)._supports_attention_backend  # models.attention
    assert model.config._name_or_path == "tiny"  # models.loading
    assert first <= own <= last, f"add {transformers.__version__} to what was tried: all is there"
