"""Profiles and surrogates by name: files, those on the hub, those that ship."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TypeVar

from kvalloc.errors import InputError, ModelMismatchError, nearest
from kvalloc.files import near_file
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.hub import local_file, on_hub
from kvalloc.formats.record import kind_of
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.surrogate import FittedSurrogate
from kvalloc.shape import ModelShape

PACKAGE = "kvalloc.profiles"
BUDGETS, SCORES, SURROGATE = ".json", ".scores.safetensors", ".surrogate.safetensors"
"""Endings of what ships; a name can be that of one of each kind."""

T = TypeVar("T", BudgetProfile, ScoreProfile, FittedSurrogate)


def shipped_profiles() -> list[str]:
    """Return the names of the budget profiles that ship with kvalloc, sorted."""
    return _shipped(BUDGETS)


def shipped_scores() -> list[str]:
    """Return the names of the score profiles that ship with kvalloc, sorted."""
    return _shipped(SCORES)


def shipped_surrogates() -> list[str]:
    """Return the names of the surrogates that ship with kvalloc, sorted."""
    return _shipped(SURROGATE)


def _shipped(ending: str) -> list[str]:
    every = (entry.name for entry in resources.files(PACKAGE).iterdir())
    return sorted(name.removesuffix(ending) for name in every if name.endswith(ending))


def load_profile(source: BudgetProfile | str | Path) -> BudgetProfile:
    """Load a budget profile from a file, from the hub, or a shipped one by its name.

    Parameters
    ----------
    source : BudgetProfile, str or Path
        A path, ``hf://owner/repo[@revision]/file.json``, a name that `shipped_profiles` lists, or
        a budget profile, which is given back.

    Returns
    -------
    BudgetProfile

    Raises
    ------
    InputError
        If there is neither such a file nor such a name.
    ProfileFileError
        If the file is not a sound budget profile.
    """
    return source if isinstance(source, BudgetProfile) else _load(BudgetProfile, source, BUDGETS)


def load_scores(source: ScoreProfile | str | Path) -> ScoreProfile:
    """Load a score profile from a file, from the hub, or a shipped one by its name.

    Parameters
    ----------
    source : ScoreProfile, str or Path
        A path, ``hf://owner/repo[@revision]/file.safetensors``, a name that `shipped_scores` lists,
        such as ``"smollm2-135m-instruct"``, or a score profile, which is given back.

    Returns
    -------
    ScoreProfile

    Raises
    ------
    InputError
        If there is neither such a file nor such a name.
    ProfileFileError
        If the file is not a sound score profile.
    """
    return source if isinstance(source, ScoreProfile) else _load(ScoreProfile, source, SCORES)


def load_surrogate(source: str) -> FittedSurrogate:
    """Load a surrogate from a file, from the hub, or a shipped one by its name.

    Parameters
    ----------
    source : str
        A path, ``hf://owner/repo[@revision]/file.safetensors``, or a name such as
        ``"smollm2-135m-instruct"``.

    Returns
    -------
    FittedSurrogate

    Raises
    ------
    InputError
        If there is neither such a file nor such a name.
    ProfileFileError
        If the file is not a sound surrogate.
    """
    return _load(FittedSurrogate, source, SURROGATE)


def _load(kind: type[T], source: str | Path, ending: str) -> T:
    if not on_hub(source) and not os.path.exists(source):
        return load_shipped(source, {kind: ending})
    with local_file(source) as path:
        return kind.load(path)


def load_shipped(source: str | Path, kinds: Mapping[type[T], str]) -> T:
    """Load what ships under a name that is no file.

    Parameters
    ----------
    source : str or Path
        The name.
    kinds : mapping of type to str
        Which kinds to take, with their endings.

    Raises
    ------
    InputError
        If nothing of these kinds ships under the name.
    ProfileFileError
        If the name is that of a model.
    """
    name, known = str(source), [one for ending in kinds.values() for one in _shipped(ending)]
    for kind, ending in kinds.items():
        if name in _shipped(ending):
            with resources.as_file(resources.files(PACKAGE) / f"{name}{ending}") as file:
                return kind.load(file)
    first, *_ = kinds
    if kind_of(source):  # the demo's name is a model
        first.require_file(source)
    near = nearest(name, known) or near_file(source)
    raise InputError(
        f"there is no {' or '.join(kind.NAME for kind in kinds)} {source}: no such file; {near}"
        f"check the path; shipped ones: {', '.join(known) or 'none'}"
    )


@cache
def shipped_surrogate(shape: ModelShape) -> str | None:
    """Return the name of the shipped surrogate that was fitted to a model, if any."""
    for name in shipped_surrogates():
        try:
            load_surrogate(name).shape.require_same_model(shape)
        except ModelMismatchError:
            continue
        return name
    return None


@cache
def shipped_decisions(shape: ModelShape) -> dict[str, BudgetProfile]:
    """Return shipped budgets and bits decided from a model's measured losses, by name."""
    decisions = {}
    for name in shipped_profiles():
        profile = load_profile(name)
        if profile.bits is None or profile.predicted_loss is None:
            continue
        try:
            profile.shape.require_same_model(shape)
        except ModelMismatchError:
            continue
        decisions[name] = profile
    return decisions
