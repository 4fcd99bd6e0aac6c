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
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from kvalloc.errors import InputError, plain
from kvalloc.report.terminal import table_lines, terminal_width

_json: ContextVar[bool] = ContextVar("kvalloc_json", default=False)
_quiet: ContextVar[bool] = ContextVar("kvalloc_quiet", default=False)
_verbose: ContextVar[bool] = ContextVar("kvalloc_verbose", default=False)


@contextmanager
def printing(*, json: bool = False, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Let what is printed inside be as ``--json``, ``--quiet`` and ``--verbose`` ask for it.

    Raises
    ------
    InputError
        If the last two are given together.
    """
    if quiet and verbose:
        raise InputError("--quiet and --verbose contradict each other; give one of them")
    settings = ((_json, json), (_quiet, quiet), (_verbose, verbose))
    tokens = [(variable, variable.set(value)) for variable, value in settings]
    try:
        with _logging() if verbose else nullcontext():
            yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


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
    return _json.get()


def is_quiet() -> bool:
    """Return whether only results and errors are printed."""
    return _quiet.get()


def is_verbose() -> bool:
    """Return whether more is shown than most people need."""
    return _verbose.get()


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


def hanging(text: str, indent: int) -> str:
    """Wrap a text to the terminal's width behind ``indent`` columns; one line in a pipe."""
    text = plain(text)
    if not sys.stdout.isatty():
        return text
    width = max(20, terminal_width() - indent)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':<{indent}}".join(lines)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, keys: int = 1) -> None:
    """Print a table: the first columns, which name a row, and the last one flush left.

    In a terminal that is too narrow, columns that do not fit stand below, the rows named again. In
    a pipe a row is always one line with all columns.
    """
    last = len(headings) - 1
    left = {*range(keys), last}

    def lines(places: Sequence[int]) -> list[str]:
        cells = [[row[place] for place in places] for row in (headings, *rows)]
        left_places = [place for place, column in enumerate(places) if column in left]
        return table_lines(cells[0], cells[1:], left=left_places)

    blocks = [[*range(keys)]]
    for place in range(keys, last + 1):
        wider = lines([*blocks[-1], place])
        fits = not sys.stdout.isatty() or max(map(len, wider)) <= terminal_width()
        if not (fits or len(blocks[-1]) == keys):
            blocks.append([*range(keys)])
        blocks[-1].append(place)
    print("\n\n".join("\n".join(lines(block)) for block in blocks))


def duration(seconds: float) -> str:
    """Return a time for people.

    Examples
    --------
    >>> duration(0.0123), duration(12.34), duration(125), duration(7322)
    ('0.012 s', '12.3 s', '2 min 5 s', '2 h 2 min')
    """
    if seconds < 10:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
