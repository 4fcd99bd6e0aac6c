"""What commands print: JSON and results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from kvalloc.errors import InputError, plain
from kvalloc.report.terminal import field_lines, terminal_width
from kvalloc.units import Option


@dataclass(frozen=True, kw_only=True)
class Printing:
    """What every command prints, and where."""

    json: Annotated[bool, Option()] = False
    """Print JSON on stdout; progress stays on stderr."""

    quiet: Annotated[bool, Option()] = False
    """Print only results and errors."""

    verbose: Annotated[bool, Option()] = False
    """Print each step on stderr, with its time."""


_printing: ContextVar[Printing] = ContextVar("kvalloc_printing", default=Printing())  # noqa: B039


@contextmanager
def printing(options: Printing) -> Iterator[None]:
    """Print inside as ``--json``, ``--quiet`` and ``--verbose`` ask for.

    Raises
    ------
    InputError
        If the last two are given together.
    """
    if options.quiet and options.verbose:
        raise InputError("--quiet and --verbose contradict each other; give one of them")
    token = _printing.set(options)
    try:
        with _logging() if options.verbose else nullcontext():
            yield
    finally:
        _printing.reset(token)


@contextmanager
def _logging() -> Iterator[None]:
    """Show on stderr what kvalloc logs, with the milliseconds since the program began."""
    logger, handler = logging.getLogger("kvalloc"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[{relativeCreated:6.0f} ms] {message}", style="{"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def wants_json() -> bool:
    """Return whether stdout is for one JSON document."""
    return _printing.get().json


def is_quiet() -> bool:
    """Return whether only results and errors are printed."""
    return _printing.get().quiet


def is_verbose() -> bool:
    """Return whether more is shown than most people need."""
    return _printing.get().verbose


def print_result(
    facts: Any,
    fields: Mapping[str, str] | None = None,
    *,
    lines: Iterable[str] = (),
    notes: Iterable[str] = (),
    always: bool = False,
) -> None:
    """Print a result: as JSON, or for people, or not at all.

    Parameters
    ----------
    facts : object
        Plain values, for ``--json``.
    fields : mapping of str to str, optional
        Names and texts for people; see `kvalloc.report.terminal.field_lines`.
    lines : iterable of str
        Lines for people that follow, made only if they are printed.
    notes : iterable of str
        Notes on them, for stderr.
    always : bool
        Whether ``--quiet`` shows it, too.
    """
    if wants_json():
        print_json(facts)
        return
    if always or not is_quiet():
        for line in (*field_lines(fields or {}), *lines):
            print(line)
    for text in notes:
        note(text)


def print_json(data: Any) -> None:
    """Print one JSON document of plain values, dataclasses, arrays and paths; none is NaN."""
    print(json.dumps(data, indent=2, allow_nan=False, default=_as_plain))


def _as_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value.tolist()


def note(message: str) -> None:
    """Print a line on stderr, wrapped in a terminal, unless that is to be quiet."""
    if not is_quiet():
        lines = textwrap.wrap(plain(message), terminal_width(), break_on_hyphens=False)
        text = "\n".join(lines) if sys.stderr.isatty() else plain(message)
        print(text, file=sys.stderr, flush=True)
