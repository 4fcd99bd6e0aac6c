"""Errors that a user can cause, under one base class, and names of options in messages."""

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
    """Base of all errors that a user of kvalloc can cause.

    Lines of a quoted message are joined, and control characters, which may come from a file, are
    escaped.
    """

    def __str__(self) -> str:
        return plain(" ".join(super().__str__().split()))

    def __reduce__(self) -> tuple[object, ...]:
        """Return its parts for a pickle from a worker process; no `__init__` runs."""
        return __newobj__, (type(self), *self.args), self.__dict__


class InputError(KVAllocError):
    """An argument, a text or a prompt that cannot be used."""


class SampleError(InputError):
    """A sample that cannot be measured; other samples may be."""


class ProfileFileError(KVAllocError):
    """A score profile, budget profile or saved cache that cannot be trusted.

    Parameters
    ----------
    path : str or Path
        The file.
    field : str
        The field inside the file, or ``"file"`` for the file as a whole.
    value : object
        Content of the file.
    expected : str
        Expected content.
    way_out : str
        Advice to the user.
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
    """A profile that was made for another model."""


class UnsupportedModelError(KVAllocError):
    """A model with attention that kvalloc cannot see, or with a cache that it cannot replace."""


class UnsupportedRequestError(KVAllocError):
    """Something the runtime cannot do right, refused before anything runs."""


class InfeasibleError(KVAllocError):
    """A target or a capacity that no choice of budgets can meet.

    Parameters
    ----------
    message : str
        The impossible request, and the nearest possible one.
    nearest : float or int, optional
        The nearest feasible capacity (bytes) or target (in the unit of the request).
    """

    def __init__(self, message: str, *, nearest: float | int | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest


class SolverError(KVAllocError):
    """A solver that is unknown, refuses the problem, fails, or makes a false report."""


class MissingDependencyError(KVAllocError):
    """An optional package that this command needs is not installed."""


def require(what: str, *packages: str, extra: str) -> None:
    """Raise one clear line if a package of an extra is not installed.

    Raises
    ------
    MissingDependencyError
        Names the first missing one, and the command that installs it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"{what} needs {package}, which is not installed: pip install 'kvalloc[{extra}]'"
            )


