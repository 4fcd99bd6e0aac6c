"""What cannot work is refused before anything runs, in a line that says what to do."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, BloomConfig, BloomForCausalLM, CompileConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvalloc
from kvalloc.errors import (
    InputError,
    KVAllocError,
    ModelMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from kvalloc.models.loading import shape_of
from kvalloc.runtime import make_cache

CONTEXT = 60


@pytest.fixture
def model(tiny: ModuleType) -> Any:
    return tiny.tiny_model()


@pytest.fixture
def bloom() -> Any:
    """A model outside the attention interface."""
    return BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=61))


@pytest.fixture
def cache(tiny: ModuleType, model: Any) -> Any:
    return tiny.make_profile(model, CONTEXT, 0.3).cache(model)


def refused(model: Any, cache: Any, match: str, **arguments: Any) -> None:
    """The forward is refused, and nothing was stored by it."""
    stored = cache.retained_bytes
    with torch.no_grad(), pytest.raises(UnsupportedRequestError, match=match) as caught:
        model(past_key_values=cache, **arguments)
    assert "\n" not in str(caught.value)
    assert cache.retained_bytes == stored


def test_profiles_of_other_models_are_refused_by_name(tiny: ModuleType, model: Any) -> None:
    named = tiny.make_profile(model, CONTEXT, 0.3, shape=tiny.shape_of(model, model_id="org/giant"))
    with pytest.raises(ModelMismatchError, match="org/giant.*tiny"):
        named.cache(model)
    assert make_cache(named, model, allow_other_model=True).get_seq_length() == 0
    other = tiny.make_profile(model, CONTEXT, 0.3, shape=tiny.shape_of(model, head_dim=64))
    with pytest.raises(ModelMismatchError, match="head_dim 64"):
        make_cache(other, model, allow_other_model=True)


def test_sliding_layers_must_be_where_the_profile_has_them(tiny: ModuleType) -> None:
    gemma = tiny.tiny_model("gemma3")
    types = ("full",) * 4
    shape = tiny.shape_of(gemma, layer_types=types, sliding_window=None)
    with pytest.raises(ModelMismatchError, match="layer_types"):
        tiny.make_profile(gemma, CONTEXT, 0.3, shape=shape).cache(gemma)


@pytest.mark.parametrize(
    ("budgets", "parameters", "match"),
    [([3] * 4, {}, "sinks and window"), (0.3, {"window": 9}, "last 9 tokens.*window of 4")],
    ids=["budgets", "scorer"],
)
def test_what_does_not_fit_sinks_and_window_is_refused(
    tiny: ModuleType, model: Any, budgets: Any, parameters: dict[str, int], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        tiny.make_profile(model, CONTEXT, budgets, parameters=parameters).cache(model)


def test_masks_that_hide_tokens_later_are_refused(tiny: ModuleType, model: Any, cache: Any) -> None:
    with torch.no_grad():
        model(tiny.prompt(CONTEXT), past_key_values=cache)
    follow = tiny.prompt(2)
    mask = torch.ones(1, CONTEXT + 2)
    mask[0, 5] = 0
    refused(model, cache, "when they arrived", input_ids=follow, attention_mask=mask)
    refused(model, cache, "expected 62", input_ids=follow, attention_mask=torch.ones(1, 2))
    four = torch.ones(1, 1, 2, CONTEXT + 2, dtype=torch.bool)
    refused(model, cache, "ready-made", input_ids=follow, attention_mask=four)


def test_attention_weights_are_refused(tiny: ModuleType) -> None:
    model = tiny.tiny_model("llama", "eager")
    cache = tiny.make_profile(model, CONTEXT, 0.3).cache(model)
    ids = tiny.prompt(CONTEXT)
    refused(model, cache, "output_attentions", input_ids=ids, output_attentions=True)
    model.config.output_attentions = True
    refused(model, cache, "output_attentions", input_ids=ids)


def test_attention_with_unknown_masks_is_refused(tiny: ModuleType, model: Any, cache: Any) -> None:
    """An implementation of the user's own, whose masks could be of any kind."""
    AttentionInterface.register("mine", sdpa_attention_forward)
    model.set_attn_implementation("mine")
    refused(model, cache, "flash and flex attention, not on mine", input_ids=tiny.prompt(CONTEXT))


