"""Bootstrap intervals against SciPy's, and against the normal approximation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap

from kvalloc.prompts.intervals import CONFIDENCE, RESAMPLES, interval

VALUES = np.random.default_rng(0).gamma(1.0, size=400)


def test_it_is_that_of_scipy():
    found = bootstrap(
        (VALUES,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, batch=50,
        method="percentile", rng=np.random.default_rng(7),
    ).confidence_interval  # fmt: skip
    ends = interval([VALUES], seed=7)
    assert ends == pytest.approx([found.low, found.high], abs=1e-12)


def test_prompts_are_drawn_within_their_task_and_columns_together():
    tasks = [np.array([1.0, 1.0]), np.array([4.0, 4.0, 4.0])]
    assert interval(tasks) == [2.5, 2.5]
    pairs = [np.column_stack([VALUES, 2 * VALUES])]
    assert interval(pairs, lambda means: means[:, 0] / means[:, 1]) == pytest.approx([0.5, 0.5])


def test_what_is_not_known_has_none():
    assert interval([]) is None
    assert interval([VALUES, VALUES[:1]]) is None
    zero = np.zeros((3, 2))
    assert interval([zero], lambda means: means[:, 0] / means[:, 1]) is None
