"""What commands print: JSON and results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.errors import InputError, plain
from kvalloc.report.terminal import table_lines, terminal_width

if TYPE_CHECKING:
    pass

SLID_OUT = "layers with a sliding window keep the whole prompt until the next token"
"""Why transformers' own cache may store more than a model needs right after a prompt."""


_json: ContextVar[bool] = ContextVar("kvalloc_json", default=False)
_quiet: ContextVar[bool] = ContextVar("kvalloc_quiet", default=False)
_verbose: ContextVar[bool] = ContextVar("kvalloc_verbose", default=False)


@contextmanager
def printing(*, json: bool = False, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Let what is printed inside be as ``--json``, ``--quiet`` and ``--verbose`` ask for it.

    Raises
    ------
    InputError
        If both of the last two are asked for.
    """
    if quiet and verbose:
        raise InputError("--quiet and --verbose contradict each other; give one of them")
    asked = ((_json, json), (_quiet, quiet), (_verbose, verbose))
    tokens = [(variable, variable.set(value)) for variable, value in asked]
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
    """Whether stdout is for one JSON document."""
    return _json.get()


def is_quiet() -> bool:
    """Whether only what was asked for is printed."""
    return _quiet.get()


def is_verbose() -> bool:
    """Whether more is shown than most people need."""
    return _verbose.get()


def print_result(data: Any, show: Callable[[], None]) -> None:
    """What a command found: as JSON, or as ``show`` prints it for people, or not at all."""
    if wants_json():
        print_json(data)
    elif not is_quiet():
        show()


def print_json(data: Any) -> None:
    """One JSON document on stdout; see `json_text`."""
    print(json_text(data))


def json_text(data: Any) -> str:
    """One JSON document of plain values, dataclasses, arrays and paths; none is NaN."""
    return json.dumps(data, indent=2, allow_nan=False, default=_as_plain)


def _as_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value.tolist()


def note(message: str, *, beside_json: bool = True) -> None:
    """One line on stderr, unless that is to be quiet."""
    if not is_quiet() and (beside_json or not wants_json()):
        print(plain(message), file=sys.stderr, flush=True)


def print_fields(fields: dict[str, str]) -> None:
    """Names and texts, one a line, texts aligned; wrapped in a terminal, never in a pipe.

    What has no text is left out.
    """
    fields = {name: text for name, text in fields.items() if text}
    indent = max(map(len, fields)) + 2
    for name, text in fields.items():
        print(f"{plain(name):<{indent}}{hanging(text, indent)}")


def hanging(text: str, indent: int) -> str:
    """A text wrapped to the terminal's width behind ``indent`` columns; one line in a pipe."""
    text = plain(text)
    if not sys.stdout.isatty():
        return text
    width = max(20, terminal_width() - indent)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return f"\n{'':<{indent}}".join(lines)


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, optional: Sequence[str] = ()
) -> None:
    """A table on stdout, first and last column flush left; see `table_lines`."""
    for line in table_lines(headings, rows, left=(0, -1), optional=optional):
        print(line)


def duration(seconds: float) -> str:
    """A time for people.

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
