"""Which entries stay, whatever the scores are, and how many fit into so many bytes."""

import numpy as np
import pytest
import torch
from factories import make_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvalloc.accounting.costs import (
    BIT_WIDTHS,
    MIXED_FROM,
    MIXES,
    counts_of,
    head_bytes,
    stored_bytes,
    tier_counts,
    within_bytes,
)
from kvalloc.runtime.selection import chosen_widths, evictable, keep_best

MIX = 532


def wide_first(entries):
    """The widths of so many entries, by the definition of a mix."""
    counts = dict.fromkeys(MIXES[MIX], 0) | {max(MIXES[MIX]): min(entries, MIXED_FROM)}
    given = []
    for place in range(entries - min(entries, MIXED_FROM)):
        latest = given[place // 10 * 10 :]  # of each ten: whose share is the farthest behind
        behind = {w: n * (len(latest) + 1) - 10 * latest.count(w) for w, n in MIXES[MIX].items()}
        given.append(max(behind, key=behind.get))
        counts[given[-1]] += 1
    return [width for width in sorted(counts, reverse=True) for _ in range(counts[width])]


@st.composite
def cases(draw):
    tokens = draw(st.integers(1, 40))
    sinks = draw(st.integers(0, tokens))
    window = draw(st.integers(0, tokens - sinks))
    budget = draw(st.integers(sinks + window, tokens))
    # Few distinct values, so that ties are the rule.
    few = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0e38])
    anything = st.floats(0, 2.0**99, width=32)
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), tokens)
    scores = draw(hnp.arrays(np.float32, shape, elements=draw(st.sampled_from([few, anything]))))
    return scores, budget, sinks, window


@settings(max_examples=150, deadline=None)
@given(cases())
def test_selection(case):
    scores, budget, sinks, window = case
    batch, heads, tokens = scores.shape
    budgets = torch.full((batch, heads), budget)
    kept = keep_best(torch.from_numpy(scores), budgets, sinks=sinks, window=window).numpy()
    again = keep_best(torch.from_numpy(scores), budgets, sinks=sinks, window=window).numpy()
    assert np.array_equal(kept, again)
    # beside places of no entry, which are anywhere, the same entries stay
    absent = np.random.default_rng(tokens).random((batch, heads, tokens + 9)).argsort() >= tokens
    spread = np.full(absent.shape, 9.0, dtype=np.float32)
    spread[~absent] = scores.ravel()
    among = keep_best(
        torch.from_numpy(spread),
        budgets,
        sinks=sinks,
        window=window,
        absent=torch.from_numpy(absent),
        counts=torch.full((batch, heads), tokens),
    ).numpy()
    assert not (among & absent).any()
    assert np.array_equal(among[~absent].reshape(kept.shape), kept)
    counts = counts_of(np.full((batch, heads), budget), np.array(MIX))
    free = evictable(torch.from_numpy(scores), sinks=sinks, window=window)
    widths = chosen_widths(torch.from_numpy(scores), torch.from_numpy(kept), counts, free).numpy()
    must = {*range(sinks), *range(tokens - window, tokens)}
    for row in range(batch):
        for head in range(heads):
            mine = np.flatnonzero(kept[row, head])
            assert must <= set(mine.tolist())
            # The plainest statement of the rule: sort by score, then by position.
            free = [t for t in range(tokens) if t not in must]
            free.sort(key=lambda t: (-scores[row, head, t], t))
            best = free[: budget - sinks - window]
            assert set(mine.tolist()) == must | set(best)
            # the best have the widest
            expected = dict(zip(sorted(must) + best, wide_first(budget), strict=True))
            assert [expected.get(t, 0) for t in range(tokens)] == widths[row, head].tolist()


@given(
    budgets=st.lists(st.integers(0, 500), min_size=4, max_size=4),
    bits=st.lists(st.sampled_from(BIT_WIDTHS), min_size=2, max_size=2),
    most=st.integers(0, 2**18),
    minimum=st.integers(0, 20),
)
def test_budgets_within_bytes_are_the_largest_of_one_factor(budgets, bits, most, minimum):
    shape = make_shape(n_layers=2, n_kv_heads=2)
    table, widths = np.array(budgets).reshape(2, 2), np.array(bits)[:, None]
    found = within_bytes(table, most, widths, shape, minimum=minimum)

    def taken(numbers):
        return int(head_bytes(numbers, widths, shape).sum())

    floor, whole = np.minimum(table, minimum), max(*budgets, 1)
    every = [np.maximum(table * part // whole, floor) for part in range(whole + 1)]
    fit = [own for own in every if taken(own) <= most]
    assert (found == (fit[-1] if fit else floor)).all()


@pytest.mark.parametrize("bits", MIXES)
def test_the_counts_of_a_mix_add_up_and_never_fall(bits):
    shape, entries = make_shape(head_dim=64), np.arange(400)
    counts = tier_counts(entries, bits)
    assert (sum(counts.values()) == entries).all()
    assert all((np.diff(one) >= 0).all() for one in counts.values())
    of_ten = {width: int(one[122] - one[112]) for width, one in counts.items()}
    assert of_ten == MIXES[bits]
    each = sum(stored_bytes(one, width, shape) for width, one in counts.items())
    assert (stored_bytes(entries, bits, shape) == each).all()