@pytest.mark.parametrize(
    ("rows", "more", "match"),
    [(2, 3, "holds 2 rows.*has 3"), (1, 2, "holds 1 row, but this input has 2")],
)
def test_another_batch_size_is_refused(
    tiny: ModuleType, model: Any, cache: Any, rows: int, more: int, match: str
) -> None:
    with torch.no_grad():
        model(tiny.prompt(CONTEXT, rows), past_key_values=cache)
    refused(model, cache, match, input_ids=tiny.prompt(1, more))


def test_what_is_no_policy_is_refused(tiny: ModuleType, model: Any) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    with pytest.raises(InputError, match="policy is 3; name"):
        profile.cache(model, policy=3)
    with pytest.raises(InputError, match="no policy or scorer 'snapvk'; the nearest is 'snapkv'"):
        profile.cache(model, policy="snapvk")


def test_compiled_models_are_refused(tiny: ModuleType, model: Any) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    with pytest.raises(UnsupportedRequestError, match=r"torch\.compile"):
        profile.cache(torch.compile(model))
    model.compile()
    with pytest.raises(UnsupportedRequestError, match=r"torch\.compile"):
        profile.cache(model)


def test_a_model_that_is_compiled_later_is_refused(
    tiny: ModuleType, model: Any, cache: Any
) -> None:
    compiled = torch.compile(model, backend="eager")
    refused(compiled, cache, r"torch\.compile", input_ids=tiny.prompt(CONTEXT))
    with torch.no_grad():
        model(tiny.prompt(CONTEXT), past_key_values=cache)
    assert cache.reduced


def test_settings_of_the_model_that_ask_for_another_cache_are_refused(
    tiny: ModuleType, model: Any
) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    model.generation_config.cache_implementation = "static"
    for make in (profile.cache, lambda one: kvalloc.apply(one, profile)):
        with pytest.raises(UnsupportedRequestError, match="asks for a static cache"):
            make(model)
    model.generation_config.cache_implementation = None
    model.generation_config.compile_config = CompileConfig()
    with pytest.raises(UnsupportedRequestError, match=r"torch\.compile"):
        profile.cache(model)


def test_a_cache_that_is_not_to_be_used_is_refused(
    tiny: ModuleType, model: Any, cache: Any
) -> None:
    refused(model, cache, "use_cache=False", input_ids=tiny.prompt(CONTEXT), use_cache=False)


def test_a_profile_with_other_heads_is_refused(tiny: ModuleType, model: Any) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    for more in ({"n_kv_heads": 4}, {"n_kv_heads": 4, "n_query_heads": 8}, {"n_kv_heads": 1}):
        shape = dataclasses.replace(profile.shape, **more)
        budgets = np.repeat(profile.budgets[:, :1], shape.n_kv_heads, axis=1)
        wide = profile.replace(shape=shape, budgets=budgets)
        with pytest.raises(ModelMismatchError, match="heads") as caught:
            wide.cache(model, allow_other_model=True)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["cache", "stored", "adapted", "target"])
def test_models_that_cannot_be_hooked_are_refused_however_budgets_come(
    tiny: ModuleType, bloom: Any, how: str
) -> None:
    ran: list[int] = []
    bloom.register_forward_pre_hook(lambda *_: ran.append(1))
    profile = tiny.make_profile(bloom, CONTEXT, [20, 20], shape=shape_of(bloom))
    options = {"adapted": {"adapt": 0.3}, "target": {"target_retention": 0.9}}.get(how, {})
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM|BloomModel") as caught:
        if how == "cache":
            profile.cache(bloom)
        kvalloc.apply(bloom, None if how == "target" else profile, **options)
    assert "\n" not in str(caught.value)
    assert not ran
    assert "generate" not in vars(bloom)


@pytest.mark.parametrize(
    ("family", "budgets", "tokens", "match"),
    [
        ("llama", [CONTEXT, 20, 20, 20], -3, "only 2 tokens followed"),
        ("gemma3", 0.3, -1, "sliding-window"),
    ],
)
def test_cropping_into_a_reduced_prompt_or_a_full_window_is_refused(
    tiny: ModuleType, family: str, budgets: Any, tokens: int, match: str
) -> None:
    model = tiny.tiny_model(family)
    cache = tiny.make_profile(model, CONTEXT, budgets).cache(model)
    with torch.no_grad():
        model(tiny.prompt(CONTEXT), past_key_values=cache)
        model(tiny.prompt(2), past_key_values=cache)
    stored = cache.kept_tokens
    with pytest.raises(UnsupportedRequestError, match=match):
        cache.crop(tokens)
    assert (cache.kept_tokens == stored).all()


