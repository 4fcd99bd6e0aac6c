"""What commands print: JSON and results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from kvalloc.errors import InputError, plain
from kvalloc.report.terminal import hanging, table_text, terminal_width
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
    """Let what is printed inside be as ``--json``, ``--quiet`` and ``--verbose`` ask for it.

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
    """Show on stderr what kvalloc logs, with the seconds since the command began."""
    begun, logger = time.perf_counter(), logging.getLogger("kvalloc")
    handler, level = logging.Handler(logging.INFO), logger.level

    def emit(record: logging.LogRecord) -> None:
        note(f"[{time.perf_counter() - begun:6.2f} s] {record.getMessage()}")

    handler.emit = emit  # type: ignore[method-assign]
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
    facts: Any, shown: Mapping[str, str] | Callable[[], object], *, always: bool = False
) -> None:
    """Print a result: as JSON, or for people, or not at all.

    Parameters
    ----------
    facts : object
        Plain values, for ``--json``.
    shown : mapping of str to str, or callable
        Names and texts for people, see `print_fields`; or what prints them.
    always : bool
        Whether ``--quiet`` shows it, too.
    """
    if wants_json():
        print_json(facts)
    elif always or not is_quiet():
        print_fields(shown) if isinstance(shown, Mapping) else shown()


def print_json(data: Any) -> None:
    """Print one JSON document of plain values, dataclasses, arrays and paths; none is NaN."""
    print(json.dumps(data, indent=2, allow_nan=False, default=_as_plain))


def _as_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value.tolist()


def note(message: str, *, beside_json: bool = True) -> None:
    """Print a line on stderr, wrapped in a terminal, unless that is to be quiet."""
    if not is_quiet() and (beside_json or not wants_json()):
        lines = textwrap.wrap(plain(message), terminal_width(), break_on_hyphens=False)
        text = "\n".join(lines) if sys.stderr.isatty() else plain(message)
        print(text, file=sys.stderr, flush=True)


def print_fields(fields: Mapping[str, str]) -> None:
    """Print names and texts, one a line, texts aligned; wrapped in a terminal, never in a pipe.

    What has no text is left out.
    """
    fields = {name: text for name, text in fields.items() if text}
    indent = max(map(len, fields), default=0) + 2
    for name, text in fields.items():
        print(f"{plain(name):<{indent}}{hanging(text, indent)}")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, keys: int = 1) -> None:
    """Print a table; see `kvalloc.report.terminal.table_text`."""
    print(table_text(headings, rows, keys=keys))
