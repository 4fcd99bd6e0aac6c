"""Retention curves: interpolation, contributions, and how they become problems."""

import numpy as np
import pytest
from factories import curves_of, make_scores, make_shape, random_scores
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvalloc.accounting.costs import full_bytes
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.formats.score_profile import interpolate_curves
from kvalloc.measure.curves import on_grid, retention_curves


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), n_at=st.integers(1, 50))
def test_interpolation_keeps_rising_concave_curves_so(seed, n_at):
    rng = np.random.default_rng(seed)
    curves = curves_of(random_scores(rng, (3, 2, 60)))
    ranks = np.unique(np.concatenate([[0, 60], rng.integers(0, 61, 12)]))
    at = np.linspace(0, 60, n_at)
    coarse = curves[..., ranks]
    exact = np.array([np.interp(at, ranks, row) for row in coarse.reshape(-1, ranks.size)])
    found = interpolate_curves(coarse, ranks, at)
    assert found.reshape(-1, n_at) == pytest.approx(exact, abs=1e-14)
    assert np.all(np.diff(found, axis=-1) >= -1e-15)
    assert np.all(np.diff(found, n=2, axis=-1) <= 1e-14)
    above = [np.interp(at, np.arange(61), row) for row in curves.reshape(-1, 61)]
    assert np.all(found.reshape(-1, n_at) <= np.array(above) + 1e-12)  # chords of concave curves


def test_head_and_layer_views_are_one_yardstick():
    """The same budget for all heads of a layer is worth the same at either level."""
    for seed in range(20):
        shape = make_shape(n_layers=3, n_kv_heads=1 + seed % 4)
        scores = make_scores(seed, shape=shape, n_samples=1 + seed % 3)
        by_layer = formulate(scores, Request.parse(budget=0.5))
        by_head = formulate(scores, Request.parse(budget=0.5, level="head"))
        rng = np.random.default_rng(seed)
        choice = rng.integers(0, by_layer.n_options, by_layer.n_units)
        spread = np.repeat(choice, shape.n_kv_heads)
        assert by_head.objective_value(spread) == pytest.approx(
            by_layer.objective_value(choice), abs=1e-12
        )
        assert by_head.cost(spread) == by_layer.cost(choice)
        assert by_head.capacity_bytes == by_layer.capacity_bytes


@pytest.mark.parametrize("share", [0.16, 0.3, 0.7, 1.0])
def test_heads_on_their_own_are_never_worse(share):
    for seed in range(10):
        scores = make_scores(seed)
        layer = solve(scores, budget=share)
        head = solve(scores, budget=share, level="head")
        assert head.objective >= layer.objective - 1e-12
        assert head.retained_bytes <= full_bytes(scores.shape, scores.context_tokens) * share
    cheaper = solve(scores, target_retention=0.9, level="head").retained_bytes
    assert cheaper <= solve(scores, target_retention=0.9).retained_bytes


def test_contributions_at_everything_add_up_to_one():
    for seed in range(10):
        scores = make_scores(seed, n_samples=3)
        assert scores.contributions().sum(axis=1)[:, -1] == pytest.approx(1.0)
        assert scores.contributions(1).sum(axis=1)[:, -1] == pytest.approx(1.0)
        mean = np.mean([scores.contributions(s) for s in range(3)], axis=0)
        assert scores.contributions() == pytest.approx(mean, abs=1e-15)


finite_scores = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 30)),
    elements=st.floats(0, 1, width=32),
)


@given(finite_scores, st.integers(1, 60))
def test_curves_rise_are_concave_and_end_at_one_stretched_or_not(scores, n_wanted):
    exact, masses = retention_curves(scores)
    stretched, error = on_grid(exact, np.arange(n_wanted + 1))
    assert error == 0
    for curves, slack in ((exact, 1e-12), (stretched, 1e-9)):
        gains = np.diff(curves, axis=-1)
        assert np.all(gains >= (0 if curves is exact else -1e-12))
        assert np.all(np.diff(gains, axis=-1) <= slack)
        assert np.all(curves[..., -1] == 1)
        assert np.all((curves >= 0) & (curves <= 1))
    np.testing.assert_allclose(masses, scores.astype(np.float64).sum(axis=-1), rtol=1e-12)
