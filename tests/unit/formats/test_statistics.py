"""Sums over samples: the same bits in any order, and what can be said with them."""

import re
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
from factories import make_losses, make_scores, make_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from test_merging import LOSSES, parts_of
from tiny_models import tiny_profile, words

import kvalloc
from kvalloc.errors import InputError
from kvalloc.formats.merging import merge
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.statistics import added, from_digits, mean_sample, to_digits
from kvalloc.report.wording import score_fields

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False, width=64)


@settings(deadline=None)
@given(values=st.lists(NUMBERS, min_size=1, max_size=30), data=st.data())
def test_sums_are_the_same_bits_in_any_order_and_tree(values, data):
    def total(numbers):
        if len(numbers) == 1:
            return to_digits(np.array(numbers), top_bits=31, digits=3)[:, 0]
        cut = data.draw(st.integers(1, len(numbers) - 1))
        return total(numbers[:cut]) + total(numbers[cut:])

    one, other = total(values), total(data.draw(st.permutations(values)))
    assert np.array_equal(one, other)
    exact = sum(map(Fraction, values))
    found = Fraction(float(from_digits(one[:, None], top_bits=31)[0]))
    # cut off below 2 ** -62 each, and a few roundings of float64
    largest = max(abs(exact), Fraction(1, 2**40), *map(abs, map(Fraction, values)))
    assert abs(found - exact) <= Fraction(len(values), 2**62) + largest * Fraction(
        len(values), 2**51
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.5])
def test_numbers_that_cannot_be_added_are_refused(value):
    with pytest.raises(InputError, match=r"beyond 2 \*\* 1, or is not finite"):
        to_digits(np.array([value]), top_bits=1, digits=2)


def statistics_of(scores):
    """The same profile with statistics in place of samples."""
    sums = scores.sums()
    return scores.replace(
        **sums,
        **mean_sample(sums, scores.shape.full_layers),
        loss_stderr=None,
        other_loss_stderr=None,
    )


SLIDING = make_shape(layer_types=("sliding", "full", "full"), sliding_window=8)


@pytest.mark.parametrize("make", [make_scores, make_losses])
@pytest.mark.parametrize("shape", [make_shape(), SLIDING])
def test_budgets_are_those_of_the_samples(tmp_path, make, shape):
    scores = make(3, n_samples=7, shape=shape)
    held = statistics_of(scores)
    assert (held.n_samples, held.n_measured) == (1, 7)
    full = list(shape.full_layers)
    np.testing.assert_allclose(
        held.contributions()[full], scores.contributions()[full], rtol=0, atol=1e-14
    )
    requests = [{"budget": "40%"}, {"target_retention": 0.8, "level": "head"}]
    if scores.has_losses:
        requests.append({"budget": "50%", "objective": "loss", "level": "head"})
    for request in requests:
        one, other = kvalloc.solve(scores, **request), kvalloc.solve(held, **request)
        assert np.array_equal(one.budgets, other.budgets)
        assert one.retention == pytest.approx(other.retention, abs=1e-12)
    held.save(tmp_path / "s")
    assert ScoreProfile.load(tmp_path / "s") == held
    assert "statistics of 7 samples" in repr(held)


def test_mean_variance_and_quantiles_are_those_of_the_samples():
    scores = make_scores(5, n_samples=30, context_tokens=90)
    found = statistics_of(scores).curve_statistics
    marked = scores.curves[..., found.ranks]  # every rank is stored
    np.testing.assert_allclose(found.mean, marked.mean(axis=0), atol=1e-15)
    np.testing.assert_allclose(found.variance, marked.var(axis=0), atol=1e-14)
    assert (found.n_samples, found.ranks.size) == (30, 33)
    for share in (0.0, 0.1, 0.5, 0.99, 1.0):
        exact = np.quantile(marked, share, axis=0, method="inverted_cdf")
        assert np.abs(found.quantile(share) - exact).max() <= 0.005 + 1e-12
    said = score_fields(statistics_of(scores))["spread"]
    at = marked[..., 6]  # 16 of 85 entries
    low, high = (
        np.quantile(at, share, axis=0, method="inverted_cdf").mean() for share in (0.1, 0.9)
    )
    numbers = [int(one) / 100 for one in re.findall(r"(\d+)%", said)]
    assert numbers == pytest.approx([16 / 85, low, high, 0.8], abs=0.02)
    same = scores.curve_statistics
    assert np.array_equal(same.counts, found.counts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workloads": "worst", "solver": "cvar"}, "workloads='worst' needs single samples"),
        ({"workloads": "cvar", "tail": 0.5, "solver": "cvar"}, "workloads='cvar' needs single"),
        ({"average": "allocations"}, "average='allocations' needs single samples, .*of 4 samples"),
    ],
)
def test_what_needs_single_samples_is_refused_by_name(options, said):
    with pytest.raises(InputError, match=said):
        kvalloc.solve(statistics_of(make_scores(n_samples=4)), budget="40%", **options)


