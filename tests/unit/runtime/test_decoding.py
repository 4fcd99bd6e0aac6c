"""What followed competes with what is kept: what stays, how much, and what looks back over it."""

import dataclasses

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run, states_seen

import kvalloc
from kvalloc.extensions.making import make_cache
from kvalloc.runtime.policies import base, changed_policy
from kvalloc.scorers import get_scorer

# What follows a prompt competes every so many tokens: what stays, how much, and by what


CONTEXT = 60


def feed(model, cache, ids, sizes):
    return torch.cat([run(model, part, cache) for part in ids.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize(
    ("policy", "scorer"),
    [
        *(("score", name) for name in ("xkv", "h2o", "a2sf", "lookahead", "reconstruction")),
        ("merge", "xkv"),
        *(("attention_matching", name) for name in ("reconstruction", "xkv", "h2o", "knorm")),
        ("attention_matching", "expected_attention"),
    ],
)
@pytest.mark.usefixtures("unrounded")
def test_what_followed_competes_as_in_one_long_prompt(policy, scorer):
    """Behind a prompt of which nothing goes; the latest vote where a scorer needs a second read."""
    model, begun = tiny.tiny_model(), tiny.SINKS + tiny.WINDOW
    every = CONTEXT - begun
    profile = tiny.make_profile(model, CONTEXT, 0.5, scorer=scorer)
    cache = kvalloc.make_cache(model, profile, policy=policy, decode_every=every)
    ids = tiny.prompt(CONTEXT)
    feed(model, cache, ids, [begun, 20, every - 20])
    again = "lookahead" if scorer == "reconstruction" else scorer
    votes = {"votes": every} if again == "lookahead" else {}
    whole = tiny.make_profile(model, CONTEXT, 0.5, scorer=again, parameters=votes)
    at_once = kvalloc.make_cache(model, whole, policy=policy if policy == "merge" else "score")
    feed(model, at_once, ids, [CONTEXT])
    assert (cache.kept_tokens == profile.budgets).all()
    assert tiny.same_kept(cache, at_once)
    for one, other in zip(cache.layers, at_once.layers, strict=True):
        every = np.arange(len(cache.rows))
        compared = slice(1 if policy == "attention_matching" else 2)  # which fits values
        pairs = zip(
            one.kept.padded(every)[compared], other.kept.padded(every)[compared], strict=True
        )
        for ours, theirs in pairs if one is cache.layers[0] else ():
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["snapkv", "tova"])
def test_no_query_sees_a_place_of_no_entry(name):
    one, place = states_seen(tiny.tiny_model(), tiny.prompt(30))[1], 10
    states = dataclasses.replace(one, queries=one.queries[:, :, -8:], mask=None)
    absent = torch.zeros(1, tiny.N_KV_HEADS, 32, dtype=torch.bool)
    absent[..., place : place + 2] = True
    keys, values = torch.zeros(2, *absent.shape, one.keys.shape[-1])
    keys[:, :, ~absent[0, 0]], values[:, :, ~absent[0, 0]] = one.keys, one.values
    padded = dataclasses.replace(states, keys=keys, values=values, absent=absent)
    options = {} if name != "snapkv" else {"pool": 1}
    scorer = get_scorer(name, window=tiny.WINDOW, **options)
    expected, found = (scorer.score(each, sinks=tiny.SINKS) for each in (states, padded))
    torch.testing.assert_close(found[..., ~absent[0, 0]], expected, atol=1e-5, rtol=1e-4)
    assert not found[absent].any()


def test_1536_tokens_stay_within_the_share_and_the_stated_slack():
    """Packed entries, budgets by head: storages read at every token."""
    prompt, every, votes = 512, 64, 128
    model = tiny.tiny_model(num_hidden_layers=2, max_position_embeddings=8192)
    profile = tiny.by_head(tiny.make_profile(model, prompt, 0.2, scorer="lookahead"))
    profile = profile.replace(bits=np.array([[16, 16], [8, 4]]))
    cache = kvalloc.make_cache(model, profile, policy="attention_matching", decode_every=every)
    token = feed(model, cache, tiny.prompt(prompt), [prompt])[:, -1:].argmax(-1)
    settled = prompt
    shape = profile.shape
    slack = every * shape.n_kv_heads * shape.n_layers * shape.plain_bytes_per_entry
    for seen in range(prompt + 1, prompt + 1537):
        token = feed(model, cache, token, [1])[:, -1:].argmax(-1)
        settled = seen if seen - settled == every else settled
        budgets = profile.budgets_for(settled)
        assert (cache.kept_tokens == budgets + seen - settled).all()
        assert cache.retained_bytes <= profile.retained_bytes_at(settled) + slack
        for layer in cache.layers:
            for held in layer.notes.queries.buffers:
                assert held.shape[2] <= votes
                assert held.untyped_storage().nbytes() <= held.nbytes
    assert cache.get_seq_length() == prompt + 1536


# Policies that look back over more queries than the window, in chunks with evictions between


BEFORE = 60
PARAMETERS = {"mpcache": {"rows_share": 0.5}, "nacl": {"proxy_share": 0.5}}


def attention_sums(states, queries, places, columns):
    """Sum over rows of the softmax over the stored keys at or before each, (batch, heads, n)."""
    group = queries.shape[1] // states.keys.shape[1]
    logits = queries[:, :, places] @ states.keys.repeat_interleave(group, 1).mT * states.scaling
    seen = columns.repeat_interleave(group, 1)[:, :, None] <= torch.tensor(places)[:, None]
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1).sum(dim=2)
    return weights.unflatten(1, (-1, group)).mean(dim=2)


@pytest.mark.parametrize(
    ("policy", "level"), [("mpcache", "layer"), ("nacl", "layer"), ("nacl", "head")]
)
def test_each_query_sees_what_is_left_before_it(model, monkeypatch, policy, level):
    profile = tiny.make_profile(model, BEFORE, 0.3)
    if level == "head":
        profile = tiny.by_head(profile, spread=4)
    changed = changed_policy(profile.policy, policy, PARAMETERS[policy])
    cache = make_cache(model, profile, prompt_tokens=BEFORE, policy=changed)
    ids = tiny.prompt(BEFORE)
    seen = []
    summed = base.weighted_rows

    def spy(states, weights):
        found = summed(states, weights)
        if states.layer == 0:
            seen.append((states, found))
        return found

    monkeypatch.setattr(base, "weighted_rows", spy)
    queries = states_seen(model, ids)[0].queries  # which no eviction changes
    group = tiny.N_QUERY_HEADS // tiny.N_KV_HEADS
    end = checked = 0
    for part in ids.split(10, dim=1):
        before = cache.kept_indices(0) if end else torch.empty(1, tiny.N_KV_HEADS, 0)
        end += part.shape[1]
        seen.clear()
        run(model, part, cache)
        for states, found in seen:
            heads = range(states.first_head, states.first_head + states.keys.shape[1])
            own = [before[0, head][before[0, head] >= 0].tolist() for head in heads]
            columns = [[*kept, *range(end - part.shape[1], end)] for kept in own]
            asked = queries[:, heads[0] * group : (heads[-1] + 1) * group]
            n_rows = states.queries.shape[2]
            if not states.gaps:
                continue
            checked += 1
            expected = attention_sums(
                states, asked, list(range(end - n_rows, end)), torch.tensor([columns])
            )
            assert (found - expected).abs().max() < 1e-5
    assert checked >= 2
