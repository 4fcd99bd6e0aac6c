"""Every error that a user can cause, under one base class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class KVAllocError(Exception):
    """Base of every error that a user of kvalloc can cause.

    The message is one sentence or two on one line: what was wrong, where, and what to do.
    """


class InputError(KVAllocError):
    """An argument, a text or a prompt that cannot be used."""


class ProfileFileError(KVAllocError):
    """A score profile, budget profile or saved cache that cannot be trusted.

    Parameters
    ----------
    path : str or Path
        The file.
    field : str
        The field inside the file, or ``"file"`` for the file as a whole.
    found : object
        What the file holds there.
    expected : str
        What should stand there.
    way_out : str
        What the user can do about it.
    """

    def __init__(
        self, path: str | Path, *, field: str, found: object, expected: str, way_out: str
    ) -> None:
        self.path = str(path)
        self.field = field
        self.found = found
        self.expected = expected
        self.way_out = way_out
        super().__init__(f"{path}: {field} is {_short(found)}, expected {expected}; {way_out}")


class ModelMismatchError(KVAllocError):
    """A profile that was made for another model."""


class UnsupportedModelError(KVAllocError):
    """A model whose attention kvalloc cannot see or whose cache it cannot replace."""


class UnsupportedRequestError(KVAllocError):
    """Something the runtime cannot do right, refused before anything runs."""


class InfeasibleError(KVAllocError):
    """A target or a capacity that no choice of budgets can meet.

    Parameters
    ----------
    message : str
        What cannot be met, and the nearest request that can.
    nearest : float or int, optional
        The nearest feasible capacity (bytes) or target (same unit as asked).
    """

    def __init__(self, message: str, *, nearest: float | int | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest


class SolverError(KVAllocError):
    """A solver that is unknown, refuses the problem, fails, or reports what is not true."""


class MissingDependencyError(KVAllocError):
    """An optional package that this command needs is not installed."""


def _short(value: object, limit: int = 80) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split()) or "empty"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant, as the beginning of the way out; empty if unclear.

    Parameters
    ----------
    name : str
        As typed.
    known : iterable of str
        What there is.

    Examples
    --------
    >>> nearest("TVOA", ["snapkv", "tova"]), nearest("xyz", ["snapkv", "tova"])
    ("the nearest is 'tova'; ", '')
    """
    from difflib import get_close_matches  # only a mistake needs it

    lowered = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), lowered, n=1)
    return f"the nearest is {lowered[near[0]]!r}; " if near else ""
