"""The budget profiles that ship with kvalloc, by name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from kvalloc.errors import InputError, nearest
from kvalloc.formats.budget_profile import BudgetProfile

PACKAGE = "kvalloc.profiles"


def shipped_profiles() -> list[str]:
    """Names of the budget profiles that ship with kvalloc, sorted."""
    folder = resources.files(PACKAGE)
    return sorted(
        entry.name.removesuffix(".json")
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    )


def load_profile(source: str | Path) -> BudgetProfile:
    """A budget profile from a file, or a shipped one by its name.

    Parameters
    ----------
    source : str or Path
        A path, or a name that `shipped_profiles` lists.

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
    path = Path(source)
    if path.exists():
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
