"""Refusals of files, and that they are told well; what a profile states and is not true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvalloc.allocation.audit import verify
from kvalloc.errors import ProfileFileError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile


def refused(path: Path, load: Callable[[Path], object]) -> ProfileFileError:
    """What loading says, after checking that it says it well."""
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
    """What a budget profile states and its score profile does not confirm."""
    return {check.name for check in verify(profile, scores) if not check.passed}
