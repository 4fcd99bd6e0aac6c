"""Any file of kvalloc, read by what it says it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvalloc.errors import InputError, ProfileFileError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.evaluation import Evaluation
from kvalloc.formats.hub import local_file, on_hub
from kvalloc.formats.record import WHAT_TO_DO, kind_of, with_article
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import BUDGETS, SCORES, load_shipped

SHIPPED: dict[type[Any], str] = {ScoreProfile: SCORES, BudgetProfile: BUDGETS}
"""Endings of what ships, by kind."""

KINDS = (ScoreProfile, BudgetProfile, Evaluation)
"""What is read from any file."""

_FOREIGN = {
    b"\x89PNG": "a PNG picture",
    b"PK\x03\x04": "a ZIP archive",
    b"<": "HTML or SVG",
    b"{": "JSON of another kind, or cut short",
}
"""Files of others by their first bytes."""


def load_file(source: str | Path, kinds: Sequence[type[Any]] = KINDS) -> Any:
    """Return the record that a file holds.

    Parameters
    ----------
    source : str or Path
        A file of kvalloc, here or on the hub, or the name of a shipped profile.
    kinds : sequence of type
        Which records to take.

    Returns
    -------
    ScoreProfile, BudgetProfile or Evaluation

    Raises
    ------
    InputError
        If there is neither such a file nor such a name.
    ProfileFileError
        If it is a file of another kind, which is named, or not a sound one.
    """
    if not on_hub(source) and not os.path.exists(source):
        return load_shipped(source, {kind: SHIPPED[kind] for kind in kinds if kind in SHIPPED})
    with local_file(source) as path:
        kind = kind_of(path)
        for one in kinds:
            if kind == one.NAME:
                return one.load(path)
        found = with_article(kind) if kind else _foreign(path)
        way_out = WHAT_TO_DO.get(kind, "name another file, or make this one again")
        raise ProfileFileError(
            source,
            field="file",
            found=found,
            expected=" or ".join(with_article(one.NAME) for one in kinds),
            way_out=way_out.format(source),
        )


def _foreign(path: Path) -> str:
    """Return what a file is that is none of kvalloc's."""
    if path.is_dir():
        return "a folder"
    try:
        start = path.read_bytes()[:64]
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from error
    if not start:
        return "empty"
    known = (text for magic, text in _FOREIGN.items() if start.lstrip().startswith(magic))
    return next(known, f"none of kvalloc's ({start[:20]!r}...)")
