"""Entries that each prompt hands out among all heads by score."""

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run, states_seen
from scorer_oracle import full_attention

from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.selection import handed_out

CONTEXT, PROTECTED = 90, 6


def by_prompt(model):
    """A profile whose scorer looks at the window's queries."""
    profile = tiny.make_profile(model, CONTEXT, 0.4, parameters={"pool": 1})
    return tiny.by_head(profile).replace(by_prompt=True)


# Handing out


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
@pytest.mark.parametrize(
    ("attention", "by_layer"), [("sdpa", False), ("eager", False), ("sdpa", True)]
)
def test_the_best_of_all_heads_stay_together_or_where_a_layer_is_read(family, attention, by_layer):
    model, ids = tiny.tiny_model(family, attention), tiny.prompt(CONTEXT)
    profile = by_prompt(model)
    cache = build_rows(model, [Way(profile=profile, options=CacheOptions(by_layer=by_layer))])
    run(model, ids, cache)
    full = list(profile.shape.full_layers)
    scores, granted = naive_scores(model, ids, profile), profile.budgets_for(CONTEXT)[full]
    if by_layer:
        for place, layer in enumerate(full):
            assert_best(cache, [layer], scores[place : place + 1], int(granted[place].sum()))
    else:
        assert_best(cache, full, scores, int(granted.sum()))
    assert cache.kept_tokens[full].sum() == granted.sum()
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


def naive_scores(model, ids, profile):
    """The scorer's scores without sinks and window, from plain forwards."""
    first = CONTEXT - tiny.WINDOW
    seen, found = states_seen(model, ids), []
    for layer in profile.shape.full_layers:
        votes = full_attention(seen[layer])[0][:, first:, tiny.SINKS : CONTEXT - tiny.WINDOW]
        found.append(votes.mean(axis=1).reshape(2, -1, votes.shape[-1]).mean(axis=1))
    return np.stack(found)
