"""What users of transformers do: it works with a reduced cache, or is refused by name."""

from __future__ import annotations

import copy
import importlib.metadata
import warnings

import pytest
import runtime_oracle as tiny
import torch
import transformers
from cli_tools import prose, word_tokenizer
from packaging.version import Version
from prompt_runs import NEW, generate, padding_mask, run
from torch import nn
from transformers import DynamicCache, GenerationConfig

import kvalloc
from kvalloc.errors import (
    InputError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from kvalloc.models import loading
from kvalloc.models.loading import LoadedModel

# `generate()` with a reduced cache, and the context manager that supplies one


PROMPT = 90
FAILS_IN_OLD_TRANSFORMERS = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers 5.2 and 5.10 fail here with their own cache, too",
)


def test_apply_reads_a_generation_config_that_comes_by_its_place(model):
    profile = tiny.make_profile(model, PROMPT, 0.3)
    ids = tiny.prompt(PROMPT)
    chunked = GenerationConfig(max_new_tokens=NEW, do_sample=False, prefill_chunk_size=32)
    with kvalloc.apply(model, profile) as applied:
        model.generate(ids, chunked)
        assert applied.last_cache is not None
        expected = profile.budgets_for(PROMPT + NEW - 1)
        assert (applied.last_cache.kept_tokens == expected).all()
        with pytest.raises(UnsupportedRequestError, match="cannot be offloaded"):
            model.generate(ids, GenerationConfig(cache_implementation="offloaded"))


def answered(model, ids, cache=None, **options):
    """The text with a new answer, and the cache."""
    out = generate(model, ids, past_key_values=cache, return_dict_in_generate=True, **options)
    return out.sequences, out.past_key_values


def of_embeddings(model, ids):
    inputs = model.get_input_embeddings()(ids).detach()
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(inputs_embeds=inputs, **settings)
    return torch.cat([ids, out.sequences], dim=1), out.past_key_values


def read_by_itself(model, ids, tokens):
    _, cache = answered(model, ids)
    cache.reset() if tokens == 0 else cache.crop(tokens - cache.get_seq_length())
    text = torch.cat([ids[:, :tokens], tiny.prompt(20, len(ids), seed=8)], dim=1)
    run(model, text[:, tokens:], cache)
    return text, cache


def with_rows_swapped(model, ids):
    text, cache = answered(model, ids)
    cache.reorder_cache(torch.tensor([1, 0]))
    return text[[1, 0]], cache


@pytest.mark.parametrize(
    "before",
    [
        of_embeddings,
        with_rows_swapped,
        pytest.param(
            lambda model, ids: read_by_itself(model, ids, 0), marks=FAILS_IN_OLD_TRANSFORMERS
        ),
        lambda model, ids: read_by_itself(model, ids, PROMPT),
        lambda model, ids: read_by_itself(model, ids, 30),
    ],
)
def test_a_turn_goes_on_from_what_the_cache_has_read_whoever_read_it(model, before):
    """To the bit as the plain model does; a text that is another one is refused."""
    ids, results = tiny.prompt(PROMPT, 2), []
    for budget in (None, "100%"):
        with kvalloc.apply(model, budget=budget or "50%") as applied:
            if budget is None:
                applied.remove()
            text, cache = before(model, ids)
            turn = torch.cat([text, tiny.prompt(9, 2, seed=9)], dim=1)
            if budget and before is with_rows_swapped:
                with pytest.raises(InputError, match="token 0 of these is not the one"):
                    answered(model, turn[[1, 0]], cache)
            results.append(answered(model, turn, cache)[0])
    assert torch.equal(*results)


