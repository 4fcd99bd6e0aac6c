"""Budgets that follow a prompt: the total stays, the limits hold, and nothing better is missed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from factories import make_budget_profile, make_curves, make_scores, make_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.online.adaptation import adapt_budgets, check_adapt, may_move


def random_profile(rng: np.random.Generator, level: str, context: int, **more: Any) -> Any:
    """Budgets between the floors and everything, sometimes at either end."""
    columns = 1 if level == "layer" else 2
    budgets = rng.integers(5, context + 1, (3, columns))
    ends = rng.random((3, columns))
    budgets[ends < 0.1], budgets[ends > 0.9] = 5, context
    table = np.broadcast_to(budgets, (3, 2)).copy()
    return make_budget_profile(table, level=level, context_tokens=context, **more)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    level=st.sampled_from(["layer", "head"]),
    limit=st.floats(0.0, 1.0),
    context=st.sampled_from([24, 40, 61]),
)
def test_total_and_limits_hold_at_every_length(
    seed: int, level: str, limit: float, context: int
) -> None:
    profile = random_profile(np.random.default_rng(seed), level, 40)
    scores = make_scores(seed, context_tokens=context, n_samples=1)
    adapted = adapt_budgets(profile, scores, limit)
    base, moved = profile.budgets_for(context), adapted.budgets_for(context)
    assert moved.sum() == base.sum()
    assert adapted.retained_bytes_at(context) == profile.retained_bytes_at(context)
    assert (np.abs(moved - base) <= limit * base + 1e-9).all()
    assert moved.min() >= 5
    assert moved.max() <= context
    before, after = (make_curves(scores).retention(table) for table in (base, moved))
    assert after >= before - 1e-12
    if adapted is not profile:
        assert adapted.retention == pytest.approx(after)
        assert adapted.requested["adapt"] == limit


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), limit=st.floats(0.1, 0.6))
def test_no_choice_within_the_limits_is_better(seed: int, limit: float) -> None:
    rng = np.random.default_rng(seed)
    table = np.repeat(rng.integers(5, 15, (3, 1)), 2, axis=1)
    profile = make_budget_profile(table, level="layer", context_tokens=16)
    scores = make_scores(seed, context_tokens=16, n_samples=1)
    curves = make_curves(scores)
    found = curves.retention(adapt_budgets(profile, scores, limit).budgets)
    ranges = [
        range(
            max(5, math.ceil(b - limit * b - 1e-9)), min(16, math.floor(b + limit * b + 1e-9)) + 1
        )
        for b in table[:, 0].tolist()
    ]
    best = max(
        curves.retention(np.repeat(np.array(n)[:, None], 2, axis=1))
        for n in itertools.product(*ranges)
        if sum(n) == table[:, 0].sum()
    )
    assert found == pytest.approx(best, abs=1e-12)


def test_a_limit_of_nothing_is_the_stored_profile() -> None:
    profile = random_profile(np.random.default_rng(0), "head", 40)
    assert adapt_budgets(profile, make_scores(n_samples=1), 0.0) is profile
    assert not may_move(profile, 0.0, 40)
    assert not may_move(profile, 0.5, 5)
    whole = make_budget_profile(np.full((3, 2), 40))
    assert not may_move(whole, 0.5, 40)


def test_budgets_move_to_where_the_prompt_needs_them() -> None:
    """A layer whose mass is in one entry gives what one with even mass can use."""
    even, sharp = np.full(35, 1.0), np.array([100.0] + [1e-3] * 34)
    raw = np.stack([np.stack([even, even]), np.stack([sharp, sharp]), np.stack([even, even])])
    curves = np.concatenate([np.zeros((3, 2, 1)), np.cumsum(raw, axis=-1)], axis=-1)
    curves /= curves[..., -1:]
    curves[..., -1] = 1.0
    scores = make_scores(curves=curves[None], n_samples=1)
    profile = make_budget_profile(np.full((3, 2), 20), level="layer")
    moved = adapt_budgets(profile, scores, 0.25).budgets[:, 0]
    assert moved[1] == 15
    assert (moved[0] + moved[2], max(moved) <= 25) == (45, True)


def test_whole_pages_move_and_partial_ones_stay() -> None:
    budgets = np.array([[8, 16], [24, 39], [16, 32]])
    profile = make_budget_profile(budgets, context_tokens=39, page_tokens=8)
    scores = make_scores(3, context_tokens=39, n_samples=1)
    adapted = adapt_budgets(profile, scores, 0.5)
    moved = adapted.budgets_for(39)
    assert (moved - budgets != 0).any()
    assert ((moved - budgets) % 8 == 0).all()
    assert moved[1, 1] == 39
    assert adapted.retained_bytes == profile.retained_bytes


def test_bit_widths_and_caps_keep_their_totals() -> None:
    rng = np.random.default_rng(5)
    bits = np.array([[16, 8], [8, 16], [4, 4]])
    profile = random_profile(rng, "head", 40, bits=bits)
    scores = make_scores(5, n_samples=1)
    adapted = adapt_budgets(profile, scores, 0.5)
    assert adapted.retained_bytes == profile.retained_bytes
    for width in np.unique(bits):
        assert adapted.budgets[bits == width].sum() == profile.budgets[bits == width].sum()
    capped = random_profile(rng, "layer", 40, requested={**ASKED, "cap": ["0-1=1GiB"]})
    moved = adapt_budgets(capped, scores, 0.5).budgets
    assert moved[:2].sum() == capped.budgets[:2].sum()


def test_equal_heads_stay_equal() -> None:
    profile = solve(make_scores(2, n_samples=1), budget=0.5, level="head", equal_heads=True)
    moved = adapt_budgets(profile, make_scores(9, n_samples=1), 0.4).budgets
    assert (moved[:, 0] == moved[:, 1]).all()
    assert moved.sum() == profile.budgets.sum()
    assert (moved != profile.budgets).any()


def test_sliding_layers_stay_as_they_are() -> None:
    shape = make_shape(layer_types=("full", "sliding", "full"), sliding_window=12)
    profile = solve(make_scores(shape=shape, n_samples=1), budget=0.6)
    adapted = adapt_budgets(profile, make_scores(4, shape=shape, n_samples=1), 0.3)
    assert (adapted.budgets[1] == 11).all()
    assert adapted.budgets.sum() == profile.budgets.sum()


def test_limits_of_the_decision_hold_for_the_prompt_and_what_moved_is_recorded() -> None:
    profile = solve(make_scores(2, n_samples=1), budget=0.5, min_tokens=15, max_tokens=24)
    adapted = adapt_budgets(profile, make_scores(9, n_samples=1), 1.0)
    assert (adapted.budgets.min() >= 15, adapted.budgets.max() <= 24) == (True, True)
    assert "100%" in adapted.detail
    assert adapted.bound is not None
    assert adapted.bound >= adapted.objective - 1e-9


@pytest.mark.parametrize("limit", [-0.1, 1.5, True, "much", float("nan"), None])
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    with pytest.raises(InputError, match="from 0 to 1"):
        check_adapt(make_budget_profile(np.full((3, 2), 20)), limit)


ASKED = {"target": "budget", "value": 0.5}
FEW = make_budget_profile(np.full((3, 2), 20))
DEEP = make_budget_profile(np.full((5, 2), 20), shape=make_shape(n_layers=5))


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (FEW.replace(requested={**ASKED, "max_distinct": 2}), "without max_distinct"),
        (FEW.replace(by_prompt=True), "hands out the budgets"),
        (DEEP.replace(share_groups=((2, 3),)), "without share_groups"),
        (
            FEW.replace(
                other_policies=(FEW.policy.replace(label="other"),),
                unit_policies=np.ones((3, 2), dtype=np.int64),
            ),
            "heads of this profile keep others",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_profiles_that_cannot_move_are_refused(profile: BudgetProfile, words: str) -> None:
    scores = make_scores(shape=profile.shape, n_samples=1)
    with pytest.raises(UnsupportedRequestError, match=words):
        adapt_budgets(profile, scores, 0.2)