def test_offloading_and_assisted_generation_are_refused(
    tiny: ModuleType, model: Any, cache: Any
) -> None:
    with pytest.raises(UnsupportedRequestError, match="offloaded"):
        cache.offload(0)
    with pytest.raises(UnsupportedRequestError, match="assisted"):
        cache.activate_past_recording()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"assistant_model": "any"}, "assisted"),
        ({"cache_implementation": "static"}, "static"),
        ({"cache_implementation": "offloaded"}, "offloaded"),
        ({"use_cache": False}, "use_cache=False"),
        ({"compile_config": CompileConfig()}, "torch.compile"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_apply_refuses_what_generate_cannot_do(
    tiny: ModuleType, model: Any, options: dict[str, Any], match: str
) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    ran = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    with (
        pytest.raises(UnsupportedRequestError, match=match),
        kvalloc.apply(model, profile),
    ):
        model.generate(tiny.prompt(CONTEXT), max_new_tokens=3, **options)
    assert not ran


def test_more_tokens_than_the_announced_prompt_are_refused(tiny: ModuleType, model: Any) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    cache = make_cache(profile, model, prompt_tokens=CONTEXT)
    with torch.no_grad():
        model(tiny.prompt(40), past_key_values=cache)
    refused(model, cache, "prompt of 60 tokens", input_ids=tiny.prompt(21))
    with pytest.raises(InputError, match="prompt_tokens is 0"):
        make_cache(profile, model, prompt_tokens=0)


def test_chunked_prefill_of_unknown_length_is_refused(tiny: ModuleType, model: Any) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    model.generation_config.prefill_chunk_size = 16
    with pytest.raises(UnsupportedRequestError, match="prompt_tokens="):
        profile.cache(model)


def test_a_model_that_fills_no_cache_is_refused(tiny: ModuleType, model: Any, cache: Any) -> None:
    model.gradient_checkpointing_enable()
    model.train()
    refused(model, cache, "gradient checkpointing", input_ids=tiny.prompt(CONTEXT))
    model.eval()
    with torch.no_grad():
        model(tiny.prompt(CONTEXT), past_key_values=cache)
    assert cache.reduced


def test_pickling_a_cache_is_refused(tiny: ModuleType, model: Any, cache: Any) -> None:
    with torch.no_grad():
        model(tiny.prompt(CONTEXT), past_key_values=cache)
    for attempt in (pickle.dumps, copy.copy, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(UnsupportedRequestError, match=r"cache\.save"):
            attempt(cache)
    assert copy.deepcopy(cache).retained_bytes == cache.retained_bytes


def test_chunks_of_a_generate_that_has_not_announced_them_are_refused(
    tiny: ModuleType, model: Any
) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    ids, settings = tiny.prompt(CONTEXT), {"max_new_tokens": 2, "prefill_chunk_size": 25}
    cache = profile.cache(model)
    with pytest.raises(UnsupportedRequestError, match=f"3 chunks.*prompt_tokens={CONTEXT}"):
        model.generate(ids, past_key_values=cache, **settings)
    assert cache.retained_bytes == 0
    model.generate(ids, past_key_values=cache, max_new_tokens=2, prefill_chunk_size=CONTEXT)
    assert (cache.kept_tokens == profile.budgets + 1).all()
    announced = make_cache(profile, model, prompt_tokens=CONTEXT)
    model.generate(ids, past_key_values=announced, **settings)
    assert (announced.kept_tokens == profile.budgets + 1).all()
    inside = profile.cache(model)
    with inside.prefill():
        model.generate(ids, past_key_values=inside, max_new_tokens=1, prefill_chunk_size=25)
    assert (inside.kept_tokens == profile.budgets).all()


def test_every_refusal_is_a_user_error() -> None:
    assert issubclass(UnsupportedRequestError, KVAllocError)
