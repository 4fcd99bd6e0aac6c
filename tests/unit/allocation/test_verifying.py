"""`kvalloc verify` believes nothing: true profiles pass, and every kind of lie is found."""

from __future__ import annotations

import numpy as np
import pytest

import kvalloc
from kvalloc.allocation.audit import verify
from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile
from tests.factories import make_scores, make_shape

ASKED = [
    {"budget": "40%"},
    {"target_retention": 0.8},
    {"target_retention": 0.7, "level": "head"},
    {"budget_tokens": 12, "level": "head", "min_tokens": 7},
    {"memory": 2000, "page": 4, "context": 60, "batch": 2},
    {"budget": 0.5, "objective": "mean", "solver": "pyramid"},
    {"budget": 0.5, "solver": "ilp", "page": 4},
    {"budget": 0.5, "average": "allocations"},
]


def failed(profile: BudgetProfile, seed: int = 0) -> set[str]:
    return {check.name for check in verify(profile, make_scores(seed)) if not check.passed}


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_what_solve_writes_is_true(asked: dict[str, object]) -> None:
    profile = kvalloc.solve(make_scores(0), **asked)  # type: ignore[arg-type]
    assert failed(profile) == set()


def test_sliding_layers_are_verified_too() -> None:
    shape = make_shape(layer_types=("full", "sliding", "full"), sliding_window=8)
    scores = make_scores(3, shape=shape)
    profile = kvalloc.solve(scores, memory=1500)
    assert all(check.passed for check in verify(profile, scores))


def test_every_false_statement_is_found() -> None:
    profile = kvalloc.solve(make_scores(0), budget="40%")
    assert failed(profile.replace(objective=profile.objective + 1e-6)) == {"objective"}
    assert failed(profile.replace(retention=profile.retention + 1e-6)) == {"retention"}
    assert failed(profile.replace(bound=profile.bound - 1e-6)) == {"bound"}
    assert failed(profile.replace(bound=profile.bound + 1e-6)) == {"bound"}
    assert failed(profile.replace(problem_digest="0")) == {"problem digest"}
    assert "score profile digest" in failed(profile, seed=1)


def test_budgets_that_do_not_fit_the_request_are_found() -> None:
    profile = kvalloc.solve(make_scores(0), budget="40%")
    more = np.minimum(profile.budgets + 5, profile.context_tokens)
    assert "within capacity" in failed(profile.replace(budgets=more))
    short = kvalloc.solve(make_scores(0), target_retention=0.8)
    fewer = np.maximum(short.budgets - 3, short.policy.protected_tokens)
    assert "target met" in failed(short.replace(budgets=fewer))
    paged = kvalloc.solve(make_scores(0), budget="40%", page=8)
    assert "budgets are options" in failed(paged.replace(budgets=paged.budgets - 1))


def test_a_profile_without_its_request_cannot_be_verified() -> None:
    profile = kvalloc.solve(make_scores(0), budget="40%").replace(requested={})
    with pytest.raises(InputError, match="does not say what was requested"):
        verify(profile, make_scores(0))


def test_a_tuned_profile_has_no_score_profile_to_be_verified_by() -> None:
    profile = kvalloc.solve(make_scores(0), budget="40%").replace(solver="descent")
    with pytest.raises(InputError, match=r"decided by 'kvalloc tune'.*'kvalloc eval'"):
        verify(profile, make_scores(0))
