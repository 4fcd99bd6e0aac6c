"""Entries that each prompt hands out among all heads by score."""

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from prompt_runs import padded_rows, run, states_seen
from scorer_oracle import full_attention

from kvalloc.errors import InputError
from kvalloc.extensions.making import make_cache
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.selection import handed_out

CONTEXT, PROTECTED = 90, 6


def by_prompt(model):
    """A profile whose scorer looks at the window's queries."""
    profile = tiny.make_profile(model, CONTEXT, 0.4, parameters={"pool": 1})
    return tiny.by_head(profile).replace(by_prompt=True)


def total_of(profile, tokens):
    return int(profile.budgets_for(tokens)[list(profile.shape.full_layers)].sum())


# Handing out


@given(
    scores=arrays.arrays(np.float32, (2, 2, 4), elements=st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    total=st.integers(0, 40),
    protected=st.integers(0, 3),
)
def test_no_other_budgets_of_that_total_hold_more(scores, total, protected):
    found = handed_out([torch.from_numpy(one) for one in scores], total, protected=protected)
    wanted = min(max(total, 4 * protected), 4 * (protected + 4))
    assert found.sum() == wanted
    assert found.min() >= protected
    assert found.max() <= protected + 4
    best = np.sort(scores, axis=-1)[..., ::-1].reshape(4, 4)
    curves = np.concatenate([np.zeros((4, 1)), best.cumsum(axis=-1)], axis=1)
    counts = (found - protected).ravel()
    held = curves[np.arange(4), counts].sum()
    table = {0: 0.0}  # entries to what they hold at most, head by head
    for curve in curves:
        table = {
            n: max(table[n - k] + curve[k] for k in range(5) if n - k in table)
            for n in range(max(table) + 5)
        }
    assert held == pytest.approx(table[int(counts.sum())])


@pytest.mark.parametrize(
    ("evictable", "layers", "total", "protected", "expected"),
    [
        (0, 2, 50, 5, [[5, 5], [5, 5]]),
        (3, 1, 4, 5, [[5, 5]]),
        (3, 2, 4, 0, [[3, 1], [0, 0]]),  # among equal scores the earlier head wins
    ],
)
def test_where_there_is_no_room_or_all_are_equal(evictable, layers, total, protected, expected):
    scores = [torch.ones(2, evictable)] * layers
    assert handed_out(scores, total, protected=protected).tolist() == expected


# In a cache


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_best_of_all_heads_together_stay(family, attention):
    model, ids = tiny.tiny_model(family, attention), tiny.prompt(CONTEXT)
    profile = by_prompt(model)
    cache = make_cache(model, profile)
    run(model, ids, cache)
    full = list(profile.shape.full_layers)
    scores = naive_scores(model, ids, profile)
    assert_best(cache, full, scores, total_of(profile, CONTEXT))
    assert cache.kept_tokens[full].sum() == total_of(profile, CONTEXT)
    assert np.unique(cache.kept_tokens[full]).size > 2


def assert_best(cache, layers, scores, total):
    """Sinks, window and, in so many entries of all heads of these layers, the best."""
    room = total - PROTECTED * scores.shape[0] * scores.shape[1]
    least = np.sort(scores.ravel())[::-1][room - 1]
    for place, head in np.ndindex(len(layers), 2):
        best = np.flatnonzero(scores[place, head] >= least) + tiny.SINKS
        wanted = {*range(tiny.SINKS), *best.tolist(), *range(CONTEXT - tiny.WINDOW, CONTEXT)}
        kept = cache.kept_indices(layers[place])[0, head]
        assert {int(one) for one in kept if one >= 0} == wanted


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_best_of_each_layers_heads_stay_where_it_is_read(family):
    model, ids = tiny.tiny_model(family), tiny.prompt(CONTEXT)
    profile = by_prompt(model)
    cache = build_rows(model, [Way(profile=profile, options=CacheOptions(by_layer=True))])
    run(model, ids, cache)
    assert cache.reduced
    scores = naive_scores(model, ids, profile)
    budgets = profile.budgets_for(CONTEXT)
    for place, layer in enumerate(profile.shape.full_layers):
        own = scores[place : place + 1]
        assert_best(cache, [layer], own, int(budgets[layer].sum()))


@pytest.mark.parametrize("chunk", [CONTEXT, 25])
@pytest.mark.parametrize("decode_every", [None, 4])
def test_heads_of_a_layer_share_its_budget_in_chunks_and_while_decoding(model, chunk, decode_every):
    """Of rows with padding, too, each as if it were alone."""
    profile, rows = by_prompt(model), [tiny.prompt(n, seed=n) for n in (CONTEXT, 61)]
    ids, mask, positions = padded_rows(rows, "left")
    options = CacheOptions(by_layer=True, decode_every=decode_every)
    cache = build_rows(model, [Way(profile=profile, options=options)], prompt_tokens=CONTEXT)
    for first in range(0, CONTEXT, chunk):
        last = first + chunk
        run(model, ids[:, first:last], cache, mask[:, :last],
            position_ids=positions[:, first:last])  # fmt: skip
    for row, own in enumerate(rows):
        wanted = profile.budgets_for(own.shape[1]).sum(axis=1)
        assert (cache.kept_tokens_by_row[row].sum(axis=1) == wanted).all()
    assert len(np.unique(cache.kept_tokens)) > 2
    alone = build_rows(model, [Way(profile=profile, options=options)], prompt_tokens=CONTEXT)
    for part in rows[0].split(chunk, dim=1):
        run(model, part, alone)
    if chunk == CONTEXT:
        assert (alone.kept_tokens == cache.kept_tokens_by_row[0]).all()
    every, before = decode_every or 64, alone.kept_tokens
    for followed in range(1, 10):
        run(model, tiny.prompt(1, seed=followed), alone)
        if followed % every:
            assert (alone.kept_tokens == before + followed % every).all()
            continue
        before = alone.kept_tokens
        assert before.sum() == profile.budgets_for(CONTEXT + followed).sum()


def naive_scores(model, ids, profile):
    """The scorer's scores without sinks and window, from plain forwards."""
    first = CONTEXT - tiny.WINDOW
    seen, found = states_seen(model, ids), []
    for layer in profile.shape.full_layers:
        votes = full_attention(seen[layer])[0][:, first:, tiny.SINKS : CONTEXT - tiny.WINDOW]
        found.append(votes.mean(axis=1).reshape(2, -1, votes.shape[-1]).mean(axis=1))
    return np.stack(found)


# As a file, and what it refuses


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"level": "layer"}, "different within a layer"),
        ({"page_tokens": 4}, "by_prompt is true with pages"),
        ({"bits": (16, 4)}, "by_prompt is true with bits that differ between heads"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, said):
    profile = by_prompt(tiny.tiny_model())
    if "bits" in changes:
        changes = {"bits": np.broadcast_to(changes["bits"], profile.budgets.shape).copy()}
    with pytest.raises(InputError, match=said):
        profile.replace(**changes)
