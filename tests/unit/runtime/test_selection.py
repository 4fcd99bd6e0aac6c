"""Selections that cannot be; what holds for all others is in property/test_runtime_selection.py."""

from __future__ import annotations

import pytest
import torch

from kvalloc.errors import InputError
from kvalloc.runtime import select_entries


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
