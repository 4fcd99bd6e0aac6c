"""The budget profiles that ship: they load by name, are whole, and say how they were made."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_tools import run

import kvalloc
from kvalloc.formats.shipped_profiles import (
    find_fitted,
    load_fitted,
    shipped_fitted,
)
from kvalloc.online.solved import solve_share
from kvalloc.scorers import get_scorer

README = Path(__file__).parents[3] / "profiles" / "README.md"


@pytest.mark.parametrize("name", kvalloc.shipped_profiles())
def test_a_shipped_profile_loads_by_name_and_is_explained(name: str) -> None:
    profile = kvalloc.load_profile(name)
    assert 0 < profile.retained_bytes < profile.full_bytes
    assert profile.retained_bytes <= profile.requested.get("bytes", profile.full_bytes)
    assert profile.bound is not None
    assert profile.score_digest
    assert profile.problem_digest
    assert f"`{name}`" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", shipped_fitted())
def test_a_shipped_fitted_file_decides_every_share(name: str, fitted_here: Path) -> None:
    """It is the one that its model takes by itself, and stores no more than each share."""
    fitted = load_fitted(name)
    assert find_fitted(fitted.shape) == name
    assert {one.share for one in fitted.scores.errors} == {0.05, 0.1, 0.2}
    for share in (0.05, 0.1, 0.2, 0.5):
        for tokens in (400, 1000, 8192):
            solved = solve_share(name, share, tokens)
            assert solved is not None
            assert 0.95 * share < solved.share_at(tokens) <= share
            assert solved.gap is not None
            assert solved.gap < 0.01
    # wherever a score profile is named, and what is solved from it can be applied
    assert run("inspect", name).code == 0
    decided = kvalloc.solve(name, budget="20%", level="head")
    assert decided.predicted_loss is not None
    assert get_scorer(decided.policy.scorer, **decided.policy.scorer_parameters).file == name
    assert (README.parent / f"{name}.fitted.safetensors").stat().st_size < 2 * 2**20
    assert f"`{name}.fitted.safetensors`" in README.read_text(encoding="utf-8")
