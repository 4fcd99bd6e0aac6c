"""Any file of kvalloc, read by what it says it is."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from kvalloc.errors import InputError, ProfileFileError, nearest
from kvalloc.formats.shipped_profiles import load_profile, shipped_profiles

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
    b"{": "JSON of another kind",
}
"""Files of others by their first bytes."""


def kind_of(path: str | Path) -> str:
    """What a file says that it is; empty where it is missing or none of kvalloc's."""
    file = Path(path)
    try:
        with open(file, "rb") as handle:
            start = handle.read(8)
            if start.lstrip()[:1] == b"{":
                stated = from_json(start + handle.read())
            else:
                length = int.from_bytes(start, "little")
                header = from_json(handle.read(length if length < 10**8 else 0))
                metadata = header.get("__metadata__", {}).items()
                stated = next((from_json(v) for k, v in metadata if k.startswith("kvalloc")), {})
        kind = str(stated.get("kind", "")).removeprefix("kvalloc.").replace("_", " ")
    except (OSError, ValueError, AttributeError):
        return ""
    return "saved cache" if kind == "cache" else kind


def load_file(source: str | Path, kinds: Sequence[str] = tuple(READERS)) -> Any:
    """What a file holds.

    Parameters
    ----------
    source : str or Path
        A file of kvalloc, or the name of a shipped budget profile.
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
    path, shipped = Path(source), shipped_profiles()
    if not path.exists():
        if str(source) in shipped and "budget profile" in kinds:
            return load_profile(source)
        near, names = nearest(str(source), shipped), ", ".join(shipped) or "none is shipped"
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
        found=f"a {kind}" if kind else _foreign(path),
        expected=" or ".join(f"{'an' if kind[0] == 'e' else 'a'} {kind}" for kind in kinds),
        way_out="name another file",
    )


def _foreign(path: Path) -> str:
    """What a file is that is none of ours."""
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