def edit(name, change):
    def changed(held):
        array = getattr(held, name).copy()
        change(array)
        return {name: array}

    return changed


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda _: {"curve_counts": None}, "expected all of summed"),
        (lambda _: {"summed": None}, "expected all of summed"),
        (edit("summed", lambda one: one.__setitem__(0, 5)), "curve_counts is another number"),
        (edit("summed", lambda one: one.__setitem__(1, 99)), "summed is .*expected how many"),
        (edit("summed_contributions", lambda one: one.__iadd__(1)), "is another mean"),
        (edit("curve_counts", lambda one: one.__isub__(1)), "curve_counts is another number"),
        (lambda held: {"summed_curves": held.summed_curves[:2]}, "summed_curves is int64 shaped"),
        (lambda held: {"summed_losses": held.summed_contributions[None]}, "expected all of"),
    ],
)
def test_statistics_that_cannot_be_are_refused(spoil, said):
    held = statistics_of(make_scores(n_samples=4))
    with pytest.raises(InputError, match=said):
        held.replace(**spoil(held))


@pytest.mark.parametrize("options", [{}, {"loss": LOSSES}, {"batch": 2}])
def test_shards_of_statistics_merge_in_any_order_to_the_same_bytes(tmp_path, options):
    options = {"texts": [words(500)], "samples": 8, "keep": "statistics", **options}
    whole = tiny_profile(output=tmp_path / "whole", **options)
    parts = [tmp_path / number for number in "123"]
    for part in parts:
        tiny_profile(output=part, shard=f"{part.name}/3", **options)
    merge(parts[1:], tmp_path / "some", accept_missing=True)
    merge([tmp_path / "some", parts[0]], tmp_path / "merged")
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "whole").read_bytes()
    plain = tiny_profile(**{**options, "keep": "samples"})
    assert statistics_of(plain) == whole


def test_the_size_does_not_grow_with_the_samples(tmp_path):
    for n_samples in (2, 40):
        statistics_of(make_scores(n_samples=n_samples)).save(tmp_path / f"{n_samples}")
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert abs(sizes[0] - sizes[1]) <= 8


def test_statistics_and_samples_do_not_merge(tmp_path):
    scores = make_scores(n_samples=6)
    files = parts_of(scores, 2, tmp_path)
    held = statistics_of(scores).replace(shards=np.array([0, 1]))
    held.save(files[1])
    with pytest.raises(InputError, match="are no parts of one measurement"):
        merge(files, tmp_path / "s")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": "sums"}, "keep is 'sums', expected"),
        ({"keep": "statistics", "bits": (8,)}, "bits needs single samples"),
        ({"keep": "statistics", "loss": "measured", "probes": 2}, "probes needs single samples"),
        ({"enough": bool, "shard": "1/2"}, "shard cannot go together with enough"),
        ({"enough": bool, "keep": "statistics"}, "keep cannot go together with enough"),
    ],
)
def test_options_that_contradict_each_other(options, said):
    with pytest.raises(InputError, match=said):
        tiny_profile(**options)


def test_added_sums_name_the_shortest_and_the_longest():
    one = {"summed": np.array([2, 30, 40])}
    other = {"summed": np.array([1, 20, 20])}
    assert reduce(added, [one, other, one])["summed"].tolist() == [5, 20, 40]
