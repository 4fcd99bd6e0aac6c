"""Layers that keep the same entries: what is measured, against the definition."""

import numpy as np
import pytest
from factories import joint_curves
from tiny_models import tiny_model, tiny_profile

from kvalloc.formats.sharing_groups import runs_of
from kvalloc.measure.curves import SharedRuns


def measure(share_length, n_layers=6, **options):
    model = tiny_model(num_hidden_layers=n_layers)
    return tiny_profile(model, share_length=share_length, **options)


def added(raw, longest):
    """The joint curves of all runs, sample by sample."""
    n_samples, n_layers, n_heads, n_tokens = raw.shape
    for sample in range(n_samples):
        runs = SharedRuns(range(n_layers), longest)
        if not sample:
            joint = np.full((n_samples, len(runs.runs), n_heads, n_tokens + 1), np.nan)
        for layer, scores in enumerate(raw[sample]):
            for run, curves in runs.add(layer, scores, scores.sum(axis=-1)):
                joint[sample, run] = curves
    return runs.runs, joint


@pytest.mark.parametrize("longest", [2, 3, 4])
def test_every_run_is_measured_by_its_definition(longest):
    rng = np.random.default_rng(longest)
    raw = rng.random((2, 7, 3, 20)) ** 4
    runs, found = added(raw, longest)
    assert np.allclose(found, joint_curves(raw, runs), atol=1e-12)


def test_a_layer_without_any_mass_keeps_its_share_whatever_is_kept():
    raw = np.random.default_rng(2).random((1, 4, 2, 8))
    raw[0, 3] = 0.0
    _, found = added(raw, 2)
    assert np.allclose(found[0, 0, :, 0], 0.5)
    assert np.allclose(found[0, 0, :, -1].sum(), 2.0)


@pytest.mark.parametrize("options", [{}, {"scorer": "snapkv", "window": 9}])
def test_of_a_model(options):
    plain = measure(1, **options)
    found = measure(3, **options)
    assert plain.shared_runs is None
    assert found.shared_runs.tolist() == runs_of(range(6), 3).tolist()
    assert np.array_equal(found.curves, plain.curves)
    apart = found.contributions()
    for first, length in found.shared_runs.tolist():
        group = tuple(range(first, first + length))
        together = found.shared_contributions(group)
        separate = apart[first : first + length].sum(axis=0)
        assert np.all(together <= separate + 1e-12)
        assert np.allclose(together[:, -1], separate[:, -1])
        assert np.any(together.sum(axis=0) < separate.sum(axis=0) - 1e-9)
    assert found.digest != plain.digest
