"""Any file of kvalloc, read by what it says it is."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvalloc.errors import InputError, ProfileFileError, nearest
from kvalloc.files import near_file
from kvalloc.formats.hub import local_file, on_hub
from kvalloc.formats.record import WHAT_TO_DO, kind_of, with_article
from kvalloc.formats.shipped_profiles import (
    load_profile,
    load_scores,
    shipped_profiles,
    shipped_scores,
)

READERS = {
    "score profile": ("kvalloc.formats.score_profile", "ScoreProfile"),
    "budget profile": ("kvalloc.formats.budget_profile", "BudgetProfile"),
    "evaluation": ("kvalloc.formats.evaluation", "Evaluation"),
}
"""Module and class that read a kind of file."""

_FOREIGN = {
    b"\x89PNG": "a PNG picture",
    b"PK\x03\x04": "a ZIP archive",
    b"<": "HTML or SVG",
    b"{": "JSON of another kind, or cut short",
}
"""Files of others by their first bytes."""


def load_file(source: str | Path, kinds: Sequence[str] = tuple(READERS)) -> Any:
    """Return the record that a file holds.

    Parameters
    ----------
    source : str or Path
        A file of kvalloc, here or on the hub, or the name of a shipped profile.
    kinds : sequence of str
        Which of `READERS` to take.

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
    if on_hub(source):
        with local_file(source) as fetched:
            return load_file(fetched, kinds)
    path, shipped = Path(source), [*shipped_scores(), *shipped_profiles()]
    if not os.path.exists(path):
        if str(source) in shipped_profiles() and "budget profile" in kinds:
            return load_profile(source)
        if str(source) in shipped_scores() and "score profile" in kinds:
            return load_scores(source)
        near = nearest(str(source), shipped) or near_file(source)
        names = ", ".join(shipped) or "none is shipped"
        raise InputError(
            f"there is no file {source} and no shipped profile of that name; {near}check the path, "
            f"or choose from: {names}"
        )
    kind = kind_of(path)
    if kind in kinds:
        module, name = READERS[kind]
        return getattr(importlib.import_module(module), name).load(path)
    raise ProfileFileError(
        source,
        field="file",
        found=with_article(kind) if kind else _foreign(path),
        expected=" or ".join(map(with_article, kinds)),
        way_out=WHAT_TO_DO.get(kind, "name another file, or make this one again").format(source),
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
