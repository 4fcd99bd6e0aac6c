"""MPCache's clusters against loops, and what a decoded token really reads."""

import copy
import math

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import policy, run
from scorer_oracle import full_attention, make_states

import kvalloc
from kvalloc.extensions.mpcache import ClusterReader

SMALL = {"coarse_tokens": 8, "fine_tokens": 4, "coarse_share": 0.5, "fine_share": 0.5}


def small(**parameters):
    return policy("mpcache", **{**SMALL, **parameters})


def read_in_loops(states, row, head, *, start, n_coarse):
    """Entries that one head reads, between the sinks and what fills no cluster."""
    group = states.queries.shape[1] // states.keys.shape[1]
    query = states.queries[row, head * group : (head + 1) * group, 0].double().numpy().mean(axis=0)
    keys = states.keys[row, head].double().numpy()

    def near(first, size):
        cluster = keys[first : first + size]
        return float(query @ (0.6 * cluster.max(axis=0) + 0.4 * cluster.min(axis=0)))

    coarse = [start + 8 * c for c in range(n_coarse)]
    coarse = sorted(coarse, key=lambda c: -near(c, 8))[: math.ceil(0.5 * n_coarse)]
    fine = [first for c in coarse for first in (c, c + 4)]
    fine = sorted(fine, key=lambda f: -near(f, 4))[: math.ceil(0.5 * len(fine))]
    return sorted(entry for first in fine for entry in range(first, first + 4))


class Entries:
    """Stands in for those of a layer, whose clusters are noted."""


def chosen(reader, states, n, *, place=0, step=1, batch=1):
    """What is read where two heads keep an entry at every so many columns."""
    positions = torch.arange(0, step * n, step, dtype=torch.int32).expand(batch, 2, -1)
    return reader.chosen(states, positions, place=place, kept=Entries())


def test_clusters_agree_with_loops():
    states = make_states(batch=2, n_tokens=53, n_new_tokens=1)
    reader = small().extension(sinks=2, window=4)
    # 50 entries of the prompt: 2 sinks, five clusters of 8, 4 that fill none, 4 of the window
    found = chosen(reader, states, 50, batch=2)
    assert found is not None
    for row, head in np.ndindex(2, 2):
        inside = read_in_loops(states, row, head, start=2, n_coarse=5)
        assert found[row, head].tolist() == [0, 1, *inside, *range(42, 53)]
    few = make_states(n_tokens=20, n_new_tokens=1)
    assert chosen(reader, few, 19) is None  # read whole


def test_the_static_half_sums_the_last_rows():
    states = make_states(batch=2)
    budgets = torch.full((2, 2), 17)
    kept = small(rows_share=0.2).keep(states, budgets, sinks=2, window=4)
    attention = full_attention(states)[:, :, -8:].sum(axis=2).reshape(2, 2, 3, 40).mean(axis=2)
    must = {0, 1, 36, 37, 38, 39}
    for place in np.ndindex(2, 2):
        free = sorted(set(range(40)) - must, key=lambda t: -attention[*place, t])
        assert set(kept[place].nonzero()[:, 0].tolist()) == must | set(free[:11])


def test_the_second_of_a_pair_reads_what_the_first_does():
    """With the same entries stored the clusters are the same; the first two layers never share."""
    first, second = (make_states(n_tokens=53, n_new_tokens=1, seed=seed) for seed in (0, 1))
    for share, places, same in ((True, (2, 3), 1), (True, (0, 1), 0), (False, (2, 3), 0)):
        reader = small(share_layers=share).extension(sinks=2, window=4)
        led = chosen(reader, first, 50, place=places[0])
        follows = chosen(reader, second, 50, place=places[1])
        assert torch.equal(led, follows) == bool(same)


