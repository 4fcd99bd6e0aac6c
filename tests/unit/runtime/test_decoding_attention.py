"""Tokens that are decoded where as many entries are kept everywhere: the latest stand apart."""

import importlib.util

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from fake_device import (
    DeviceWaitError,
    Launches,
    decoded_on_fake_device,
    evicted_on_fake_device,
)
from prompt_runs import AT_ONCE, run

from kvalloc.runtime import make_cache
from kvalloc.runtime.tail import BLOCK_TOKENS, FIRST_TOKENS

TOKENS = 60


@pytest.fixture
def model():
    return tiny.tiny_model("phi3")  # keys and values are cut from one larger tensor


@pytest.fixture
def profile(model):
    return tiny.make_profile(model, TOKENS, 0.4)


def runs_of(tensors):
    """How many have the same storage, for each storage."""
    places = [tensor.data_ptr() for tensor in tensors]
    return [places.count(place) for place in dict.fromkeys(places)]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("options", [{}, AT_ONCE])
def test_what_is_kept_stays_where_it_is_while_decoding(model, profile, options):
    """What followed as well, but the first, in room for a block, which is counted; with biases."""
    cache, shadow = make_cache(model, profile, **options), tiny.Shadow(model)
    ids, layer, places = tiny.prompt(TOKENS, 2), cache.layers[0], []
    run(model, ids, cache)
    shadow.logits(ids)
    shadow.follow(cache, combined=bool(options))
    stored = cache.retained_bytes
    for step in range(1, 25):
        token = tiny.prompt(1, 2, seed=step)
        assert tiny.worst(run(model, token, cache), shadow.logits(token)) < 1e-4
        # held, or its place would be given again
        places.append((layer.entries.parts[0].keys, *layer.tail.buffers))
        lists = [own for one in cache.layers for own in one.entries.kept.tensors()]
        beside = sum(own.nbytes for own in [*lists, *layer.newest.tensors()])  # on a GPU
        room = step if step <= FIRST_TOKENS else BLOCK_TOKENS
        assert cache.retained_bytes == stored + room * cache._prompt.token_bytes + beside
        assert layer.dense_tokens == step
    kept, *followed = (runs_of(own) for own in zip(*places, strict=True))
    assert (kept, followed) == ([24], [[1] * FIRST_TOKENS + [24 - FIRST_TOKENS]] * 2)
    for tokens in (3, 1):  # a question sees one tensor of both
        question = tiny.prompt(tokens, 2, seed=9)
        assert tiny.worst(run(model, question, cache), shadow.logits(question)) < 1e-4


@pytest.mark.parametrize("level", ["layer", "head"])
def test_what_follows_where_its_storage_must_not_change(model, profile, level):
    """Torch forbids to write to tensors of inference mode outside it."""
    own = tiny.by_head(profile) if level == "head" else profile
    ids = tiny.prompt(TOKENS, 2)
    tokens = [tiny.prompt(1, 2, seed=step) for step in range(20)]

    def logits(*modes):
        cache, found = make_cache(model, own), []
        with torch.inference_mode():
            model(ids, past_key_values=cache)
        for number, token in enumerate(tokens):
            with modes[number % len(modes)]():
                found.append(model(token, past_key_values=cache).logits.detach().clone())
        return torch.cat(found)

    expected = logits(torch.no_grad)
    assert torch.equal(logits(torch.inference_mode, torch.no_grad), expected)


