"""Prompts that are held whole until scorers have seen what comes after them."""

from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import follow, head_entries, noted_repetitions, read, run
from scorer_oracle import full_attention
from transformers import DynamicCache

from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.models.attention import intercept_attention
from kvalloc.models.loading import shape_of
from kvalloc.runtime import make_cache
from kvalloc.runtime.policies import changed_policy
from kvalloc.scorers import get_scorer

CONTEXT = 90
NAMES = ("lookahead", "reconstruction", "nearby")
OPTIONS = {
    "lookahead": {"tokens": 5, "pool": 3},
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


def lookahead_scores(model, ids, layer):
    """The answer by `generate`, everything in one forward, the whole attention matrix."""
    out = model.generate(ids, max_new_tokens=5, do_sample=False)
    states = seen(model, out)[layer]
    weights = full_attention(states)[0]
    rows = np.r_[CONTEXT - tiny.WINDOW : CONTEXT, CONTEXT : CONTEXT + 5]
    # the window's rows see no answer, and the answer's rows see the prompt and what is before
    votes = weights[:, rows, :CONTEXT].mean(axis=1)
    return pooled(votes, tiny.SINKS, tiny.WINDOW, 3, "mean")


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
    read(model, ids, cache)
    naive = {
        "lookahead": lookahead_scores,
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


@pytest.mark.parametrize("level", ["layer", "head"])
def test_heads_mix_such_scorers_with_others_and_share_passes(level, monkeypatch):
    """H2O needs all of the prompt's queries, which are held, too."""
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    names = ("lookahead", "h2o", "reconstruction", "lookahead", "tova")
    options = ({"tokens": 3}, {}, {"pool": 3, "chunk": 37}, {"tokens": 6}, {})
    profile = profile_of(model, "reconstruction", level)
    others = tuple(
        changed_policy(profile.policy, name, own).replace(label=f"{name}{place}")
        for place, (name, own) in enumerate(zip(names, options, strict=True))
    )
    table = np.arange(profile.budgets.size).reshape(profile.budgets.shape) % 6
    if level == "layer":
        table[:] = table[:, :1]
    mixed = profile.replace(other_policies=others, unit_policies=table)
    forwards = noted_repetitions(monkeypatch)
    cache = make_cache(model, mixed)
    followed = follow(model, cache, run(model, ids, cache))
    # six tokens that followed, one repetition in three pieces of which two lead over
    assert followed.shape[1] == 6
    assert sorted(forwards) == sorted([37, 8 + 37, 8 + CONTEXT - 74])
    for layer, head in np.ndindex(*table.shape):
        policy = mixed.policies[table[layer, head]]
        own = make_cache(model, mixed.replace(policy=policy, other_policies=(), unit_policies=None))
        run(model, ids, own)
        run(model, followed, own)
        assert torch.equal(cache.kept_indices(layer)[0, head], own.kept_indices(layer)[0, head])


@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_has_to_go_nothing_is_repeated_or_awaited(name, monkeypatch):
    monkeypatch.setattr("kvalloc.runtime.prompt.repeat_prompt", None)
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT)
    profile = tiny.make_profile(model, CONTEXT, 1.0, scorer=SCORERS.get(name, name))
    cache, plain = make_cache(model, profile), DynamicCache(config=model.config)
    for tokens in (ids, tiny.prompt(3, seed=2)):
        assert torch.equal(run(model, tokens, cache), run(model, tokens, plain))
        assert not cache.awaited_tokens


def test_what_cannot_be_right_is_refused():
    with pytest.raises(InputError, match="votes is 0"):
        get_scorer("lookahead", tokens=0, votes=0)


def test_chunks_that_cannot_be_read_in_part_are_refused_at_once(model):
    """Heads that keep different numbers: said before a chunk runs, not after the last one."""
    profile = tiny.by_head(tiny.make_profile(model, 90, 0.4, scorer="lookahead"), spread=9)
    cache = make_cache(model, profile, policy="mpcache", prompt_tokens=90)
    said = pytest.raises(UnsupportedRequestError, match="leaves entries unread")
    with torch.no_grad(), said:
        model(tiny.prompt(60), past_key_values=cache)
