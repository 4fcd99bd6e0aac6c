"""Bytes, types, lengths and positions; and that all of it belongs to the cache."""

import copy

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import padding_mask, run

import kvalloc
from kvalloc.accounting.costs import POSITION_BYTES
from kvalloc.errors import InputError
from kvalloc.extensions.making import make_cache
from kvalloc.runtime.making import Way, build_rows
from kvalloc.units import size

# Bytes, lengths and positions; and that all of it belongs to the cache


CONTEXT = 80


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_bytes_of_sliding_layers_past_their_window(share):
    """A decoded token past the window leaves one more entry allocated, until several come."""
    model = tiny.tiny_model("gemma3")
    profile = tiny.make_profile(model, CONTEXT, share)
    cache = kvalloc.make_cache(model, profile)
    run(model, tiny.prompt(CONTEXT, 2), cache)
    window, seen = model.config.sliding_window, CONTEXT
    full = sum(int(profile.budgets[layer, 0]) for layer in profile.shape.full_layers)
    heads, shape = 2 * tiny.N_KV_HEADS, profile.shape
    plain, half = shape.plain_bytes_per_entry, shape.bytes_per_entry
    kept = full * (half + POSITION_BYTES if share < 1 else plain)
    for tokens, of_sliding in ((1, window), (1, window), (5, window - 1), (1, window)):
        run(model, tiny.prompt(tokens, 2), cache)
        seen += tokens
        following = seen - CONTEXT
        latest = (2 * following + 2 * of_sliding) * plain
        assert cache.retained_bytes == (kept + latest) * heads
        assert cache.full_bytes == (2 * seen * half + 2 * of_sliding * plain) * heads
        assert [layer.keys.shape[2] for layer in cache.layers if layer.is_sliding] == [15, 15]


@pytest.mark.parametrize("joined", [False, True])
def test_rows_are_selected_from_the_end_and_by_a_mask_too_or_refused(model, joined):
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    ways = [Way(profile=profile), Way(profile=profile)] if joined else [Way(profile=profile)]
    cache = build_rows(model, [ways[0], ways[-1], ways[0]])
    run(model, tiny.prompt(CONTEXT, 3), cache)
    for wrong in ([], [3], [0, -4], [True, False], [[0]], [0.5], torch.zeros(3, dtype=torch.bool)):
        with pytest.raises(InputError, match="a selection of"):
            cache.batch_select_indices(torch.as_tensor(wrong))
        assert cache.batch == 3
    question = tiny.prompt(2, 2, seed=1)
    for one, same in (([-1, 0], [2, 0]), ([False, True, True], [1, 2])):
        own, other = copy.deepcopy(cache), copy.deepcopy(cache)
        own.batch_select_indices(torch.tensor(one))
        other.batch_select_indices(torch.tensor(same))
        assert torch.equal(run(model, question, own), run(model, question, other))


def test_a_cache_that_is_cropped_to_nothing_is_a_new_one(model):
    """Also where more is taken back than there is."""
    profile = tiny.make_profile(model, CONTEXT, 1.0)
    cache, new = (kvalloc.make_cache(model, profile) for _ in range(2))
    for tokens, beyond in ((0, 3), (5, 4), (CONTEXT, 0)):
        if tokens:
            run(model, tiny.prompt(tokens), cache)
        cache.crop(tokens + 5)
        assert cache.get_seq_length() == tokens
        cache.crop(-tokens - beyond)
        assert cache.get_seq_length() == cache.retained_bytes == 0
    text = tiny.prompt(CONTEXT, seed=3)
    assert torch.equal(run(model, text, cache), run(model, text, new))
    assert (cache.kept_tokens == new.kept_tokens).all()


def test_a_copy_of_a_cache_that_was_filled_with_gradients():
    model = tiny.tiny_model("gemma3")
    cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, [CONTEXT, 20]))
    model(tiny.prompt(CONTEXT), past_key_values=cache)
    model(tiny.prompt(1), past_key_values=cache)
    other, question = copy.deepcopy(cache), tiny.prompt(3, seed=1)
    assert other.retained_bytes == cache.retained_bytes
    assert torch.equal(run(model, question, other), run(model, question, cache))


def test_cropping_to_a_number_of_tokens_beside_sliding_layers():
    model = tiny.tiny_model("gemma3")
    cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.3))
    run(model, tiny.prompt(6), cache)
    expected = run(model, tiny.prompt(3, seed=1), cache)
    cache.crop(6)
    assert [layer.get_seq_length() for layer in cache.layers] == [6] * len(cache.layers)
    assert torch.equal(run(model, tiny.prompt(3, seed=1), cache), expected)
    cache.crop(100)
    assert cache.get_seq_length() == 9


def test_a_cache_shows_its_tokens_and_bytes(model):
    cache = kvalloc.make_cache(model, tiny.make_profile(model, CONTEXT, 0.3))
    assert repr(cache).endswith("rows=0, tokens=0, empty)")
    for tokens in (CONTEXT, 30):  # the later ones as the model makes them, in float32
        run(model, tiny.prompt(tokens, 2), cache)
        share, stored = cache.retained_bytes / cache.full_bytes, size(cache.retained_bytes)
        text = f"{share:.1%} of a cache at 16 bits, {stored} of {size(cache.full_bytes)})"
        assert repr(cache).endswith(f"rows=2, tokens={cache.get_seq_length()}, {text}")
    assert share > cache.share


# A reduced cache stores at most 16 bits a number, also where the model computes in float32


READ, SHORT_ROW = 90, 5


def kept_types(cache):
    parts = [part for layer in cache.layers for part in layer.kept.parts]
    return {numbers.dtype for part in parts for numbers in (part.keys, part.values)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_short_row_is_stored_alone_as_in_a_batch(dtype):
    model = tiny.tiny_model(dtype=dtype)
    profile = tiny.make_profile(model, READ, 0.4)
    batch, alone = make_cache(model, profile), make_cache(model, profile)
    ids, mask = tiny.prompt(READ, 2), padding_mask((READ, SHORT_ROW))
    run(model, ids, batch, mask)
    run(model, ids[1:, -SHORT_ROW:], alone)
    assert kept_types(batch) == {torch.bfloat16 if dtype == torch.bfloat16 else torch.float16}
    positions = SHORT_ROW * profile.budgets.size * POSITION_BYTES
    in_batch = profile.retained_bytes_at(READ) + alone.full_bytes + positions
    assert batch.retained_bytes == in_batch
    assert alone.retained_bytes == profile.retained_bytes_at(SHORT_ROW)
    if dtype == torch.bfloat16:  # it is transformers' own
        assert alone.retained_bytes == alone.full_bytes
    else:
        assert kept_types(alone) == {torch.float16}
        assert alone.retained_bytes == alone.full_bytes + positions
