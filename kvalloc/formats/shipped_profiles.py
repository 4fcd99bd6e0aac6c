"""Budget profiles and surrogates by name: files, those on the hub, those that ship."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

from kvalloc.errors import InputError, ModelMismatchError, nearest
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.hub import local_file, on_hub
from kvalloc.formats.surrogate import FittedSurrogate
from kvalloc.shape import ModelShape

PACKAGE = "kvalloc.profiles"
SURROGATE = ".safetensors"


def shipped_profiles() -> list[str]:
    """Names of the budget profiles that ship with kvalloc, sorted."""
    return _shipped(".json")


def _shipped(ending: str) -> list[str]:
    every = (entry.name for entry in resources.files(PACKAGE).iterdir())
    return sorted(name.removesuffix(ending) for name in every if name.endswith(ending))


def load_profile(source: str | Path) -> BudgetProfile:
    """A budget profile from a file, from the hub, or a shipped one by its name.

    Parameters
    ----------
    source : str or Path
        A path, ``hf://owner/repo[@revision]/file.json``, or a name that `shipped_profiles` lists.

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
    if on_hub(source) or Path(source).exists():
        with local_file(source) as path:
            return BudgetProfile.load(path)
    shipped = shipped_profiles()
    if str(source) in shipped:
        with resources.as_file(resources.files(PACKAGE) / f"{source}.json") as file:
            return BudgetProfile.load(file)
    known = ", ".join(shipped) or "none"
    near = nearest(str(source), shipped)
    raise InputError(
        f"there is no budget profile {source}: no such file; {near}shipped ones: {known}"
    )


def load_surrogate(source: str) -> FittedSurrogate:
    """A surrogate from a file, from the hub, or a shipped one by its name.

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
    ProfileFileError
        If there is neither such a file nor such a name, or it holds no sound surrogate.
    """
    if on_hub(source) or Path(source).exists() or source not in _shipped(SURROGATE):
        with local_file(source) as path:
            return FittedSurrogate.load(path)
    with resources.as_file(resources.files(PACKAGE) / f"{source}{SURROGATE}") as file:
        return FittedSurrogate.load(file)


@cache
def shipped_surrogate(shape: ModelShape) -> str | None:
    """The name of the shipped surrogate that was fitted to a model; None where none was."""
    for name in _shipped(SURROGATE):
        try:
            load_surrogate(name).shape.require_same_model(shape)
        except ModelMismatchError:
            continue
        return name
    return None
