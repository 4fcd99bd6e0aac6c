"""Several solvers beside each other, and the difference between two budget profiles."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_scores

import kvalloc
from kvalloc.allocation.comparison import compare_profiles
from kvalloc.errors import SolverError


def test_a_comparison_without_any_solver_is_refused() -> None:
    with pytest.raises(SolverError, match="no solver is registered"):
        kvalloc.compare(make_scores(0), budget="40%", solvers=[])


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
