"""Tokens that are decoded where as many entries are kept everywhere: the latest stand apart."""

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import AT_ONCE, run

from kvalloc.extensions.making import make_cache
from kvalloc.runtime.plan import token_bytes
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
    """What followed as well, but the first, in room for a block, which is counted."""
    cache, shadow = make_cache(model, profile, **options), tiny.Shadow(model)
    ids, layer, places = tiny.prompt(TOKENS, 2), cache.layers[0], []
    run(model, ids, cache)
    shadow.logits(ids)
    shadow.follow(cache, combined=bool(options))
    for step in range(1, 25):
        token = tiny.prompt(1, 2, seed=step)
        assert tiny.worst(run(model, token, cache), shadow.logits(token)) < 1e-4
        # held, or its place would be given again
        places.append((layer.kept.parts[0].keys, *layer.tail.buffers))
        room = step if step <= FIRST_TOKENS else BLOCK_TOKENS
        kept = [own.nbytes for one in cache.layers for own in one.kept.tensors()]
        assert cache.retained_bytes == sum(kept) + 2 * room * token_bytes(profile)
        assert layer.tail.tokens == step
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
    run(model, tiny.prompt(TOKENS), cache)
    embed = model.get_input_embeddings()
    first = embed(tiny.prompt(1)).detach().requires_grad_()
    model(inputs_embeds=first, past_key_values=cache)
    for step in range(12):
        loss = model(tiny.prompt(1, seed=step), past_key_values=cache).logits.sum()
    (gradient,) = torch.autograd.grad(loss, first)
    assert float(gradient.abs().max()) > 0
