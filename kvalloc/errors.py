"""Errors that a user can cause, and names of options in messages."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copyreg import __newobj__  # type: ignore[attr-defined]  # as pickles name it
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class KVAllocError(Exception):
    """Base of all errors that a user can cause; its text is one `plain` line."""

    def __str__(self) -> str:
        return plain(" ".join(super().__str__().split()))

    def __reduce__(self) -> tuple[object, ...]:
        """Return its parts for a pickle; no `__init__` runs."""
        return __newobj__, (type(self), *self.args), self.__dict__


class InputError(KVAllocError):
    """An argument, a text or a prompt that cannot be used."""


class SampleError(InputError):
    """A sample that cannot be measured; others may be."""


class ProfileFileError(KVAllocError):
    """A score profile, budget profile or saved cache that cannot be trusted.

    ``field`` is ``"file"`` for the file as a whole; ``way_out`` advises the user.
    """

    def __init__(
        self, path: str | Path, *, field: str, value: object, expected: str, way_out: str
    ) -> None:
        self.path = str(path)
        self.field = field
        self.value = value
        self.expected = expected
        self.way_out = way_out
        shown = one_line(value, 80)
        place = one_line(field, 80)
        super().__init__(f"{path}: {place} is {shown}, expected {expected}; {way_out}")


class ModelMismatchError(KVAllocError):
    """A profile of another model."""


class UnsupportedModelError(KVAllocError):
    """A model with attention that kvalloc cannot see, or a cache that it cannot replace."""


class UnsupportedRequestError(KVAllocError):
    """A request that the runtime cannot do right, refused before anything runs."""


class InfeasibleError(KVAllocError):
    """A target or a capacity that no choice of budgets can meet.

    ``nearest`` is the nearest feasible capacity (bytes) or target (in its unit).
    """

    def __init__(self, message: str, *, nearest: float | int | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest


class SolverError(KVAllocError):
    """A solver that is unknown, refuses, fails, or makes a false report."""


class MissingDependencyError(KVAllocError):
    """An optional package that is not installed."""


def require(what: str, *packages: str, extra: str) -> None:
    """Raise, with the command that installs an extra, if a package of it is missing.

    Raises
    ------
    MissingDependencyError
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"{what} needs {package}, which is not installed: pip install 'kvalloc[{extra}]'"
            )


def outside_range(package: str) -> str:
    """Return a warning if an installed package is outside the range of kvalloc's metadata."""
    from importlib.metadata import PackageNotFoundError, requires, version

    with suppress(ImportError, PackageNotFoundError):
        from packaging.requirements import Requirement

        installed = version(package)
        for line in requires("kvalloc") or ():
            requirement = Requirement(line)
            name, limits, marker = requirement.name, requirement.specifier, requirement.marker
            if name != package or (marker and not marker.evaluate({"extra": "run"})):
                continue
            if not limits.contains(installed, prereleases=True):
                range_text = name + ",".join(sorted(map(str, limits), reverse=True))
                return f"kvalloc asks for {range_text}, not {installed}: pip install '{range_text}'"
    return ""


_BETWEEN = ("kvalloc", "torch", "transformers", "accelerate", "peft", "contextlib")
"""Packages with lines between a user's line and a warning."""


def warn_user(message: object) -> None:
    """Warn at the user's line, each time: Python's registry is not used."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    line, module = frame.f_lineno, frame.f_globals.get("__name__")
    warnings.warn_explicit(
        str(message), UserWarning, frame.f_code.co_filename, line, module, registry={}
    )


def plain(text: str) -> str:
    r"""Return a text with control characters, which could move a cursor, escaped."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def one_line(value: object, limit: int = 200) -> str:
    """Return a text, a value or an error on one line, shortened and `plain`."""
    if isinstance(value, BaseException):
        value = str(value).strip() or type(value).__name__
    if isinstance(value, list):
        value = value[:limit]  # the others are not shown
    text = plain(" ".join((value if isinstance(value, str) else repr(value)).split())) or "empty"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name, as the beginning of the way out, or ""."""
    from difflib import get_close_matches  # only a mistake needs it

    lowered = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), lowered, n=1)
    near = near or [one for one in lowered if len(name) > 2 and name.lower() in one]
    return f"the nearest is {lowered[near[0]]!r}; " if near else ""


def in_our_words(name: str, known: Iterable[str], value: object = None) -> str:
    """Return kvalloc's name of another tool's option, as `nearest` does."""
    if name != "compression_ratio" or "budget" not in known:
        return ""
    evicted = 0.8
    with suppress(TypeError, ValueError):
        evicted = float(str(value))
    stays = f"{100 * (1 - evicted):g}%" if 0 <= evicted < 1 else "20%"
    return f"name the share that stays: {option('budget', stays)}; "


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the line that refuses a name, with the nearest and all known ones."""
    known = [*known]
    return f"there is no {kind} {name!r}; {nearest(name, known)}choose from: {', '.join(known)}"


def one_of(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Return the entry of a table under a name.

    Raises
    ------
    InputError
    """
    if name not in known:
        raise InputError(no_such(kind, name, known))
    return known[name]


_flags: ContextVar[bool] = ContextVar("kvalloc_names_flags", default=False)


@contextmanager
def naming_flags() -> Iterator[None]:
    """Let messages inside name options as flags."""
    token = _flags.set(True)
    try:
        yield
    finally:
        _flags.reset(token)


def option(name: str, value: object = None, *, keyword: str | None = None) -> str:
    """Return an option in the reader's form: a keyword, or a flag.

    Parameters
    ----------
    value : object, optional
        Text, a number, True for a switch, or a sequence.
    keyword : str, optional
        If it is not the flag's name.

    Examples
    --------
    >>> option("budget", "20%"), option("bits", (16, 8))
    ("budget='20%'", 'bits=(16, 8)')
    >>> with naming_flags():
    ...     option("budget_tokens"), option("bits", (16, 8)), option("resume", True)
    ('--budget-tokens', '--bits 16,8', '--resume')
    """
    if not _flags.get():
        name = keyword or name
        return name if value is None else f"{name}={_written(value)}"
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is True:
        return flag
    if isinstance(value, tuple | list):
        return f"{flag} {','.join(map(str, value))}"
    return f"{flag} {value:.15g}" if isinstance(value, float) else f"{flag} {value}"


class OptionNames:
    """Options for the templates of messages: ``{option[bits]}``, ``{option[level=head]}``."""

    def __getitem__(self, written: str) -> str:
        name, _, value = written.partition("=")
        return option(name, True if value == "True" else value or None)


def several(**options: object) -> str:
    """Return several options in a row."""
    between = " " if _flags.get() else ", "
    return between.join(option(name, value) for name, value in options.items())


def command(name: str, **options: object) -> str:
    """Return a function, or a command, in the reader's form."""
    written = several(**options)
    return f"'kvalloc {name} {written}'" if _flags.get() else f"kvalloc.{name}({written})"


def by_interface(*, python: str, flags: str) -> str:
    """Return the text for a reader of the library, or of the command line."""
    return flags if _flags.get() else python


def _written(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else repr(value)
