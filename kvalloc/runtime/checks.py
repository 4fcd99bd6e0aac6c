"""Conditions on device values, which the host reads once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Pending = list[tuple[Tensor, Callable[[], None]]]

_pending: ContextVar[Pending | None] = ContextVar("kvalloc_checks", default=None)


def ensure(holds: Tensor, fail: Callable[[], None]) -> None:
    """Fail unless a condition holds: now, or when collecting `Checks` are read.

    Parameters
    ----------
    holds : Tensor of bool, ()
    fail : callable
        Raises the error; may read values from the device for its message.
    """
    pending = _pending.get()
    if pending is not None:
        pending.append((holds, fail))
    elif not bool(holds):
        fail()


class Checks:
    """Conditions collected to be read together: each read waits for the device."""

    def __init__(self) -> None:
        self.noted: Pending = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the conditions of `ensure` inside, to be read later."""
        token = _pending.set(self.noted)
        try:
            yield
        finally:
            _pending.reset(token)

    def read(self) -> None:
        """Call the ``fail`` of the first condition that does not hold, if any; forget all."""
        pending, self.noted = self.noted, []
        if not pending:
            return
        device = pending[0][0].device
        flags = torch.stack([holds.to(device) for holds, _ in pending]).tolist()  # all at once
        for holds, (_, fail) in zip(flags, pending, strict=True):
            if not holds:
                fail()
