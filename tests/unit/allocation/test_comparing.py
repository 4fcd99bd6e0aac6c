"""Several solvers beside each other, and the difference between two budget profiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import make_scores

import kvalloc
from kvalloc.allocation.comparison import compare_profiles
from kvalloc.errors import KVAllocError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"solvers": []}, "no solver is registered: kvalloc is on the path but not installed"),
        ({"time_limit": 0.0}, "a time limit of 0 s leaves no time; give more"),
        ({"average": "median"}, "average is 'median', expected 'curves' or 'allocations'"),
    ],
)
def test_what_no_solver_can_do_is_refused_once(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KVAllocError, match=f"^{words}$"):
        kvalloc.compare(make_scores(0), budget="40%", **given)


def test_differences_add_up() -> None:
    scores = make_scores(0)
    first = kvalloc.solve(scores, budget="40%", solver="pyramid")
    second = kvalloc.solve(scores, budget="60%", solver="greedy")
    found = compare_profiles(first, second)
    assert np.array_equal(first.budgets + found.difference, second.budgets)
    gained = int(found.difference[found.difference > 0].sum())
    assert found.moved_entries >= gained - int(-found.difference[found.difference < 0].sum())
    assert found.retained_bytes == (first.retained_bytes, second.retained_bytes)
    assert found.fields["solver"] == ("pyramid", "greedy")
    assert "target" in found.fields


def test_other_lengths_are_compared_at_the_first_ones_context() -> None:
    scores = make_scores(0)
    first = kvalloc.solve(scores, budget="40%")
    second = kvalloc.solve(scores, budget="40%", context=80)
    found = compare_profiles(first, second)
    assert np.array_equal(found.difference, second.budgets_for(40) - first.budgets)
    assert found.fields["context"] == ("40", "80")
