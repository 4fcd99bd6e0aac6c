"""Retention curves and KL: by hand and by their definitions."""

import math

import numpy as np
import pytest
import torch

from kvalloc.measure.curves import on_grid, retention_curves
from kvalloc.measure.kl import divergence

# Retention curves by hand


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


# KL and agreement against cases done by hand


LOG = math.log


@pytest.mark.parametrize(
    ("full", "reduced", "kl", "agreement"),
    [
        # p = (1/2, 1/2) and q = (3/4, 1/4): 0.5 ln(2/3) + 0.5 ln 2 = 0.5 ln(4/3)
        # p = (1/5, 4/5) and q = (1/5, 4/5), the logits shifted: 0
        (
            [[0.0, 0.0], [0.0, LOG(4.0)]],
            [[LOG(3.0), 0.0], [7.0, 7.0 + LOG(4.0)]],
            *(0.5 * LOG(4 / 3) / 2, 1.0),
        ),
        # from full to reduced, and not the other way
        ([[LOG(9.0), 0.0]], [[0.0, 0.0]], 0.9 * LOG(0.9 / 0.5) + 0.1 * LOG(0.1 / 0.5), 1.0),
        ([[0.0, 0.0]], [[LOG(9.0), 0.0]], 0.5 * LOG(0.5 / 0.9) + 0.5 * LOG(0.5 / 0.1), 1.0),
        # one of two most likely tokens is another
        ([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], 0.5 * math.tanh(0.5), 0.5),
        # a token that is ruled out adds nothing
        ([[0.0, 0.0, -math.inf]], [[0.0, 0.0, LOG(2.0)]], LOG(2.0), 0.0),
    ],
)
def test_by_hand(full, reduced, kl, agreement):
    result = divergence(torch.tensor(full), torch.tensor(reduced))
    assert result.kl == pytest.approx(kl, rel=1e-6)
    assert result.top1_agreement == agreement


def test_half_precision_is_computed_in_float32():
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert divergence(logits, logits.clone()).kl == 0.0  # exactly
    other = (logits.float() + 0.01).bfloat16()
    precise = divergence(logits.float(), other.float())
    assert divergence(logits, other).kl == precise.kl
