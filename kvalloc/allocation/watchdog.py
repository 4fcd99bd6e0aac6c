"""Calls into other people's code that must come back in time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NoAnswerError(Exception):
    """A call that did not come back in time; kvalloc turns it into an error of its own."""


def call_in_time(call: Callable[[], T], *, seconds: float) -> T:
    """The result of a call, or an error when it takes too long.

    The call runs in a thread of its own, in a copy of the caller's context, while this one waits.
    Python cannot stop a thread: one that hangs is left alone as a daemon, which does not keep the
    process from ending. Code that never gives up the interpreter lock cannot be watched like this.

    Parameters
    ----------
    call : callable
        Takes nothing.
    seconds : float
        How long to wait.

    Returns
    -------
    object
        What the call returned.

    Raises
    ------
    NoAnswerError
        If it did not come back in time. What the call itself raises is raised here.

    Examples
    --------
    >>> call_in_time(lambda: 6 * 7, seconds=5.0)
    42
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again where it is waited for
            errors.append(error)

    context = contextvars.copy_context()
    worker = threading.Thread(target=context.run, args=(run,), daemon=True, name="kvalloc-call")
    worker.start()
    worker.join(min(seconds, threading.TIMEOUT_MAX))
    if errors:
        raise errors[0]
    if not results:
        raise NoAnswerError(f"no answer after {seconds:g} s")
    return results[0]
