"""Prompts that are read again before anything of them goes; what scorers see then, and how far."""

from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import head_entries, noted_repetitions, run
from scorer_oracle import full_attention
from transformers import DynamicCache

from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.extensions.making import make_cache
from kvalloc.models.attention import intercept_attention
from kvalloc.models.loading import shape_of
from kvalloc.scorers.later_pass import CARRIED_TOKENS

CONTEXT = 90
NAMES = ("reconstruction", "nearby")
OPTIONS = {
    "reconstruction": {"chunk": 37},
    "nearby": {"chunk": 37, "nearby": 6},
}
SCORERS = {"nearby": "reconstruction"}
Array = npt.NDArray[np.float64]


def profile_of(model, name, level="head", **more):
    parameters, scorer = {**OPTIONS[name], **more}, SCORERS.get(name, name)
    profile = tiny.make_profile(model, CONTEXT, 0.4, scorer=scorer, parameters=parameters)
    return tiny.by_head(profile, spread=9) if level == "head" else profile


def seen(model, ids, hidden=()):
    """What every layer sees of all these tokens in one forward without any cache.

    Tokens after the prompt do not see the hidden ones in full-attention layers.
    """
    found = {}
    full = shape_of(model).full_layers

    def look(states, compute):
        found[states.layer] = states
        mask = states.mask
        if hidden and states.layer in full:
            n_tokens = int(ids.shape[1])
            mask = torch.ones(n_tokens, n_tokens, dtype=torch.bool).tril()
            mask[CONTEXT:, list(hidden)] = False
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        return compute(mask)

    with torch.no_grad(), intercept_attention(model, look):
        model(ids, use_cache=False)
    return found