def outside_range(package: str) -> str:
    """Return a warning if an installed package is outside the range in kvalloc's metadata.

    It is empty if the version is inside, or if packaging, which transformers installs, is missing.
    """
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
    """Warn at the user's line, each time: Python's registry of warnings is not used."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    line, module = frame.f_lineno, frame.f_globals.get("__name__")
    warnings.warn_explicit(
        str(message), UserWarning, frame.f_code.co_filename, line, module, registry={}
    )


def plain(text: str) -> str:
    r"""Return a text with control characters escaped, which could move a terminal's cursor.

    Examples
    --------
    >>> print(plain("a\nb \x1b[31m"))
    a\nb \x1b[31m
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def one_line(value: object, limit: int = 200) -> str:
    """Return a text, a value or another library's error on one line, shortened and `plain`."""
    if isinstance(value, BaseException):
        value = str(value).strip() or type(value).__name__
    if isinstance(value, list):
        value = value[:limit]  # the others are not shown
    text = plain(" ".join((value if isinstance(value, str) else repr(value)).split())) or "empty"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name, as the beginning of the way out; empty if none is near.

    Parameters
    ----------
    name : str
        Typed name.
    known : iterable of str
        Known names.

    Examples
    --------
    >>> nearest("TVOA", ["snapkv", "tova"]), nearest("xyz", ["snapkv", "tova"])
    ("the nearest is 'tova'; ", '')
    >>> nearest("layers-20", ["smollm2-layers-20", "smollm2-layers-10"])
    "the nearest is 'smollm2-layers-20'; "
    """
    from difflib import get_close_matches  # only a mistake needs it

    lowered = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), lowered, n=1)
    near = near or [one for one in lowered if len(name) > 2 and name.lower() in one]
    return f"the nearest is {lowered[near[0]]!r}; " if near else ""


def in_our_words(name: str, known: Iterable[str], value: object = None) -> str:
    """Return kvalloc's name of another tool's option, as the beginning of the way out.

    Parameters
    ----------
    name : str
        The unknown option, as a keyword.
    known : iterable of str
        Known names.
    value : object
        Its value.

    Examples
    --------
    >>> in_our_words("compression_ratio", ["budget"], 0.8), in_our_words("budgt", ["budget"])
    ("name the share that stays: budget='20%'; ", '')
    """
    if name != "compression_ratio" or "budget" not in known:
        return ""
    evicted = 0.8
    with suppress(TypeError, ValueError):
        evicted = float(str(value))
    stays = f"{100 * (1 - evicted):g}%" if 0 <= evicted < 1 else "20%"
    return f"name the share that stays: {option('budget', stays)}; "


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the line that refuses a name: the nearest one, and all known ones.

    Examples
    --------
    >>> no_such("task", "nedle", ["needle", "kl"])
    "there is no task 'nedle'; the nearest is 'needle'; choose from: needle, kl"
    """
    known = [*known]
    return f"there is no {kind} {name!r}; {nearest(name, known)}choose from: {', '.join(known)}"


def one_of(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Return the entry of a table under a name.

    Raises
    ------
    InputError
        If there is none; lists the names.
    """
    if name not in known:
        raise InputError(no_such(kind, name, known))
    return known[name]


_flags: ContextVar[bool] = ContextVar("kvalloc_names_flags", default=False)


@contextmanager
def naming_flags() -> Iterator[None]:
    """Let messages inside name options as flags, which command line users type."""
    token = _flags.set(True)
    try:
        yield
    finally:
        _flags.reset(token)


def option(name: str, value: object = None, *, keyword: str | None = None) -> str:
    """Return an option in the reader's form: a keyword, or a flag.

    Parameters
    ----------
    name : str
        The keyword of the flag.
    value : object, optional
        Value to show: text, a number, True for a switch, or a sequence; none by default.
    keyword : str, optional
        The keyword, if it is not the flag's name.

    Examples
    --------
    >>> option("budget_tokens"), option("budget", "20%"), option("bits", (16, 8))
    ('budget_tokens', "budget='20%'", 'bits=(16, 8)')
    >>> with naming_flags():
    ...     option("budget_tokens"), option("budget", "20%"), option("bits", (16, 8))
    ('--budget-tokens', '--budget 20%', '--bits 16,8')
    >>> with naming_flags():
    ...     option("resume", True)
    '--resume'
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
    """Options for the templates of messages: ``{option[bits]}``, ``{option[level=head]}``.

    Examples
    --------
    >>> "give {option[level=head]} or {option[resume=True]}".format(option=OptionNames())
    "give level='head' or resume=True"
    """

    def __getitem__(self, written: str) -> str:
        name, _, value = written.partition("=")
        return option(name, True if value == "True" else value or None)


def several(**options: object) -> str:
    """Return several options in a row, as `option` writes them."""
    between = " " if _flags.get() else ", "
    return between.join(option(name, value) for name, value in options.items())


def command(name: str, **options: object) -> str:
    """Return a step of the work in the reader's form: a function, or a command.

    Parameters
    ----------
    name : str
        Name of both.
    **options
        As for `option`.

    Examples
    --------
    >>> command("profile", loss="fast")
    "kvalloc.profile(loss='fast')"
    >>> with naming_flags():
    ...     command("profile", loss="fast")
    "'kvalloc profile --loss fast'"
    """
    written = several(**options)
    return f"'kvalloc {name} {written}'" if _flags.get() else f"kvalloc.{name}({written})"


def by_interface(*, python: str, flags: str) -> str:
    """Return the text for the reader of a message, in the library or on the command line."""
    return flags if _flags.get() else python


def _written(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else repr(value)
