"""Retention curves by hand."""

import numpy as np
import pytest

from kvalloc.measure.curves import on_grid, retention_curves


def test_sums_are_in_float64():
    # 1 + 4096 * 2**-26 would stay 1 in float32
    scores = np.full((1, 4097), 2.0**-26, dtype=np.float32)
    scores[0, 7] = 1.0
    curves, masses = retention_curves(scores)
    assert masses[0] == 1 + 4096 * 2.0**-26
    assert np.all(np.diff(curves[0]) > 0)


@pytest.mark.parametrize(
    ("exact", "ranks", "expected", "hidden"),
    [
        ([0.0, 0.8, 1.0], [0, 1, 2, 3, 4], [0, 0.4, 0.8, 0.9, 1.0], 0),  # a shorter sample
        ([0.0, 0.6, 0.8, 0.9, 1.0], [0, 2, 4], [0, 0.8, 1.0], 0.2),  # a coarse grid
    ],
)
def test_a_curve_is_stretched_over_the_ranks_and_says_what_it_hides(exact, ranks, expected, hidden):
    values, error = on_grid(np.array([exact]), np.array(ranks))
    assert values[0].tolist() == expected
    assert error == pytest.approx(hidden, rel=4e-12, abs=0)
