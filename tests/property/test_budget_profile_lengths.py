"""Budgets at another length: nothing lost, nothing made up, nobody starved."""

import numpy as np
import pytest
from factories import make_budget_profile, make_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.accounting.costs import POSITION_BYTES, full_bytes
from kvalloc.errors import InputError

PROTECTED = 5
CONTEXT = 40

budget = st.one_of(st.just(CONTEXT), st.integers(PROTECTED, CONTEXT))
profiles = st.builds(
    lambda rows, page: make_budget_profile(rows, page_tokens=page, context_tokens=CONTEXT),
    rows=st.lists(st.lists(budget, min_size=2, max_size=2), min_size=1, max_size=4),
    page=st.sampled_from([1, 1, 4, 16]),
)


def share_of(profile, context):
    ratio = (context - PROTECTED) / (CONTEXT - PROTECTED)
    return PROTECTED + (profile.budgets - PROTECTED) * ratio


@settings(max_examples=300)
@given(profile=profiles, context=st.one_of(st.integers(1, 300), st.integers(1, 131_072)))
def test_within_limits_and_never_above_the_share(profile, context):
    budgets, page, whole = (
        profile.budgets_for(context),
        profile.page_tokens,
        profile.budgets == CONTEXT,
    )
    assert budgets.shape == profile.budgets.shape
    assert budgets.dtype == np.int64
    assert np.all(budgets <= context)
    assert np.all(budgets >= min(context, PROTECTED))
    assert np.all(budgets[whole] == context)
    if page == 1 and np.all(whole):
        assert profile.retained_bytes_at(context) == full_bytes(profile.shape, context)
    if context == CONTEXT:
        assert budgets.tolist() == profile.budgets.tolist()
    elif context > PROTECTED:
        # A floor of one page is more than a tiny share; nothing else may exceed it.
        share = share_of(profile, context)
        least = min(context, -(-PROTECTED // page) * page)
        assert budgets.sum() <= np.maximum(share, least).sum() + 1e-6
        if page == 1:
            assert np.all(np.abs(budgets - share) < 1.5)
            # Less than an entry is left over in all, but whoever is kept whole cannot take it.
            assert np.any(whole) or budgets.sum() > share.sum() - 1


@settings(max_examples=30)
@given(profile=profiles)
def test_a_longer_prompt_keeps_no_less(profile):
    lengths = [*range(1, 60), 200, 201, 100_000]
    totals, page = [], profile.page_tokens
    previous = np.zeros_like(profile.budgets)
    for context in lengths:
        if context == CONTEXT and page > 1:
            continue  # the reference may hold a last page that is not full
        budgets = profile.budgets_for(context)
        totals.append(int(budgets.sum()))
        # Largest remainders may move one page from one head to another, never more. Where the
        # prompt fills another page, heads that hit it before take back what had gone to others.
        filled = page > 1 and context % page == 0
        assert np.all(budgets >= previous - page * (budgets.size if filled else 1))
        previous = budgets
    assert totals == sorted(totals)


def test_the_fixed_rule_keeps_the_number():
    profile = make_budget_profile([[20, 33], [5, 40]], length_rule="fixed")
    assert profile.budgets_for(1000).tolist() == profile.budgets.tolist()
    assert profile.budgets_for(25).tolist() == [[20, 25], [5, 25]]
    assert profile.budgets_for(3).tolist() == [[3, 3], [3, 3]]


def test_sliding_layers_follow_their_window():
    shape = make_shape(layer_types=("full", "sliding", "full"), sliding_window=10)
    profile = make_budget_profile([[20, 20], [9, 9], [30, 30]], shape=shape)
    for context in (1, 8, 9, 10, 40, 500):
        assert np.all(profile.budgets_for(context)[1] == min(context, 9))
    kept = int(profile.budgets_for(500)[[0, 2]].sum()) * (shape.bytes_per_entry + POSITION_BYTES)
    assert profile.retained_bytes_at(500, batch=3) == (kept + 2 * 9 * shape.bytes_per_entry) * 3
    assert full_bytes(profile.shape, 500) == (500 * 2 + 9) * 2 * shape.bytes_per_entry


def test_no_context_has_no_budgets():
    with pytest.raises(InputError, match="ask for >= 1"):
        make_budget_profile([[20, 20]]).budgets_for(0)
