"""A full cache until what is looked at has followed, or a prompt is read again; and how far."""

import copy

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import head_entries, noted_repetitions, padded_rows, run
from transformers import DynamicCache

import kvalloc
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.runtime import answer, make_cache
from kvalloc.scorers.later_pass import CARRIED_TOKENS

# Policies that look at what follows a prompt: a full cache until it has followed, then budgets


CONTEXT, AWAITED = 90, 5


def late(model, level="head", tokens=AWAITED, **changes):
    parameters = {"tokens": tokens, "pool": 3}
    profile = tiny.make_profile(model, CONTEXT, 0.4, scorer="lookahead", parameters=parameters)
    profile = tiny.by_head(profile, spread=9) if level == "head" else profile
    return profile.replace(**changes)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_it_is_the_full_cache_until_enough_has_followed(family, dtype, level):
    model = tiny.tiny_model(family, dtype=dtype)
    profile = late(model, level)
    cache, full, ids = (
        make_cache(model, profile),
        DynamicCache(config=model.config),
        tiny.prompt(CONTEXT, 2),
    )
    assert not cache.prompt_complete
    layers = list(profile.shape.full_layers)
    for number in range(AWAITED + 1):
        assert cache.reduced == (number > AWAITED)
        assert torch.equal(run(model, ids, cache), run(model, ids, full))
        following = cache.get_seq_length() - CONTEXT
        assert following == number
        assert cache.awaited_tokens == AWAITED - number
        ids = tiny.prompt(1, 2, seed=number)
    kept = cache.kept_tokens_by_row[:, layers] - AWAITED
    assert (kept == profile.budgets_for(CONTEXT)[layers]).all()
    if family == "llama":  # the prompt's budgets, and all that has followed
        followed = 2 * AWAITED * len(layers) * tiny.N_KV_HEADS * 2 * tiny.HEAD_DIM * dtype.itemsize
        assert cache.retained_bytes == 2 * profile.retained_bytes_at(CONTEXT) + followed


def test_a_question_in_one_piece_counts_and_its_end_votes(model):
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
    assert asked.awaited_tokens  # the answer was written on a copy


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_different_questions_vote_as_if_alone(model, side):
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


def test_rows_go_on_as_others_while_they_wait(model):
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


def test_a_held_cache_is_copied_reset_saved_after_evict_or_refused(model, tmp_path):
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
    assert (cache.reduced, cache.awaited_tokens) == (True, 0)
    cache.save(tmp_path / "cache.kv")
    loaded = kvalloc.load_cache(tmp_path / "cache.kv", model)
    question = tiny.prompt(4, seed=4)
    assert torch.equal(run(model, question, loaded), run(model, question, cache))
    twin.reset()
    run(model, ids, twin)
    twin.reset()
    assert not twin.prompt_complete
    run(model, ids, twin)
    twin.evict()  # nobody has followed: the window alone votes
    kept = twin.kept_tokens
    assert (twin.reduced, twin.awaited_tokens) == (True, 0)
    assert (kept == profile.budgets_for(CONTEXT)).all()


# What runs on beyond a held prompt stays within the tokens that the model was made for


CHUNK = {"chunk": 37}
REPEATED = CARRIED_TOKENS + 37  # the longest repetition: a further piece


def limited(model, name, parameters):
    profile = tiny.make_profile(model, CONTEXT, 0.4, scorer=name, parameters=parameters)
    return tiny.by_head(profile, spread=9)


def test_how_far_a_pass_goes_is_how_far_it_runs(monkeypatch):
    """Against the tokens that the repetition's forwards really have."""
    model, found = tiny.tiny_model(), noted_repetitions(monkeypatch)
    for tokens in (60, 70, 74, 75, 83, CONTEXT):
        found.clear()
        cache = make_cache(model, limited(model, "reconstruction", CHUNK))
        run(model, tiny.prompt(tokens), cache)
        (scorer,) = cache._prompt.plan.wanted[0]
        assert scorer.later.furthest(tokens) == max(found)


def with_limit(limit):
    return tiny.tiny_model(max_position_embeddings=limit)


def test_a_repetition_beyond_the_limit_is_refused_before_anything_runs():
    ids, least = tiny.prompt(CONTEXT), CONTEXT + REPEATED
    model = with_limit(least)
    cache = make_cache(model, limited(model, "reconstruction", CHUNK))
    run(model, ids, cache)
    assert cache.reduced
    model = with_limit(least - 1)
    cache = make_cache(model, limited(model, "reconstruction", CHUNK))
    said = r"90 tokens and 45 of a repetition are beyond the 134 .*\(chunk=36\)"
    with pytest.raises(InputError, match=said):
        run(model, ids, cache)
    assert cache.get_seq_length() == 0
    run(model, tiny.prompt(CONTEXT - 1), cache)  # the cache is as it was
    assert cache.reduced
    smaller = make_cache(model, limited(model, "reconstruction", {**CHUNK, "chunk": 36}))
    run(model, ids, smaller)  # what the message says fits
    model = with_limit(CONTEXT + 10)
    cache = make_cache(model, limited(model, "reconstruction", CHUNK))
    with pytest.raises(InputError, match="made for; shorten the prompt, or choose another"):
        run(model, ids, cache)


def test_chunks_are_refused_as_soon_as_it_is_known():
    ids = tiny.prompt(CONTEXT)
    model = with_limit(CONTEXT + REPEATED - 1)
    profile = limited(model, "reconstruction", CHUNK)
    announced = make_cache(model, profile, prompt_tokens=CONTEXT)
    with pytest.raises(InputError, match="90 tokens and 45 of a repetition"):
        run(model, ids[:, :20], announced)
    assert announced.get_seq_length() == 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side):
    """Rows of 41 and 50 tokens, in 90 columns, where positions leave padding out."""
    model = with_limit(50 + 1 + CARRIED_TOKENS + 37)
    columns, count = torch.arange(CONTEXT), torch.tensor([41, 50])[:, None]
    mask = ((columns >= CONTEXT - count) if side == "left" else (columns < count)).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = make_cache(model, limited(model, "reconstruction", CHUNK))
    run(model, tiny.prompt(CONTEXT, 2), cache, mask=mask, position_ids=positions)
    assert cache.reduced
    cache = make_cache(model, limited(model, "reconstruction", CHUNK))
    with pytest.raises(InputError, match="beyond the 96"):
        run(
            model,
            tiny.prompt(CONTEXT, 2),
            cache,
            mask=mask,
            position_ids=positions + 50,
        )


def test_a_prompt_beyond_the_limit_cannot_wait_for_tokens():
    """One that fills it can: nothing follows, and nothing is evicted."""
    model = with_limit(CONTEXT)
    profile = limited(model, "lookahead", {"tokens": 8})
    cache = make_cache(model, profile)
    run(model, tiny.prompt(CONTEXT), cache)
    assert cache.awaited_tokens == 8
    cache = make_cache(model, profile)
    said = "until 8 tokens have followed it, but its 91 tokens are more than the 90 that the model"
    with pytest.raises(InputError, match=said):
        run(model, tiny.prompt(CONTEXT + 1), cache)
    assert cache.get_seq_length() == 0
    chunked = make_cache(model, profile, prompt_tokens=CONTEXT + 1)
    with pytest.raises(InputError, match=said):
        run(model, tiny.prompt(20), chunked)
