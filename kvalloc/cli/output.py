"""Output: results on stdout, all else on stderr."""

from __future__ import annotations

import json
import logging
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass, is_dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from kvalloc.errors import InputError, plain
from kvalloc.report.terminal import field_lines, terminal_width
from kvalloc.units import Option, duration


@dataclass(frozen=True, kw_only=True)
class Printing:
    """Output options of every command."""

    json: Annotated[bool, Option()] = False
    """Print JSON on stdout; progress stays on stderr."""

    quiet: Annotated[bool, Option()] = False
    """Print only results and errors."""

    verbose: Annotated[bool, Option()] = False
    """Print each step on stderr, with its time."""


_printing: ContextVar[Printing] = ContextVar("kvalloc_printing", default=Printing())  # noqa: B039


@contextmanager
def printing(options: Printing) -> Iterator[None]:
    """Print inside as the options request; refuse ``--quiet`` with ``--verbose``."""
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
    """Return whether steps are logged."""
    return _printing.get().verbose


def print_result(
    facts: Any,
    fields: Mapping[str, str] | None = None,
    *,
    lines: Iterable[str] = (),
    notes: Iterable[str] = (),
    always: bool = False,
) -> None:
    """Print a result as JSON, for people, or not at all.

    Parameters
    ----------
    facts : object
        Plain values, dataclasses, arrays, paths for ``--json``; no NaN.
    lines : iterable of str
        After the fields, made only if printed.
    notes : iterable of str
        For stderr.
    always : bool
        Whether ``--quiet`` shows it too.
    """
    if wants_json():
        print(json.dumps(facts, indent=2, allow_nan=False, default=_as_plain))
        return
    if always or not is_quiet():
        for line in (*field_lines(fields or {}), *lines):
            print(line)
    for text in notes:
        note(text)


def _as_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value.tolist()


def note(message: str) -> None:
    """Print a line on stderr, unless output is quiet."""
    if not is_quiet():
        lines = textwrap.wrap(plain(message), terminal_width(), break_on_hyphens=False)
        text = "\n".join(lines) if sys.stderr.isatty() else plain(message)
        print(text, file=sys.stderr, flush=True)


_LOG = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
"""Seconds below which work is not announced."""

LINE_EVERY_SECONDS = 30.0
"""Seconds between two lines in a log that is not a terminal."""


class ProgressBar:
    """Bar on stderr for slow work, with the time left if a ``unit`` is counted.

    Outside a terminal, counted work prints a line now and then.

    Examples
    --------
    >>> with ProgressBar("profiling", unit="layers") as progress:
    ...     progress(1, 2)
    """

    def __init__(self, text: str, *, unit: str = "") -> None:
        self._text, self._unit = text, unit
        self._bar: Any = None
        self._first: tuple[float, int] | None = None

    def __enter__(self) -> ProgressBar:
        self._begun = self._last_line = monotonic()
        self._timer = threading.Timer(PATIENCE_SECONDS, self._show)
        self._timer.daemon = True
        if sys.stderr.isatty() and not (is_quiet() or is_verbose()):
            self._timer.start()
        return self

    def _show(self) -> None:
        from rich import progress as of
        from rich.console import Console

        columns: list[Any] = [of.SpinnerColumn(), "{task.description}", of.TimeElapsedColumn()]
        if self._unit:
            columns[2:2] = of.BarColumn(bar_width=None), of.MofNCompleteColumn(), self._unit
            columns += ["left", of.TimeRemainingColumn()]
        self._bar = of.Progress(*columns, console=Console(stderr=True), transient=True, expand=True)
        self._bar.add_task(self._text, total=None)
        self._bar.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()  # it may be about to show the bar
        if self._bar is not None:
            self._bar.stop()
        _LOG.info("%s took %s", self._text, duration(monotonic() - self._begun))

    def __call__(self, done: int, total: int) -> None:
        """Show the progress."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
        now = monotonic()
        begun, first_done = self._first = self._first or (now, done)
        if sys.stderr.isatty() or done == total or now - self._last_line < LINE_EVERY_SECONDS:
            return
        self._last_line, left = now, ""
        if done > first_done:
            seconds = (now - begun) / (done - first_done) * (total - done)
            left = f", about {timedelta(seconds=round(seconds))} left"
        note(f"{self._text}: {done} of {total} {self._unit}{left}")
