"""A conversation: turns that hand one reduced cache on, and what may come between two of them."""

import copy

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import generate, run

import kvalloc
from kvalloc.accounting.stored import bytes_at_16_bits
from kvalloc.runtime import turns
from kvalloc.runtime.making import Way, build_rows

TURN, SHARE = 60, "20%"


def said(text, turn):
    """The text so far, and what is said in a turn."""
    return torch.cat([text, tiny.prompt(TURN, seed=turn)], dim=1)


def talk(model, turns, text, cache=None):
    """Answer turns; return the whole text and the cache of all but its last token."""
    with kvalloc.apply(model, budget=SHARE) as applied:
        for turn in turns:
            text = generate(model, said(text, turn), past_key_values=cache)
            cache = cache or applied.last_cache
    return text, cache


@pytest.mark.parametrize("turns", [1, 3])
def test_saved_and_loaded_in_the_middle_it_goes_on_as_if_nothing_had_been(model, tmp_path, turns):
    text, cache = talk(model, range(turns), tiny.prompt(0))
    kvalloc.save_cache(cache, tmp_path / "c.safetensors")
    loaded = kvalloc.load_cache(tmp_path / "c.safetensors", model)
    later = range(turns, turns + 3)
    expected, cache = talk(model, later, text, cache)
    answered, loaded = talk(model, later, text, loaded)
    assert torch.equal(answered, expected)
    assert loaded.get_seq_length() == cache.get_seq_length() == expected.shape[1] - 1
    assert (loaded.kept_tokens == cache.kept_tokens).all()
    assert loaded.share == cache.share


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_share_holds_at_the_end_of_every_turn(model, share):
    text, cache, sizes = tiny.prompt(0), None, (60, 7, 150, 1, 40)
    with kvalloc.apply(model, budget=share):
        for seed, size in enumerate(sizes):
            text = torch.cat([text, tiny.prompt(size, seed=seed)], dim=1)
            out = generate(model, text, past_key_values=cache, return_dict_in_generate=True)
            text, cache = out.sequences, out.past_key_values
            shape = cache.profile.shape
            entry = 2 * shape.head_dim * 2 * shape.n_kv_heads * len(shape.full_layers)
            stored = bytes_at_16_bits(cache.layers)
            assert stored <= share * entry * cache.get_seq_length()
            assert cache.share == stored / (entry * cache.get_seq_length())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_attention_go_on_where_a_turn_evicts_nothing_of_a_layer(dtype):
    model = tiny.tiny_model(dtype=dtype)
    cache = build_rows(model, [Way(profile=tiny.make_profile(model, 90, 0.5, scorer="h2o"))])
    run(model, tiny.prompt(90), cache)
    for tokens in [1] * 8 + [12]:
        run(model, tiny.prompt(tokens, seed=tokens), cache)
        cache.end_turn()
        for store in cache.stores.values():
            [note] = store.notes.observed.values()
            assert note.n_tokens == cache.get_seq_length()
            assert (note.columns.shape[-1] == store.kept.lengths).all()


def test_what_scales_leave_as_a_conversation_grows_is_filled_with_entries(model):
    asked = {"bits": np.full((4, 2), 4), "target_share": 0.3}
    profile = tiny.make_profile(model, 40, 0.5, level="head", **asked)
    cache = kvalloc.make_cache(model, profile)
    with torch.no_grad():
        for turn in (40, 200, 200):
            model(tiny.prompt(turn), past_key_values=cache)
            cache.end_turn()
    share = profile.share_at(40)
    assert profile.share_at(440) < 0.9 * share  # as many entries in proportion
    assert 0.98 * share < cache.share <= share


def test_a_conversation_goes_by_the_budgets_of_a_longer_text_once_their_share_holds(
    model, tmp_path
):
    asked = {"level": "head", "target_share": 0.21}
    short = tiny.make_profile(model, 20, 0.9, bits=np.full((4, 2), 4), **asked)
    longer = tiny.make_profile(model, 256, 0.4, bits=np.array([[8, 4]] * 4), **asked)
    assert longer.share_at(50) > 0.21 > longer.share_at(150)
    cache = twin = build_rows(model, [Way(profile=short, longer_profile=longer)])
    for turn in (20, 30, 100, 200):
        for one in {cache, twin}:
            run(model, tiny.prompt(turn), one)
            one.end_turn()
        assert (twin.kept_tokens == cache.kept_tokens).all()
        holds = longer if cache.get_seq_length() >= 150 else short
        assert cache.profile.digest == twin.profile.digest == holds.digest
        kvalloc.save_cache(cache, tmp_path / "c.safetensors")
        twin = kvalloc.load_cache(tmp_path / "c.safetensors", model)
    assert {part.bits for part in cache.layers[0].kept.parts} == {4, 8}
    assert 0.95 * longer.share_at(256) < cache.share <= longer.share_at(256)
    cache.reset()
    assert cache.profile is short