def pooled(votes, sinks, window, pool, reduce):
    """(n_query_heads, n_tokens) to (n_kv_heads, n_tokens), by loops."""
    heads, n_tokens = votes.shape
    last = n_tokens - window
    out = np.zeros((2, n_tokens))
    for head in range(2):
        rows = []
        for member in range(head * heads // 2, (head + 1) * heads // 2):
            own = [votes[member, t] if sinks <= t < last else 0.0 for t in range(last)]
            half = pool // 2
            rows.append([sum(own[max(t - half, 0) : t + half + 1]) / pool for t in range(last)])
        joined = np.mean(rows, axis=0) if reduce == "mean" else np.max(rows, axis=0)
        out[head, sinks:last] = joined[sinks:]
    return out


def reconstruction_scores(model, ids, layer, nearby=CONTEXT):
    """Piece by piece in one forward each; the softmax over piece, sinks and later tokens."""
    heads = model.config.num_attention_heads
    votes = np.zeros((heads, CONTEXT))
    for begin in range(0, CONTEXT, 37):
        piece = ids[:, begin : begin + 37]
        carried = ids[:, max(begin - 8, 0) : begin]
        places = list(range(begin, begin + piece.shape[1]))
        hidden = [*range(4, begin - nearby), *range(begin + 37 + nearby, CONTEXT)]
        states = seen(model, torch.cat([ids, carried, piece], dim=1), hidden)[layer]
        later = list(range(CONTEXT, states.keys.shape[2]))
        columns = [*range(min(tiny.SINKS, begin)), *places, *later]
        own = replace(
            states,
            queries=states.queries[:, :, CONTEXT:],
            keys=states.keys[:, :, columns],
        )
        weights = full_attention(own)[0]
        first = min(tiny.SINKS, begin)
        votes[:, places] = weights[:, :, first : first + len(places)].max(axis=1)
    return pooled(votes, tiny.SINKS, tiny.WINDOW, 1, "max")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", NAMES)
def test_the_scores_are_those_of_plain_forwards(name, family):
    model = tiny.tiny_model(family, "eager")
    ids = tiny.prompt(CONTEXT)
    profile = profile_of(model, name)
    cache = make_cache(model, profile)
    run(model, ids, cache)
    naive = {
        "reconstruction": reconstruction_scores,
        "nearby": partial(reconstruction_scores, nearby=6),
    }[name]
    for layer in profile.shape.full_layers:
        scores = naive(model, ids, layer)
        for head in range(2):
            best = int(profile.budgets[layer, head]) - tiny.SINKS - tiny.WINDOW
            wanted = np.argsort(-scores[head], kind="stable")[:best].tolist()
            wanted += [*range(tiny.SINKS), *range(CONTEXT - tiny.WINDOW, CONTEXT)]
            assert sorted(wanted) == head_entries(cache, layer, head)


def test_nothing_of_a_repetition_stays():
    """Bytes, columns, sliding layers and the prompt's own logits are as without one."""
    for family in ("llama", "gemma3"):
        model, ids = tiny.tiny_model(family), tiny.prompt(CONTEXT, 2)
        profile = profile_of(model, "reconstruction")
        cache, plain = make_cache(model, profile), DynamicCache(config=model.config)
        assert torch.equal(run(model, ids, cache), run(model, ids, plain))
        assert cache.get_seq_length() == CONTEXT
        other = make_cache(model, profile, policy="xkv")
        run(model, ids, other)
        assert cache.retained_bytes == other.retained_bytes
        assert cache.full_bytes == other.full_bytes
        for mine, theirs in zip(cache.layers, plain.layers, strict=True):
            assert mine.get_seq_length() == theirs.get_seq_length()
            if type(mine) is type(theirs):
                assert torch.equal(mine.keys, theirs.keys)
                assert torch.equal(mine.values, theirs.values)


@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_has_to_go_nothing_is_repeated(name, monkeypatch):
    monkeypatch.setattr("kvalloc.runtime.prompt.read_again", None)
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    profile = tiny.make_profile(model, CONTEXT, 1.0, scorer=SCORERS.get(name, name))
    cache, plain = make_cache(model, profile), DynamicCache(config=model.config)
    for tokens in (ids, tiny.prompt(3, seed=2)):
        assert torch.equal(run(model, tokens, cache), run(model, tokens, plain))


def test_chunks_that_cannot_be_read_in_part_are_refused_at_once(model):
    """Heads that keep different numbers: said before a chunk runs, not after the last one."""
    profile = tiny.by_head(tiny.make_profile(model, 90, 0.4, scorer="reconstruction"), spread=9)
    cache = make_cache(model, profile, policy="mpcache", prompt_tokens=90)
    said = pytest.raises(UnsupportedRequestError, match="leaves entries unread")
    with torch.no_grad(), said:
        model(tiny.prompt(60), past_key_values=cache)


# A second read stays within the tokens that the model was made for


REPEATED = CARRIED_TOKENS + 37  # the longest repetition: a further piece


def test_how_far_a_second_read_goes_is_how_far_it_runs(monkeypatch):
    """Against the tokens that the repetition's forwards really have."""
    model, found = tiny.tiny_model(), noted_repetitions(monkeypatch)
    for tokens in (60, 70, 74, 75, 83, CONTEXT):
        found.clear()
        cache = make_cache(model, profile_of(model, "reconstruction"))
        run(model, tiny.prompt(tokens), cache)
        scorer = cache.methods[0].policy.scorer
        assert scorer.later.furthest(tokens) == max(found)


def with_limit(limit):
    return tiny.tiny_model(max_position_embeddings=limit)


def test_a_repetition_beyond_the_limit_is_refused_before_anything_runs():
    ids, least = tiny.prompt(CONTEXT), CONTEXT + REPEATED
    model = with_limit(least)
    cache = make_cache(model, profile_of(model, "reconstruction"))
    run(model, ids, cache)
    assert cache.reduced
    model = with_limit(least - 1)
    cache = make_cache(model, profile_of(model, "reconstruction"))
    said = r"90 tokens and 45 of a repetition are beyond the 134 .*\(chunk=36\)"
    with pytest.raises(InputError, match=said):
        run(model, ids, cache)
    assert cache.get_seq_length() == 0
    run(model, tiny.prompt(CONTEXT - 1), cache)  # the cache is as it was
    assert cache.reduced
    smaller = make_cache(model, profile_of(model, "reconstruction", chunk=36))
    run(model, ids, smaller)  # what the message says fits
    model = with_limit(CONTEXT + 10)
    cache = make_cache(model, profile_of(model, "reconstruction"))
    with pytest.raises(InputError, match="made for; shorten the prompt, or choose another"):
        run(model, ids, cache)


def test_chunks_are_refused_as_soon_as_it_is_known():
    ids = tiny.prompt(CONTEXT)
    model = with_limit(CONTEXT + REPEATED - 1)
    profile = profile_of(model, "reconstruction")
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
    cache = make_cache(model, profile_of(model, "reconstruction"))
    run(model, tiny.prompt(CONTEXT, 2), cache, mask=mask, position_ids=positions)
    assert cache.reduced
    cache = make_cache(model, profile_of(model, "reconstruction"))
    with pytest.raises(InputError, match="beyond the 96"):
        run(
            model,
            tiny.prompt(CONTEXT, 2),
            cache,
            mask=mask,
            position_ids=positions + 50,
        )
