"""Showing that something goes on, on stderr, and only when it takes long."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from time import monotonic
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


class ProgressBar:
    """A bar on stderr for work that takes long, with the time left where its steps are counted.

    Where stderr is not a terminal, counted work prints a line now and then.

    Parameters
    ----------
    text : str
        Name of the work.
    unit : str
        Name of a step; empty if none are counted.

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
        """Show the bar; rich is imported here, since most work is over before."""
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
        """Show how much is done."""
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

    with ProgressBar(f"loading {model}"):
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
        with ProgressBar(f"loading {model} in workers"):
            stack.enter_context(workers)
        yield LoadedModel(model=workers, tokenizer=tokenizer, model_id=model_id)