class _Gone(transformers.generation.streamers.BaseStreamer):
    """A client that goes away amid the answer."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens + 1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise ConnectionError

    def end(self) -> None: ...


@pytest.mark.parametrize(
    "how", [{}, pytest.param({"prompt_lookup_num_tokens": 3}, marks=FAILS_IN_OLD_TRANSFORMERS)]
)
@pytest.mark.parametrize("share", ["100%", "50%"])
def test_an_answer_that_breaks_off_was_not_read(model, share, how):
    """Its turn can be asked again; where something was evicted since, only a reset helps."""
    ids = tiny.prompt(PROMPT)
    with kvalloc.apply(model, budget=share, decode_every=20) as applied:
        for tokens in (5, 30):
            with pytest.raises(ConnectionError):  # nothing is left of a prompt
                generate(model, ids, max_new_tokens=40, streamer=_Gone(tokens), **how)
            assert (applied.last_cache.batch, applied.last_cache.interrupted) == (0, None)
            text, cache = answered(model, ids)
            before, seen = copy.deepcopy(cache), cache.get_seq_length()
            turn = torch.cat([text, tiny.prompt(9, seed=9)], dim=1)
            with pytest.raises(ConnectionError):
                generate(
                    model, turn, past_key_values=cache, max_new_tokens=40,
                    streamer=_Gone(tokens), **how,
                )  # fmt: skip
            if tokens == 30 and share != "100%":
                with pytest.raises(UnsupportedRequestError, match="broke off.*reset.*deepcopy"):
                    generate(model, turn, past_key_values=cache)
                continue
            assert (cache.get_seq_length(), cache.interrupted) == (seen, None)
            assert torch.equal(answered(model, turn, cache)[0], answered(model, turn, before)[0])


def test_a_row_that_ended_early_is_padded_behind_its_answer(model):
    """The next turn hides that padding: as the plain model, where all is kept; else refused."""
    ids, mask, results = tiny.prompt(PROMPT, 2), torch.ones(2, PROMPT + NEW + 9), []
    mask[1, PROMPT + 2 : PROMPT + NEW] = 0
    for share in (None, "100%", "50%"):
        with kvalloc.apply(model, budget=share or "50%") as applied:
            if share is None:
                applied.remove()
            text, cache = answered(model, ids, cache_implementation="dynamic")
            turn = torch.cat([text, tiny.prompt(9, 2, seed=9)], dim=1)
            if share == "50%":
                with pytest.raises(UnsupportedRequestError, match="hides other tokens"):
                    answered(model, turn, cache, attention_mask=mask)
            else:
                results.append(answered(model, turn, cache, attention_mask=mask)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "options",
    [
        *({"budget": share} for share in ("100%", "50%", "20%", "12%")),
        {"budget": "20%", "memory": "90KiB"},
    ],
)
def test_a_default_device_is_for_the_tensors_of_the_user(model, options):
    """As ``torch.set_default_device("cuda")``: what is ours says where it lies."""
    ids, mask, results = tiny.prompt(PROMPT, 2), padding_mask((PROMPT, 50)), []
    turns, rows = [tiny.prompt(tokens, 2, seed=tokens) for tokens in (9, 1, 70)], [1, 0]
    for device in ("cpu", "meta"):
        with torch.no_grad(), kvalloc.apply(model, **options), torch.device(device):
            cache = model(ids, attention_mask=mask).past_key_values
            for turn in turns:
                model(turn, past_key_values=cache)
                cache.end_turn()
            cache.reorder_cache(torch.tensor(rows, device="cpu"))
            results.append(model(ids[:, :2], past_key_values=cache).logits)
    assert torch.equal(*results)


def test_guidance_reads_its_other_prompt_into_a_cache_of_its_own(model):
    ids, how = tiny.prompt(PROMPT), {"guidance_scale": 1.5}
    plain, _ = answered(model, ids, **how)
    with kvalloc.apply(model, budget="100%") as applied:
        text, cache = answered(model, ids, **how)
        assert applied.last_cache is cache
    assert torch.equal(text, plain)


@pytest.mark.parametrize("share", ["100%", "50%", "25%", "12%"])
def test_under_autocast_it_is_decided_as_without(share):
    """Numbers of several types go together, and what chooses is not rounded."""
    model, ids = tiny.tiny_model(), tiny.prompt(PROMPT)
    with torch.autocast("cpu", torch.bfloat16), kvalloc.apply(model, budget=share) as applied:
        text, cache = answered(model, ids)
        plain, _ = answered(model, ids, DynamicCache(config=model.config))
        text, cache = answered(model, torch.cat([text, tiny.prompt(70, seed=3)], 1), cache)
    assert cache is applied.last_cache
    assert cache.share <= float(share[:-1]) / 100
    assert share != "100%" or torch.equal(text[:, : PROMPT + NEW], plain)


def test_apply_refuses_what_is_no_model_that_generates(model):
    profile = tiny.make_profile(model, PROMPT, 0.3)
    with pytest.raises(UnsupportedModelError, match="cannot generate"):
        kvalloc.apply(model.model, profile)
    loaded = LoadedModel(model=model, tokenizer=None, model_id="tiny")
    for call in (
        lambda: kvalloc.apply(loaded, budget="20%"),
        lambda: kvalloc.profile(loaded, None, ["words"]),
    ):
        with pytest.raises(UnsupportedModelError, match="a LoadedModel .*pass its .model"):
            call()
    assert not model.model._forward_pre_hooks


# What users of transformers do, one by one: it works with a reduced cache, or is refused by name


CONTEXT = 60


@pytest.mark.parametrize("level", ["layer", "head"])
def test_a_pipeline_takes_the_cache(level):
    model, tokenizer = tiny.tiny_model(vocab_size=92), word_tokenizer()
    ids = torch.tensor([tokenizer(prose(CONTEXT))["input_ids"]])
    profile = tiny.make_profile(model, CONTEXT, 0.4)
    profile = tiny.by_head(profile, 6) if level == "head" else profile
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    cache, settings = kvalloc.make_cache(model, profile), {"max_new_tokens": NEW}
    (answer,) = pipeline(prose(CONTEXT), past_key_values=cache, do_sample=False, **settings)
    expected = generate(model, ids, past_key_values=kvalloc.make_cache(model, profile))
    words = tokenizer.decode(expected[0], skip_special_tokens=True)
    assert answer["generated_text"].replace(" ", "") == words.replace(" ", "")
    assert cache.retained_bytes < cache.full_bytes


# Models that are not quite as they were made


def peft_lora(folder):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny.tiny_model(), config)


def device_map(folder):
    pytest.importorskip("accelerate")
    tiny.tiny_model().save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu").eval()


def quantised_weights(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(tiny.tiny_model(), {nn.Linear})


@pytest.mark.parametrize("made", [peft_lora, device_map, quantised_weights])
def test_the_model_works(tmp_path, made):
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


def in_torch_compile(model):
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers[1].compile(backend="eager"),
        lambda model: model.model.layers[1].self_attn.compile(backend="eager"),
        in_torch_compile,
    ],
)
def test_compiled_layers_are_refused(change):
    """Before the cache is made, before its prompt comes, and after it."""
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    profile = tiny.by_head(tiny.make_profile(model, CONTEXT, 0.4), 6)
    empty, filled = kvalloc.make_cache(model, profile), kvalloc.make_cache(model, profile)
    run(model, ids, filled)
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


def test_a_transformers_that_was_not_tried_is_told_once(model, monkeypatch):
    loading.warn_if_untested.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.4))
            with kvalloc.apply(model, budget="50%"):
                pass
    (text,) = (str(one.message) for one in caught)
    assert "not 99.0: pip install 'transformers>=5" in text
