"""Format losses: the file, what it refuses, and what it predicts of whole caches."""

import numpy as np
import pytest

from kvalloc.errors import InputError, ProfileFileError
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.formats.record import kind_of
from kvalloc.shape import ModelShape

SHAPE = ModelShape(
    model_id="m",
    n_layers=3,
    n_query_heads=4,
    n_kv_heads=2,
    head_dim=64,
    dtype_bytes=4,
    layer_types=("full",) * 3,
)


def losses(**changes):
    """Return losses whose mixtures obey a power law of the sum of single losses."""
    random = np.random.default_rng(0)
    single = random.random((3, 2, 2)) * np.array([1e-4, 1e-2])
    choices = random.integers(-1, 2, (6, 3, 2))
    choices[0] = 1
    index = choices[..., None]
    padded = np.concatenate([single, np.zeros((3, 2, 1))], axis=-1)
    padded = np.broadcast_to(padded, (6, 3, 2, 3))
    sums = np.take_along_axis(padded, index, axis=-1).sum(axis=(1, 2, 3))
    values = {
        "shape": SHAPE,
        "context_tokens": 600,
        "formats": ("q8_0", "q4_0"),
        "n_tokens": 1800,
        "losses": single,
        "choices": choices,
        "mean": 0.9 * sums**0.98,
        "p99": 7 * sums,
        "p999": 20 * sums,
        "top1": 1 - sums**0.5 / 2,
        "text_digest": "0" * 64,
        "text_description": "3 texts",
        "versions": {"torch": "2"},
        "created": "2026-01-01",
    }
    return FormatLosses(**values | changes), sums


def test_a_file_comes_back_as_it_was_and_says_what_it_is(tmp_path):
    one, _ = losses()
    path = tmp_path / "m.formats.safetensors"
    one.save(path)
    assert FormatLosses.load(path) == one
    assert kind_of(path) == "format profile"
    path.write_bytes(path.read_bytes().replace(b": 1800", b": 1801"))
    with pytest.raises(ProfileFileError, match="digest"):
        FormatLosses.load(path)


def test_a_power_law_of_the_mixtures_is_found_again():
    one, sums = losses()
    np.testing.assert_allclose(one.sums(one.choices), sums)
    predicted = one.predict_sums(sums)
    for name in ("mean", "p99", "p999", "top1"):
        np.testing.assert_allclose(getattr(predicted, name), getattr(one, name), rtol=1e-9)
    assert one.model_error == pytest.approx(1)
    fewer = np.full((3, 2), -1)
    fewer[0, 0] = 0  # less than any mixture loses
    assert one.sums(fewer) < sums.min() / 2
    assert one.predict(fewer).mean == pytest.approx(0.9 * one.sums(fewer) ** 0.98)


def test_all_at_16_bits_loses_nothing_and_more_loss_is_predicted_as_more():
    one, _ = losses()
    assert one.predict(np.full((3, 2), -1)) == (0, 0, 0, 1)
    choices = np.full((7, 3, 2), -1)
    for row in range(1, 7):
        choices[row].flat[:row] = 1
    mean, p99, p999, top1 = one.predict(choices)
    assert (np.diff(mean) > 0).all()
    assert (np.diff(p999) > 0).all()
    assert (np.diff(top1) < 0).all()
    assert (p999 >= p99).all()
    assert (p99 >= mean).all()


def test_the_model_error_is_the_largest_factor():
    one, sums = losses()
    mean = sums.copy()
    mean[0] *= 3
    wrong = one.replace(mean=mean)
    assert (wrong.predict(wrong.choices).mean == mean).all()  # what was measured
    factors = wrong.mean / wrong.predict_sums(sums).mean
    assert wrong.model_error == pytest.approx(max(factors.max(), 1 / factors.min()))
    assert wrong.model_error > 1.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": ("q8_0", "q9_9")}, "formats is q9_9, expected some of q8_0"),
        ({"formats": ("q8_0", "f16")}, "formats is f16"),
        ({"formats": ("q8_0", "q8_0")}, "each name once"),
        ({"losses": np.zeros((3, 2, 3))}, "losses is float64 shaped"),
        ({"losses": np.full((3, 2, 2), -1.0)}, "losses is"),
        ({"choices": np.full((6, 3, 2), 2)}, "choices is 2, expected below 2"),
        ({"choices": np.full((6, 2, 2), 1)}, "choices is int64 shaped"),
        ({"choices": np.zeros((0, 3, 2), dtype=np.int64)}, "choices is int64 shaped"),
        ({"top1": np.full(6, 1.5)}, "top1 is"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        losses(**changes)
