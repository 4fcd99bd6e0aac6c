"""Which entries are kept."""

from __future__ import annotations

import pytest
import torch

from kvalloc.errors import InputError
from kvalloc.runtime import select_entries


def test_each_head_keeps_its_own_best_in_position_order() -> None:
    scores = torch.tensor([[[0, 9, 1, 2, 3, 0], [0, 1, 8, 7, 0, 0]]], dtype=torch.float32)
    kept = select_entries(scores, 4, sinks=1, window=1)
    assert kept.tolist() == [[[0, 1, 4, 5], [0, 2, 3, 5]]]
    assert kept.dtype == torch.int64


def test_ties_keep_the_earlier_positions() -> None:
    scores = torch.ones(2, 3, 10)
    kept = select_entries(scores, 6, sinks=2, window=2)
    assert (kept == torch.tensor([0, 1, 2, 3, 8, 9])).all()


def test_a_tie_at_the_threshold_does_not_lose_what_is_above_it() -> None:
    scores = torch.tensor([[[1.0, 1.0, 5.0, 1.0, 1.0, 5.0, 1.0]]])
    assert select_entries(scores, 4, sinks=0, window=0).tolist() == [[[0, 1, 2, 5]]]


def test_sinks_and_window_stay_whatever_their_scores() -> None:
    scores = torch.zeros(1, 1, 8)
    scores[..., 3:5] = 1e30
    assert select_entries(scores, 5, sinks=2, window=3).tolist() == [[[0, 1, 5, 6, 7]]]


def test_everything_fits() -> None:
    assert select_entries(torch.rand(1, 1, 5), 5, sinks=1, window=2).tolist() == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize("budget", [2, 9])
def test_budgets_that_cannot_be_are_refused(budget: int) -> None:
    with pytest.raises(InputError, match=f"budget of {budget} entries"):
        select_entries(torch.rand(1, 1, 8), budget, sinks=1, window=2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    scores = torch.rand(1, 2, 8)
    scores[0, 1, 4] = bad
    with pytest.raises(InputError, match="not finite"):
        select_entries(scores, 4, sinks=1, window=1)