@pytest.mark.parametrize("level", ["layer", "head"])
def test_gradients_through_decoded_tokens(model, profile, level):
    """A later token's loss reaches an earlier one, whose storage is not written to since."""
    cache = make_cache(model, tiny.by_head(profile) if level == "head" else profile)
    with torch.no_grad():
        model(tiny.prompt(TOKENS), past_key_values=cache)
    embed = model.get_input_embeddings()
    first = embed(tiny.prompt(1)).detach().requires_grad_()
    model(inputs_embeds=first, past_key_values=cache)
    for step in range(12):
        loss = model(tiny.prompt(1, seed=step), past_key_values=cache).logits.sum()
    (gradient,) = torch.autograd.grad(loss, first)
    assert float(gradient.abs().max()) > 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("level", "bits", "padding"),
    [
        ("layer", None, 0),
        ("layer", None, 20),
        ("layer", (8, 8), 0),
        ("head", None, 0),
        ("head", None, 20),
        ("head", (4, 4), 20),
        ("head", (16, 4), 0),
    ],
)
def test_a_decoded_token_asks_nothing_of_the_device(level, bits, padding):
    """No value goes between host and device, and all widths take two launches of Triton's."""

    def make_model():
        return tiny.tiny_model("llama")

    def new_cache(model):
        profile = tiny.make_profile(model, TOKENS, 0.4)
        profile = tiny.by_head(profile) if level == "head" else profile
        if bits is not None:
            profile = profile.replace(bits=np.tile(bits, (tiny.N_LAYERS, 1)))
        return make_cache(model, profile)

    def fill(model):
        cache, mask = new_cache(model), torch.ones(2, TOKENS, dtype=torch.long)
        mask[1, :padding] = 0
        model(tiny.prompt(TOKENS, 2), attention_mask=mask, past_key_values=cache)
        return cache

    found = decoded_on_fake_device(make_model, fill, new_cache)
    assert found["read_tile"] == found["add_tiles"] == tiny.N_LAYERS
    assert found["index_select"] == 0
    assert found["fill_"] == 1  # how many followed, in all layers
    assert found["cat"] == 2 * tiny.N_LAYERS + 1  # the model's own, where it turns positions
    found = {name.removeprefix("in place, "): n for name, n in found.items() if "place" in name}
    # key, value and queries are written where the numbers of `fill_` say
    each = dict.fromkeys(("write_token", "read_tile", "add_tiles"), tiny.N_LAYERS)
    assert found == {"fill_": 2, **each}


def test_the_device_that_is_not_there_says_what_is_asked_of_it():
    launches = Launches()
    numbers = torch.ones(3, device="meta")
    with launches:
        numbers * 2
        assert launches.counts == {"mul": 1}
        with pytest.raises(DeviceWaitError, match="wants a value"):
            bool(numbers.all())
        with pytest.raises(DeviceWaitError, match="wants a value"):
            numbers.cpu()
        launches.strict = True
        with pytest.raises(DeviceWaitError, match="from the host"):
            torch.ones(3).to("meta")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("options", "following", "evictions"),
    [
        ({"policy": "score"}, 0, 1),
        ({"policy": "merge"}, 0, 1),
        ({"policy": "attention_matching"}, 16, 1),
        ({"policy": "attention_matching", "bits": 8}, 16, 1),
        ({"scorer": "lookahead"}, 8, 1),
        ({"scorer": "lookahead", "decode_every": 12}, 24, 3),
        ({"policy": "score", "by_prompt": True}, 1, 1),
        ({"policy": "attention_matching", "padding": 20}, 16, 1),
    ],
)
@pytest.mark.parametrize(("n_layers", "rows", "level"), [(2, 1, "layer"), (4, 3, "head")])
def test_an_eviction_asks_the_device_once(
    monkeypatch, options, following, evictions, n_layers, rows, level
):
    """Whether scores are finite and budgets met, of all layers, rows and heads at once.

    Where entries are handed out by each prompt's scores, how many go to each head is read as well,
    once a row; and of a model in float32, whether what a layer keeps fits float16.
    """
    options = dict(options)
    model = tiny.tiny_model("llama", "eager", torch.bfloat16, num_hidden_layers=n_layers)
    mask = torch.ones(rows, TOKENS, dtype=torch.long)
    mask[0, : options.pop("padding", 0)] = 0
    scorer = {"scorer": options.pop("scorer", "xkv")}
    profile = tiny.make_profile(model, TOKENS, 0.4, **scorer)
    profile = tiny.by_head(profile) if level == "head" else profile
    if bits := options.pop("bits", None):
        profile = profile.replace(bits=np.full_like(profile.budgets, bits))
    profile = profile.replace(by_prompt=options.pop("by_prompt", False) and level == "head")
    handed = []

    def handed_out(scores, total, *, protected):
        handed.append(total)
        return profile.budgets_for(TOKENS)

    monkeypatch.setattr("kvalloc.runtime.eviction.handed_out", handed_out)
    cache = make_cache(model, profile, **options)
    read = evicted_on_fake_device(model, cache, mask, following)
    assert (read, len(handed)) == (evictions, rows * profile.by_prompt)
    assert cache.reduced
