"""Adaptive probes: where they are spent, and what they make of the estimates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_profile

from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.loss_plan import LossPlan
from kvalloc.measure.probing import choose_probes, scaled_to_probes

TOKENS = np.array([10, 30, 100], dtype=np.int64)


def test_probes_are_spent_by_expected_improvement_by_hand():
    # one sample: the uncertainty is half the loss. Half of 200 entries: at the price p the first
    # unit is torn between 30 and 100 entries, the second takes 30 or less at any price near it.
    losses = np.array([[[0.9, 0.5, 0.0], [0.02, 0.01, 0.0]]])
    wanted = choose_probes(losses, TOKENS, 2, shares=(0.5,))
    assert wanted.tolist() == [[True, True, False], [False, False, False]]
    # no more than there are, and never what keeps everything
    assert choose_probes(losses, TOKENS, 99, shares=(0.5,)).sum() == 4


@given(st.integers(0, 10**6), st.integers(1, 30))
@settings(max_examples=40)
def test_as_many_as_asked_where_something_is_at_stake(seed, most):
    random = np.random.default_rng(seed)
    losses = -np.sort(-random.exponential(size=(3, 8, 4)), axis=-1)
    losses[..., -1] = 0.0
    wanted = choose_probes(losses, np.array([5, 20, 60, 90]), most)
    assert wanted.sum() <= most
    assert not wanted[:, -1].any()
    more = choose_probes(losses, np.array([5, 20, 60, 90]), most + 1)
    assert np.all(more | ~wanted)  # the first ones stay


def test_the_expected_improvement_is_that_of_a_normal():
    from kvalloc.measure.probing import _expected_improvement

    gap, uncertain = np.array([0.0, 0.3, 2.0, 1.0]), np.array([1.0, 0.5, 1.0, 0.0])
    found = _expected_improvement(gap, uncertain)
    drawn = np.random.default_rng(0).normal(size=10**6)
    expected = [np.maximum(0, u * drawn - g).mean() for g, u in zip(gap, uncertain, strict=True)]
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_estimates_are_scaled_to_what_was_measured_by_hand():
    estimates = np.array([[[0.8, 0.4, 0.2, 0.0], [0.6, 0.3, 0.1, 0.0]]] * 2)
    estimates[1] *= 0.5  # another prompt
    probed = np.zeros_like(estimates)
    where = np.zeros((2, 4), dtype=np.bool_)
    where[0, [0, 2]] = True
    probed[:, 0, 0], probed[:, 0, 2] = [0.4, 0.2], [0.2, 0.1]
    found = scaled_to_probes(estimates, probed, where)
    # factors 0.3 / 0.6 = 0.5 and 0.15 / 0.15 = 1, 0.75 in between; all together 0.45 / 0.75 = 0.6
    np.testing.assert_allclose(found[0, 0], [0.4, 0.75 * 0.4, 0.2, 0.0])
    np.testing.assert_allclose(found[1, 0], [0.2, 0.75 * 0.2, 0.1, 0.0])
    np.testing.assert_allclose(found[:, 1], 0.6 * estimates[:, 1])


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_measured_figures_stay_and_right_estimates_do_not_move(seed):
    random = np.random.default_rng(seed)
    estimates = random.exponential(size=(3, 5, 4))
    where = random.random((5, 4)) < 0.4
    probed = np.where(where, random.exponential(size=(3, 5, 4)), 0.0)
    found = scaled_to_probes(estimates, probed, where)
    assert np.array_equal(found[:, where], probed[:, where])
    assert np.all(found >= 0)
    same = scaled_to_probes(estimates, np.where(where, estimates, 0.0), where)
    np.testing.assert_allclose(same, estimates)


PLAN = {"shares": (0.0, 0.3, 0.6), "continuation_tokens": 5, "batch": 4}


@pytest.mark.parametrize(
    ("policies", "bits", "kinds"), [((), None, 1), (("tova",), None, 2), (("tova",), "8,3", 6)]
)
def test_probed_figures_are_those_that_measuring_everything_gives(tmp_path, policies, bits, kinds):
    every, fast, found = (
        tiny_profile(loss=LossPlan(level="head", policies=policies, **PLAN, **how), bits=bits)
        for how in ({}, {"method": "fast"}, {"probes": 7})
    )
    assert found.loss_probed.shape == (3, 2, kinds, 4)
    assert found.loss_probed.sum() == 7
    for place in range(kinds):
        probed = found.loss_probed[:, :, place].astype(bool)
        for name in ("losses", "loss_stderr"):
            name = f"other_{name}" if place else name
            own, all_of, cheap = (getattr(each, name) for each in (found, every, fast))
            if place:
                own, all_of, cheap = (each[..., place - 1, :] for each in (own, all_of, cheap))
            np.testing.assert_allclose(own[:, probed], all_of[:, probed], atol=1e-7)
            assert not np.array_equal(own[:, probed], cheap[:, probed]) or not probed.any()
    found.save(tmp_path / "s.safetensors")
    again = ScoreProfile.load(tmp_path / "s.safetensors")
    assert np.array_equal(again.loss_probed, found.loss_probed)
    assert again.digest == found.digest