def test_a_follower_with_other_entries_reads_its_nearest_positions():
    first, second = (make_states(n_tokens=53, n_new_tokens=1, seed=seed) for seed in (0, 1))
    reader = small().extension(sinks=2, window=4)
    led = chosen(reader, first, 50, place=2)
    # the follower's entry i is position 2 i: its cluster c covers positions 8 c .. 8 c + 7
    follows = chosen(reader, second, 50, place=3, step=2)
    assert follows.shape == led.shape
    for head in range(2):
        read = set(led[0, head].tolist()) & set(range(2, 42))
        held = [sum(2 * i in read for i in range(f, f + 4)) for f in range(2, 42, 4)]
        best = sorted(range(10), key=lambda c: (-held[c], c))[: (len(follows[0, head]) - 13) // 4]
        inside = sorted(2 + 4 * c + i for c in best for i in range(4))
        assert follows[0, head].tolist() == [0, 1, *inside, *range(42, 53)]


CONTEXT = 400


def noted_reads(monkeypatch):
    """How many entries the layers' attention is given from now on."""
    read = []
    function = torch.nn.functional.scaled_dot_product_attention

    def noted(query, key, *args, **kwargs):
        read.append(int(key.shape[2]))
        return function(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    return read


def test_decoding_reads_less_and_stores_the_same(model, monkeypatch):
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    cache = kvalloc.make_cache(model, profile, policy="mpcache")
    run(model, tiny.prompt(CONTEXT), cache)
    before, read = cache.retained_bytes, noted_reads(monkeypatch)
    run(model, tiny.prompt(1, seed=1), cache)
    budgets = profile.budgets[:, 0].tolist()
    expected = []
    for budget in budgets:
        n_coarse = (budget - tiny.SINKS - tiny.WINDOW) // 32
        fine = math.ceil(0.28 * 2 * math.ceil(0.7 * n_coarse))
        expected.append(budget - 32 * n_coarse + 16 * fine + 1)
    assert read == expected
    assert max(read) < 0.5 * min(budgets)
    assert cache.retained_bytes == before + profile.shape.plain_bytes_per_entry * 2 * tiny.N_LAYERS


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.usefixtures("unrounded")
def test_the_cache_answers_as_if_the_unread_were_hidden(monkeypatch, attention):
    model = tiny.tiny_model("llama", attention)
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    cache = kvalloc.make_cache(model, profile, policy="mpcache")
    ids, token = tiny.prompt(CONTEXT, 2), tiny.prompt(1, 2, seed=1)
    read = {}
    function = ClusterReader.chosen

    def noted(self, states, positions, **kwargs):
        indices = function(self, states, positions, **kwargs)
        stored = positions.long()
        inside = [row[row < stored.shape[-1]] for row in indices.flatten(0, 1)]
        flat = zip(stored.flatten(0, 1), inside, strict=True)
        read[states.layer] = torch.stack([own[i] for own, i in flat]).view(2, 2, -1)
        return indices

    monkeypatch.setattr(ClusterReader, "chosen", noted)
    run(model, ids, cache)
    logits = run(model, token, cache)
    everything = tiny.Oracle(model, ids, tiny.kept_of(cache)).logits(token)
    oracle = tiny.Oracle(model, ids, read)
    assert (logits - oracle.logits(token)).abs().max() < 1e-4
    assert (logits - everything).abs().max() > 1e-3


def test_rows_copies_and_new_prompts_have_clusters_of_their_own(model):
    profile = tiny.make_profile(model, CONTEXT, 0.5)
    cache = kvalloc.make_cache(model, profile, policy="mpcache")
    ids, tokens = tiny.prompt(CONTEXT, 2), tiny.prompt(2, 2, seed=1)

    def answers(cache, rows):
        parts = [run(model, tokens[rows, i : i + 1], cache) for i in range(2)]
        return torch.cat(parts, dim=1)

    run(model, ids, cache)
    twin = copy.deepcopy(cache)
    expected = answers(cache, [0, 1])
    assert torch.equal(answers(twin, [0, 1]), expected)
    cache.reset()
    run(model, ids, cache)
    run(model, tokens[:, :1], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = run(model, tokens[[1, 0], 1:], cache)
    np.testing.assert_allclose(swapped[[1, 0]], expected[:, 1:], atol=1e-4)
