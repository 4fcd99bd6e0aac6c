"""A conversation: turns that hand one reduced cache on, and what may come between two of them."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from prompt_runs import NEW, generate

import kvalloc
from kvalloc.accounting.stored import bytes_at_16_bits
from kvalloc.errors import KVAllocError, ModelMismatchError, UnsupportedRequestError

TURN, SHARE = 60, "20%"


def said(tiny: ModuleType, text: torch.Tensor, turn: int) -> torch.Tensor:
    """The text so far, and what is said in a turn."""
    return torch.cat([text, tiny.prompt(TURN, seed=turn)], dim=1)


def talk(
    tiny: ModuleType, model: Any, turns: range, text: torch.Tensor, cache: Any = None
) -> tuple[torch.Tensor, Any]:
    """Answer turns; return the whole text and the cache of all but its last token."""
    with kvalloc.apply(model, budget=SHARE) as applied:
        for turn in turns:
            text = generate(model, said(tiny, text, turn), past_key_values=cache)
            cache = cache or applied.last_cache
    return text, cache


@pytest.fixture
def begun(tiny: ModuleType, model: Any) -> tuple[torch.Tensor, Any]:
    """Text and cache of the first turn."""
    text, cache = talk(tiny, model, range(1), tiny.prompt(0))
    assert cache.reduced
    return text, cache


@pytest.mark.parametrize("turns", [1, 3])
def test_saved_and_loaded_in_the_middle_it_goes_on_as_if_nothing_had_been(
    tiny: ModuleType, model: Any, tmp_path: Path, turns: int
) -> None:
    text, cache = talk(tiny, model, range(turns), tiny.prompt(0))
    cache.save(tmp_path / "c.safetensors")
    loaded = kvalloc.load_cache(tmp_path / "c.safetensors", model)
    later = range(turns, turns + 3)
    expected, cache = talk(tiny, model, later, text, cache)
    answered, loaded = talk(tiny, model, later, text, loaded)
    assert torch.equal(answered, expected)
    assert loaded.get_seq_length() == cache.get_seq_length() == expected.shape[1] - 1
    assert (loaded.kept_tokens == cache.kept_tokens).all()
    assert loaded.share == cache.share


def test_two_conversations_that_take_turns_are_two_alone(tiny: ModuleType, model: Any) -> None:
    first, other = range(0, 3), range(10, 13)
    expected = [talk(tiny, model, turns, tiny.prompt(0))[0] for turns in (first, other)]
    texts, caches = [tiny.prompt(0)] * 2, [None] * 2
    for turn in range(3):
        for number, turns in enumerate((first, other)):
            at = range(turns[turn], turns[turn] + 1)
            texts[number], caches[number] = talk(tiny, model, at, texts[number], caches[number])
    assert all(map(torch.equal, texts, expected))


def test_a_copy_tries_another_turn_and_the_conversation_goes_on(
    tiny: ModuleType, model: Any, begun: Any
) -> None:
    text, cache = begun
    alone, _ = talk(tiny, model, range(1, 4), text, copy.deepcopy(cache))
    talk(tiny, model, range(20, 22), text, copy.deepcopy(cache))
    assert torch.equal(talk(tiny, model, range(1, 4), text, cache)[0], alone)


def test_the_cache_of_another_model_is_refused_and_stays_as_it_was(
    tiny: ModuleType, model: Any, begun: Any
) -> None:
    text, cache = begun
    expected, _ = talk(tiny, model, range(1, 3), text, copy.deepcopy(cache))
    with pytest.raises(ModelMismatchError, match=r"another LlamaForCausalLM.*make_cache"):
        talk(tiny, tiny.tiny_model(seed=5), range(1, 2), text, cache)
    assert torch.equal(talk(tiny, model, range(1, 3), text, cache)[0], expected)


def test_a_turn_of_another_thread_is_refused_until_the_answer_is_written(
    tiny: ModuleType, model: Any, begun: Any
) -> None:
    text, cache = begun
    expected, _ = talk(tiny, model, range(1, 3), text, copy.deepcopy(cache))
    within, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        within.set()
        assert go_on.wait(60)

    handle = model.model.layers[2].register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(talk, tiny, model, range(1, 2), text, cache)
        assert within.wait(60)
        with pytest.raises(UnsupportedRequestError, match="another thread"), torch.no_grad():
            model(tiny.prompt(3), past_key_values=cache)
        go_on.set()
        text, cache = first.result()
    handle.remove()
    assert torch.equal(talk(tiny, model, range(2, 3), text, cache)[0], expected)
    assert text.shape[1] == 2 * (TURN + NEW)


@pytest.mark.parametrize("place", [0, TURN - 1, TURN + 2])
def test_other_tokens_than_it_has_seen_are_refused(
    tiny: ModuleType, model: Any, begun: Any, place: int
) -> None:
    """At the beginning, at the end of the first turn, in its answer."""
    text, cache = begun
    expected, _ = talk(tiny, model, range(1, 2), text, copy.deepcopy(cache))
    other = text.clone()
    other[:, place] = text[:, place] % 90 + 2
    with pytest.raises(KVAllocError, match="token"):
        talk(tiny, model, range(1, 2), other, cache)
    assert torch.equal(talk(tiny, model, range(1, 2), text, cache)[0], expected)


@pytest.mark.parametrize("missing", [1, 3])
def test_a_turn_of_no_tokens_is_refused(
    tiny: ModuleType, model: Any, begun: Any, missing: int
) -> None:
    """The cache has seen all but the last token of an answer."""
    text, cache = begun
    expected, _ = talk(tiny, model, range(1, 2), text, copy.deepcopy(cache))
    with kvalloc.apply(model, budget=SHARE), pytest.raises(KVAllocError, match="no tokens"):
        generate(model, text[:, :-missing], past_key_values=cache)
    with pytest.raises(KVAllocError, match="no tokens"), torch.no_grad():
        model(text[:, :0], past_key_values=cache)
    assert torch.equal(talk(tiny, model, range(1, 2), text, cache)[0], expected)


def test_a_conversation_beyond_the_models_context_is_refused_before_it_is_read(
    tiny: ModuleType,
) -> None:
    model = tiny.tiny_model(max_position_embeddings=3 * (TURN + NEW))
    text, cache = talk(tiny, model, range(2), tiny.prompt(0))
    expected, _ = talk(tiny, model, range(2, 3), text, copy.deepcopy(cache))
    beyond = torch.cat([text, tiny.prompt(2 * TURN)], dim=1)
    with pytest.raises(KVAllocError, match=f"{3 * (TURN + NEW)}"):
        talk(tiny, model, range(5, 6), beyond, cache)
    with pytest.raises(KVAllocError, match=f"{3 * (TURN + NEW)}"), torch.no_grad():
        model(tiny.prompt(2 * TURN), past_key_values=cache)
    assert torch.equal(talk(tiny, model, range(2, 3), text, cache)[0], expected)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_share_holds_at_the_end_of_every_turn(
    tiny: ModuleType, model: Any, share: float
) -> None:
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


def test_a_long_answer_stays_within_the_share(tiny: ModuleType, model: Any) -> None:
    shares: list[float] = []
    with kvalloc.apply(model, budget=0.3) as applied:
        hook = model.register_forward_hook(lambda *_: shares.append(applied.last_cache.share))
        generate(model, tiny.prompt(60), max_new_tokens=700)
        hook.remove()
    assert max(shares[400:]) <= 0.3 * 1.5
    assert applied.last_cache.share <= 0.3 * 1.5


@pytest.mark.parametrize("asked", [{}, {"budget": "60%"}, {"budget": "60%", "rows": 3}])
def test_memory_is_never_exceeded(
    tiny: ModuleType, model: Any, tmp_path: Path, asked: dict[str, Any]
) -> None:
    """Read from the storages after every layer of every forward; a turn may be larger than it."""
    rows = asked.pop("rows", 1)
    limit, text, cache, largest = rows * 120 * 1024, tiny.prompt(0, rows), None, 0
    sizes = (60, 60, 200, 5, 60, 60, 60, 60)

    def read(*_: Any) -> None:
        nonlocal largest
        largest = max(largest, applied.last_cache.retained_bytes)

    hooks = [layer.register_forward_hook(read) for layer in model.model.layers]
    with kvalloc.apply(model, memory=limit, **asked) as applied:
        for turn, size in enumerate(sizes):
            text = torch.cat([text, tiny.prompt(size, rows, seed=turn)], dim=1)
            text = generate(model, text, past_key_values=cache, max_new_tokens=20)
            cache = cache or applied.last_cache
            assert largest <= limit, turn
            assert cache.get_seq_length() == text.shape[1] - 1
    assert largest > limit * 0.9
    assert cache.share < 0.5
    if not asked:
        cache.save(tmp_path / "c.safetensors")
        assert kvalloc.load_cache(tmp_path / "c.safetensors", model).memory == limit
    for hook in hooks:
        hook.remove()


def test_a_turn_that_memory_does_not_take_whole_is_read_as_its_pieces_are(
    tiny: ModuleType, model: Any
) -> None:
    """The logits of all of its tokens come back, each as if its piece had come alone."""
    first, turn = tiny.prompt(60), tiny.prompt(300, seed=3)
    with kvalloc.apply(model, budget="60%", memory=120 * 1024) as applied, torch.no_grad():
        model(first)
        cache = applied.last_cache
        cuts = cache._cuts_for_memory(360)
        assert cuts
        alone = copy.deepcopy(cache)
        found = model(turn, past_key_values=cache).logits
        pieces = torch.tensor_split(turn, [cut - 60 for cut in cuts], dim=1)
        expected = [model(piece, past_key_values=alone).logits for piece in pieces]
    assert torch.equal(found, torch.cat(expected, dim=1))
    assert cache.retained_bytes == alone.retained_bytes
