"""Policies that look at what follows a prompt: a full cache until it has followed, then budgets."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import head_entries, padded_rows, run
from transformers import DynamicCache

import kvalloc
from kvalloc.errors import UnsupportedRequestError
from kvalloc.runtime import answer, make_cache
from kvalloc.runtime.prompt import State

CONTEXT, AWAITED = 90, 5


def late(model: Any, level: str = "head", tokens: int = AWAITED, **changes: Any) -> Any:
    parameters = {"tokens": tokens, "pool": 3}
    profile = tiny.make_profile(model, CONTEXT, 0.4, scorer="lookahead", parameters=parameters)
    profile = tiny.by_head(profile, spread=9) if level == "head" else profile
    return profile.replace(**changes)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_it_is_the_full_cache_until_enough_has_followed(
    family: str, dtype: torch.dtype, level: str
) -> None:
    model = tiny.tiny_model(family, dtype=dtype)
    profile = late(model, level)
    cache, full, ids = (
        make_cache(model, profile),
        DynamicCache(config=model.config),
        tiny.prompt(CONTEXT, 2),
    )
    assert cache.state is State.ARRIVING
    layers = list(profile.shape.full_layers)
    for number in range(AWAITED + 1):
        assert cache.reduced == (number > AWAITED)
        assert torch.equal(run(model, ids, cache), run(model, ids, full))
        following = cache.get_seq_length() - CONTEXT
        assert following == number
        assert cache.awaited_tokens == AWAITED - number
        assert cache.state is (State.HELD if number < AWAITED else State.FOLLOWING)
        ids = tiny.prompt(1, 2, seed=number)
    kept = cache.kept_tokens_by_row[:, layers] - AWAITED
    assert (kept == profile.budgets_for(CONTEXT)[layers]).all()
    if family == "llama":  # the prompt's budgets, and all that has followed
        followed = 2 * AWAITED * len(layers) * tiny.N_KV_HEADS * 2 * tiny.HEAD_DIM * dtype.itemsize
        assert cache.retained_bytes == 2 * profile.retained_bytes_at(CONTEXT) + followed


def test_a_question_in_one_piece_counts_and_its_end_votes(model: Any) -> None:
    """A long one as well as its last tokens alone, which see the rest of it."""
    profile, ids = late(model), tiny.prompt(CONTEXT)
    for tokens in (AWAITED, 31):
        question = tiny.prompt(tokens, seed=1)
        whole, parts, full = (
            make_cache(model, profile),
            late(model, tokens=tokens),
            DynamicCache(config=model.config),
        )
        run(model, ids, whole)
        run(model, ids, full)
        assert torch.equal(run(model, question, whole), run(model, question, full))
        assert whole.reduced
        waits = make_cache(model, parts)  # for all of it, token by token
        run(model, ids, waits)
        for token in question.split(1, dim=1):
            run(model, token, waits)
        assert waits.reduced
        assert tiny.same_kept(whole, waits) == (tokens == AWAITED)
    asked = make_cache(model, profile)
    run(model, ids, asked)
    assert list(answer(model, asked, tiny.prompt(AWAITED), max_new_tokens=2))
    assert asked.state is State.HELD  # the answer was written on a copy


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_different_questions_vote_as_if_alone(model: Any, side: str) -> None:
    """Nothing goes before the shortest question has counted."""
    profile = late(model)
    contexts = [tiny.prompt(n, seed=n) for n in (CONTEXT, 61)]
    questions = [tiny.prompt(n, seed=n) for n in (9, 3)]
    ids, mask, positions = padded_rows(contexts, side)
    cache = make_cache(model, profile)
    run(model, ids, cache, mask, position_ids=positions)
    ends = positions.amax(dim=1, keepdim=True) + 1
    for pieces in (questions, [tiny.prompt(2, seed=4), tiny.prompt(2, seed=5)]):
        assert not cache.reduced
        asked, shown, places = padded_rows(pieces, side)
        mask = torch.cat([mask, shown], dim=1)
        run(model, asked, cache, mask, position_ids=ends + places)
        ends = ends + shown.sum(dim=1, keepdim=True)
    assert cache.reduced
    for row, (context, question) in enumerate(zip(contexts, questions, strict=True)):
        alone = make_cache(model, late(model))
        run(model, context, alone)
        after = torch.cat([question, tiny.prompt(2, seed=4 + row)], dim=1)
        run(model, after, alone)
        first = CONTEXT - context.shape[1] if side == "left" else 0
        for layer, head in np.ndindex(tiny.N_LAYERS, 2):
            wanted = [first + place for place in head_entries(alone, layer, head)]
            assert head_entries(cache, layer, head, row) == wanted


def test_rows_go_on_as_others_while_they_wait(model: Any) -> None:
    """Beams: each row votes with the tokens of those that it comes from."""
    profile, ids = late(model), tiny.prompt(CONTEXT)
    cache = make_cache(model, profile)
    run(model, ids, cache)
    cache.batch_repeat_interleave(3)
    lineage = [torch.empty(1, 0, dtype=torch.long)] * 3
    for number, rows in enumerate(([0, 1, 2], [2, 0, 0], [1, 1, 0], [0, 2, 2], [2, 1, 0])):
        cache.reorder_cache(torch.tensor(rows))
        token = tiny.prompt(1, 3, seed=number)
        lineage = [torch.cat([lineage[row], token[i : i + 1]], 1) for i, row in enumerate(rows)]
        run(model, token, cache)
    assert cache.reduced
    for row, followed in enumerate(lineage):
        alone = make_cache(model, profile)
        run(model, ids, alone)
        run(model, followed, alone)
        for layer in range(tiny.N_LAYERS):
            kept = cache.kept_indices(layer)[row]
            assert torch.equal(kept, alone.kept_indices(layer)[0])


def test_a_held_cache_is_copied_reset_saved_after_evict_or_refused(
    model: Any, tmp_path: Path
) -> None:
    profile, ids = late(model), tiny.prompt(CONTEXT)
    cache = make_cache(model, profile)
    run(model, ids, cache)
    run(model, tiny.prompt(2), cache)
    twin = copy.deepcopy(cache)
    with pytest.raises(UnsupportedRequestError, match=r"until 3 more tokens.*cache\.evict\(\)"):
        cache.save(tmp_path / "cache.kv")
    run(model, tiny.prompt(3), twin)
    assert (twin.reduced, cache.reduced) == (True, False)
    cache.evict()
    cache.evict()  # there is nothing left to do
    assert cache.state is State.FOLLOWING
    cache.save(tmp_path / "cache.kv")
    loaded = kvalloc.load_cache(tmp_path / "cache.kv", model)
    question = tiny.prompt(4, seed=4)
    assert torch.equal(run(model, question, loaded), run(model, question, cache))
    twin.reset()
    run(model, ids, twin)
    twin.reset()
    assert twin.state is State.ARRIVING
    run(model, ids, twin)
    twin.evict()  # nobody has followed: the window alone votes
    kept = twin.kept_tokens
    assert twin.state is State.EVICTED
    assert (kept == profile.budgets_for(CONTEXT)).all()
