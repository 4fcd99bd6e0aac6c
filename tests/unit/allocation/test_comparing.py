"""Several solvers beside each other, and the difference between two budget profiles."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_scores, make_shape

import kvalloc
from kvalloc.allocation.comparison import compare_profiles
from kvalloc.errors import ModelMismatchError, SolverError


def test_solvers_stand_best_first_and_what_cannot_solve_it_last() -> None:
    names = ["adaptive_head", "uniform", "greedy"]
    best, second, refused = kvalloc.compare(make_scores(0), solvers=names, budget="40%")
    assert (best.solver, second.solver, refused.solver) == ("greedy", "uniform", "adaptive_head")
    assert best.profile is not None
    assert second.profile is not None
    assert best.profile.objective > second.profile.objective
    assert refused.profile is None
    assert "level='head'" in refused.reason


def test_a_comparison_without_any_solver_is_refused() -> None:
    with pytest.raises(SolverError, match="no solver is registered"):
        kvalloc.compare(make_scores(0), budget="40%", solvers=[])


def test_equal_profiles_are_the_same() -> None:
    profile = kvalloc.solve(make_scores(0), budget="40%")
    found = compare_profiles(profile, profile)
    assert found.same
    assert found.moved_entries == 0
    assert found.fields == {}


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


def test_profiles_of_different_models_are_refused_by_name() -> None:
    first = kvalloc.solve(make_scores(0), budget="40%")
    other = make_scores(0, shape=make_shape(model_id="tests/other"))
    with pytest.raises(ModelMismatchError, match="tests/other"):
        compare_profiles(first, kvalloc.solve(other, budget="40%"))
