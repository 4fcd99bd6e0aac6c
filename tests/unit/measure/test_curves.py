"""Retention curves by hand."""

import numpy as np

from kvalloc.measure.curves import on_grid, retention_curves


def test_by_hand():
    scores = np.array([[1.0, 5.0, 2.0], [0.0, 4.0, 0.0]], dtype=np.float32)
    curves, masses = retention_curves(scores)
    assert curves.tolist() == [[0, 0.625, 0.875, 1], [0, 1, 1, 1]]
    assert masses.tolist() == [8, 4]


def test_sums_are_in_float64():
    # 1 + 4096 * 2**-26 would stay 1 in float32
    scores = np.full((1, 4097), 2.0**-26, dtype=np.float32)
    scores[0, 7] = 1.0
    curves, masses = retention_curves(scores)
    assert masses[0] == 1 + 4096 * 2.0**-26
    assert np.all(np.diff(curves[0]) > 0)


def test_a_head_without_mass_loses_nothing():
    curves, masses = retention_curves(np.zeros((2, 3), dtype=np.float32))
    assert curves.tolist() == [[1, 1, 1, 1]] * 2
    assert masses.tolist() == [0, 0]


def test_a_shorter_sample_is_stretched_by_the_share_kept():
    exact = np.array([[0.0, 0.8, 1.0]])
    values, error = on_grid(exact, np.arange(5))
    assert values[0].tolist() == [0, 0.4, 0.8, 0.9, 1.0]
    assert error == 0


def test_a_coarse_grid_measures_what_it_hides():
    exact = np.array([[0.0, 0.6, 0.8, 0.9, 1.0]])
    values, error = on_grid(exact, np.array([0, 2, 4]))
    assert values[0].tolist() == [0, 0.8, 1.0]
    assert abs(error - 0.2) < 1e-12
