"""Refusals of files and whether their messages are clear; untrue statements of a profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvalloc.allocation.audit import verify
from kvalloc.errors import ProfileFileError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile


def refused(path: Path, load: Callable[[Path], object]) -> ProfileFileError:
    """Return the error of loading a file, after checking that it is one clear line."""
    with pytest.raises(ProfileFileError) as caught:
        load(path)
    error = caught.value
    text = str(error)
    assert "\n" not in text
    assert text.startswith(f"{path}: {error.field} is ")
    assert "expected" in text
    assert error.way_out
    assert error.way_out in text
    assert len(text) < 600 + len(str(path))
    return error


def untrue(profile: BudgetProfile, scores: ScoreProfile) -> set[str]:
    """Return what a budget profile states and its score profile does not confirm."""
    return {check.name for check in verify(profile, scores) if not check.passed}