@pytest.mark.parametrize(
    "asked",
    [
        *({}, {"rows": 3}, {"budget": "60%"}, {"budget": "60%", "rows": 3}),
        *({"budget": "100%"}, {"scorer": "snapkv"}),
    ],
)
def test_memory_is_never_exceeded(model, tmp_path, asked):
    """Read from the storages after every layer of every forward; a turn may be larger than it."""
    asked = dict(asked)
    rows = asked.pop("rows", 1)
    limit, text, cache, largest = rows * 120 * 1024, tiny.prompt(0, rows), None, 0
    sizes = (60, 60, 200, 5, 60, 60, 60, 60)

    def read(*_):
        nonlocal largest
        if applied.last_cache is not None:  # not while the model is looked at
            largest = max(largest, applied.last_cache.retained_bytes)

    with kvalloc.apply(model, memory=limit, **asked) as applied:
        hooks = [layer.register_forward_hook(read) for layer in model.model.layers]
        for turn, size in enumerate(sizes):
            text = torch.cat([text, tiny.prompt(size, rows, seed=turn)], dim=1)
            text = generate(model, text, past_key_values=cache, max_new_tokens=20)
            cache = cache or applied.last_cache
            assert largest <= limit, turn
            if turn == 3 and not asked:  # a loaded one knows no other budgets
                kvalloc.save_cache(cache, tmp_path / "c.safetensors")
                cache = applied.last_cache = kvalloc.load_cache(tmp_path / "c.safetensors", model)
                assert cache.options.memory == limit
            assert cache.get_seq_length() == text.shape[1] - 1
    assert largest > limit * 0.9
    assert cache.share < 0.5
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("tokens", [7, 16, 200])
def test_a_turn_after_a_prompt_that_nearly_fills_the_memory_stays_within_it(model, tokens):
    """The plain cache of the prompt leaves less free than the tokens between two evictions."""
    limit, largest = 60 * 1024, 0

    def read(*_):
        nonlocal largest
        if applied.last_cache is not None:
            largest = max(largest, applied.last_cache.retained_bytes)

    with kvalloc.apply(model, memory=limit) as applied, torch.no_grad():
        model(tiny.prompt(58))
        assert not applied.last_cache.reduced
        for layer in model.model.layers:
            layer.register_forward_hook(read)
        for turn in range(3):
            model(tiny.prompt(tokens, seed=turn), past_key_values=applied.last_cache)
    assert 0.9 * limit < largest <= limit


def test_a_conversation_that_outgrows_its_memory_keeps_more_entries_at_fewer_bits(model):
    """A plain cache while that fits; then budgets are decided for what the memory leaves."""
    text, cache, widths = tiny.prompt(40), None, []
    with kvalloc.apply(model, memory="120KiB") as applied:
        model(text, use_cache=True)
        assert not applied.last_cache.profile.reduces
        for turn in range(8):
            text = generate(model, said(text, turn), past_key_values=cache)
            cache = cache or applied.last_cache
            widths.append(int(cache.profile.widths.max()))
    assert (widths[0], widths[-1]) == (8, 85)
    assert widths == sorted(widths)
    assert {part.bits for part in cache.layers[0].kept.parts} == {8, 5}
    assert cache.retained_bytes > 0.6 * 120 * 1024


def test_a_turn_that_memory_does_not_take_whole_is_read_as_its_pieces_are(model):
    """The logits of all of its tokens come back, each as if its piece had come alone."""
    first, turn = tiny.prompt(60), tiny.prompt(300, seed=3)
    with kvalloc.apply(model, budget="60%", memory=120 * 1024) as applied, torch.no_grad():
        model(first)
        cache = applied.last_cache
        cuts = [*turns.cuts(cache, 60, 360)]
        assert cuts
        alone = copy.deepcopy(cache)
        found = model(turn, past_key_values=cache).logits
        pieces = torch.tensor_split(turn, [cut - 60 for cut in cuts], dim=1)
        expected = [model(piece, past_key_values=alone).logits for piece in pieces]
    assert torch.equal(found, torch.cat(expected, dim=1))
    assert cache.retained_bytes == alone.retained_bytes
