"""Prompts that are read again before anything of them goes; what scorers see then, and how far."""

from dataclasses import replace

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run, states_seen
from scorer_oracle import full_attention
from transformers import DynamicCache

from kvalloc.errors import InputError
from kvalloc.extensions.making import make_cache
from kvalloc.models.attention import intercept_attention
from kvalloc.models.loading import shape_of
from kvalloc.scorers import get_scorer
from kvalloc.scorers.later_pass import CARRIED_TOKENS

CONTEXT = 90


def profile_of(model, **parameters):
    parameters = {"chunk": 37, **parameters}
    profile = tiny.make_profile(model, CONTEXT, 0.4, scorer="reconstruction", parameters=parameters)
    return tiny.by_head(profile, spread=9)


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
    votes[:, : tiny.SINKS] = votes[:, CONTEXT - tiny.WINDOW :] = 0.0
    return votes.reshape(2, heads // 2, CONTEXT).max(axis=1)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"nearby": 6}, {"votes": 7, "votes_weight": 3.0}])
def test_the_scores_are_those_of_plain_forwards(family, options):
    model = tiny.tiny_model(family, "eager")
    ids = tiny.prompt(CONTEXT)
    profile = profile_of(model, **options)
    cache = make_cache(model, profile)
    run(model, ids, cache)
    for layer in profile.shape.full_layers:
        scores = reconstruction_scores(model, ids, layer, options.get("nearby", CONTEXT))
        if number := options.get("votes"):
            voting = get_scorer("lookahead", window=tiny.WINDOW, votes=number)
            votes = voting.score(states_seen(model, ids)[layer], sinks=tiny.SINKS)[0].numpy()
            weighted = options["votes_weight"] * votes
            assert (weighted > scores).any()
            assert (weighted < scores).any()
            scores = np.maximum(scores, weighted)
        for head in range(2):
            best = int(profile.budgets[layer, head]) - tiny.SINKS - tiny.WINDOW
            wanted = np.argsort(-scores[head], kind="stable")[:best].tolist()
            wanted += [*range(tiny.SINKS), *range(CONTEXT - tiny.WINDOW, CONTEXT)]
            kept = cache.kept_indices(layer)[0, head]
            assert sorted(wanted) == kept[kept >= 0].tolist()


def test_nothing_of_a_repetition_stays():
    """Bytes, columns, sliding layers and the prompt's own logits are as without one."""
    for family in ("llama", "gemma3"):
        model, ids = tiny.tiny_model(family), tiny.prompt(CONTEXT, 2)
        profile = profile_of(model)
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


def test_where_nothing_has_to_go_nothing_is_repeated(model):
    ids, forwards = tiny.prompt(CONTEXT), []
    profile = tiny.make_profile(model, CONTEXT, 1.0, scorer="reconstruction")
    cache, plain = make_cache(model, profile), DynamicCache(config=model.config)
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for tokens in (ids, tiny.prompt(3, seed=2)):
        assert torch.equal(run(model, tokens, cache), run(model, tokens, plain))
    assert len(forwards) == 4


# A second read stays within the tokens that the model was made for


REPEATED = CARRIED_TOKENS + 37  # the longest repetition: a further piece


def test_how_far_a_second_read_goes_is_how_far_it_runs(model):
    """Against the tokens that the repetition's forwards really have."""
    sizes = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    for tokens in (60, 70, 74, 75, 83, CONTEXT):
        cache = make_cache(model, profile_of(model))
        sizes.clear()
        run(model, tiny.prompt(tokens), cache)
        assert cache.methods[0].policy.scorer.later.furthest(tokens) == max(sizes[1:])


def with_limit(limit):
    return tiny.tiny_model(max_position_embeddings=limit)


def test_a_repetition_beyond_the_limit_is_refused_before_anything_runs():
    ids, least = tiny.prompt(CONTEXT), CONTEXT + REPEATED
    model = with_limit(least)
    cache = make_cache(model, profile_of(model))
    run(model, ids, cache)
    assert cache.reduced
    model = with_limit(least - 1)
    cache = make_cache(model, profile_of(model))
    said = r"90 tokens and 45 of a repetition are beyond the 134 .*\(chunk=36\)"
    with pytest.raises(InputError, match=said):
        run(model, ids, cache)
    assert cache.get_seq_length() == 0
    run(model, tiny.prompt(CONTEXT - 1), cache)  # the cache is as it was
    assert cache.reduced
    smaller = make_cache(model, profile_of(model, chunk=36))
    run(model, ids, smaller)  # what the message says fits
    model = with_limit(CONTEXT + 10)
    cache = make_cache(model, profile_of(model))
    with pytest.raises(InputError, match="beyond the 100 .*; shorten it or change scorer"):
        run(model, ids, cache)


def test_chunks_are_refused_as_soon_as_it_is_known():
    ids = tiny.prompt(CONTEXT)
    model = with_limit(CONTEXT + REPEATED - 1)
    profile = profile_of(model)
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
    cache = make_cache(model, profile_of(model))
    run(model, tiny.prompt(CONTEXT, 2), cache, mask=mask, position_ids=positions)
    assert cache.reduced
    cache = make_cache(model, profile_of(model))
    with pytest.raises(InputError, match="beyond the 96"):
        run(
            model,
            tiny.prompt(CONTEXT, 2),
            cache,
            mask=mask,
            position_ids=positions + 50,
        )
