"""Showing that something goes on, on stderr, and only when it takes long."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from kvalloc.cli.options import EngineOptions, LoadOptions
from kvalloc.cli.output import is_quiet, is_verbose, note
from kvalloc.errors import InputError, option
from kvalloc.units import duration

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel

_LOG = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
"""Shorter work is not announced."""

LINE_EVERY_SECONDS = 30.0
"""How often a log, which is not a terminal, gets a line."""


def _started(text: str, *columns: Any, expand: bool = False) -> Any:
    """Show a bar of rich on stderr and return it; it goes when it is stopped."""
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(*columns, console=Console(stderr=True), transient=True, expand=expand)
    bar.add_task(text, total=None)
    bar.start()
    return bar


@contextmanager
def slow(text: str) -> Iterator[None]:
    """Show a spinner with the elapsed time while work of unknown length takes long.

    Parameters
    ----------
    text : str
        What is being done.
        Nothing is shown where stderr is not a terminal.
    """
    begun, shown = perf_counter(), []

    def show() -> None:
        # Imported here: most work is over before anybody needs a spinner.
        from rich import progress as of

        columns = of.SpinnerColumn(), "{task.description}", of.TimeElapsedColumn()
        shown.append(_started(text, *columns))

    timer = threading.Timer(PATIENCE_SECONDS, show)
    timer.daemon = True
    if sys.stderr.isatty() and not (is_quiet() or is_verbose()):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()  # it may be about to show one
        for spinner in shown:
            spinner.stop()
        _LOG.info("%s took %s", text, duration(perf_counter() - begun))


class ProgressBar:
    """A bar with the time left; lines now and then where stderr is not a terminal.

    Parameters
    ----------
    text : str
        What is being done.
    unit : str
        What is counted.

    Examples
    --------
    >>> with ProgressBar("profiling", unit="layers") as progress:
    ...     progress(1, 2)
    """

    def __init__(self, text: str, *, unit: str) -> None:
        self._text, self._unit = text, unit
        self._bar: Any = None
        self._first: tuple[float, int] | None = None
        self._last_line = 0.0

    def __enter__(self) -> ProgressBar:
        self._entered = perf_counter()
        if sys.stderr.isatty() and not is_quiet():
            from rich import progress as of

            count = (of.BarColumn(bar_width=None), of.MofNCompleteColumn(), self._unit)
            clock = (of.TimeElapsedColumn(), "left", of.TimeRemainingColumn())
            self._bar = _started(self._text, "{task.description}", *count, *clock, expand=True)
        return self

    def __exit__(self, *error: object) -> None:
        _LOG.info("%s took %s", self._text, duration(perf_counter() - self._entered))
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show how much is done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
            return
        now = monotonic()
        if self._first is None:
            self._first, self._last_line = (now, done), now
        elif done < total and now - self._last_line >= LINE_EVERY_SECONDS:
            self._last_line, (begun, first_done), left = now, self._first, ""
            if done > first_done:
                seconds = (now - begun) / (done - first_done) * (total - done)
                left = f", about {duration(seconds) if seconds >= 60 else f'{seconds:.0f} s'} left"
            note(f"{self._text}: {done} of {total} {self._unit}{left}")


def load(model: str, options: LoadOptions) -> LoadedModel:
    """Load the model that the user named, with a note where loading takes long.

    Parameters
    ----------
    model : str
    options : LoadOptions

    Raises
    ------
    KVAllocError
        If it cannot be had, or not in this dtype or on this device.
    """
    from kvalloc.models.loading import load_model

    with slow(f"loading {model}"):
        return load_model(model, notify=note, **options.keywords)


@contextmanager
def running(model: str, options: EngineOptions) -> Iterator[LoadedModel]:
    """Yield the model that the user named, where it is to run; inside nothing is printed on stdout.

    Parameters
    ----------
    model : str
    options : EngineOptions

    Raises
    ------
    KVAllocError
        As `load`; or if there is no such engine, or it cannot be used.
    """
    if options.engine == "local":
        if about := [name for name in ("address", "workers") if getattr(options, name) is not None]:
            raise InputError(f"{option(about[0])} goes with {option('engine', 'ray')}; add that")
        if options.threads is not None:
            import torch

            torch.set_num_threads(options.threads)
        yield load(model, options)
        return
    from kvalloc.engine.ray import RayEngine
    from kvalloc.models.loading import LoadedModel, ModelSource

    source = ModelSource(source=model, **options.keywords)
    tokenizer, model_id = source.tokenizer(note)
    placing = {name: getattr(options, name) for name in ("address", "workers", "threads")}
    workers = RayEngine(source=source, log=is_verbose(), **placing)
    with ExitStack() as stack:
        # Ray tells of workers that died on stdout, where a command's result belongs
        sink = sys.stderr if is_verbose() else stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(redirect_stdout(sink))
        with slow(f"loading {model} in workers"):
            stack.enter_context(workers)
        yield LoadedModel(model=workers, tokenizer=tokenizer, model_id=model_id)
