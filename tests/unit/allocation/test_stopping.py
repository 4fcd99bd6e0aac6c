"""When samples are enough: budgets from others would be as good."""

import numpy as np
import pytest
from factories import make_curves, make_losses, make_scores
from tiny_models import tiny_profile, words

from kvalloc.allocation.decision import solve
from kvalloc.allocation.stopping import DRAWS, BudgetsSettled
from kvalloc.errors import InputError
from kvalloc.formats.merging import merge


@pytest.mark.parametrize("make", [make_scores, make_losses])
def test_it_is_the_bootstrap_of_the_retention(make):
    scores = make(2, n_samples=9)
    settled = BudgetsSettled(0.5, budget="40%", level="head")
    assert settled(scores)
    plain = make_scores(2, n_samples=9)
    budgets = solve(plain, budget="40%", level="head").budgets
    reached = make_curves(plain).retention(budgets)
    draws = np.random.default_rng(0).multinomial(9, np.full(9, 1 / 9), size=DRAWS)
    found = []
    for draw in draws:
        rows = np.repeat(np.arange(9), draw)
        drawn = plain.replace(
            curves=plain.curves[rows], masses=plain.masses[rows], sample_tokens=plain.sample_tokens
        )
        other = solve(drawn, budget="40%", level="head").budgets
        found.append(reached - make_curves(plain).retention(other))
    assert settled.difference == pytest.approx(sorted(found)[-2], abs=1e-9)
    assert settled.n_samples == 9
    assert "after 9 samples" in settled.text
    assert not BudgetsSettled(settled.difference / 2, budget="40%", level="head")(scores)


def test_equal_samples_are_settled_at_once():
    one = make_scores(n_samples=1)
    same = one.replace(
        **{
            name: np.repeat(getattr(one, name), 8, axis=0)
            for name in ("curves", "masses", "sample_tokens")
        }
    )
    settled = BudgetsSettled(1e-9, budget="30%")
    assert settled(same)
    assert settled.difference <= 1e-12


def test_too_few_samples_say_nothing():
    settled = BudgetsSettled(0.5, budget="30%")
    assert not settled(make_scores(n_samples=7))
    assert "fewer than 8 samples" in settled.text


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -1.0])
def test_a_tolerance_that_cannot_be(tolerance):
    with pytest.raises(InputError, match="tolerance is"):
        BudgetsSettled(tolerance, budget="30%")


def test_measuring_stops_when_it_is_told_enough_and_goes_on_by_shards(tmp_path):
    asked = []

    def enough(scores):
        asked.append(scores.n_samples)
        return scores.n_samples >= 5

    options = {"texts": [words(1500)], "samples": 20}
    some = tiny_profile(enough=enough, output=tmp_path / "some", **options)
    assert asked == [2, 4, 6]  # 16 rounds: the first four of two samples each
    assert some.shards.tolist() == [1] * 3 + [0] * 13
    assert some.sample_places.tolist() == [0, 1, 2, 16, 17, 18]
    parts = [tmp_path / "some"]
    for number in range(4, 17):
        parts.append(tmp_path / f"{number}")
        tiny_profile(shard=f"{number}/16", output=parts[-1], **options)
    merge(parts, tmp_path / "all")
    tiny_profile(output=tmp_path / "whole", enough=lambda _: False, **options)
    assert (tmp_path / "all").read_bytes() == (tmp_path / "whole").read_bytes()
