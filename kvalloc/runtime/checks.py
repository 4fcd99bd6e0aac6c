"""Conditions on values of the device, which the host reads once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Pending = list[tuple[Tensor, Callable[[], None]]]

_pending: ContextVar[Pending | None] = ContextVar("kvalloc_checks", default=None)


def ensure(holds: Tensor, fail: Callable[[], None]) -> None:
    """Fail unless a condition holds; now, or where `Checks` note it, when those are read.

    Parameters
    ----------
    holds : Tensor of bool, ()
    fail : callable
        Raises if it does not; may read numbers for its message from the device.
    """
    pending = _pending.get()
    if pending is not None:
        pending.append((holds, fail))
    elif not bool(holds):
        fail()


class Checks:
    """Conditions that are collected and not yet read: a host that reads waits for the device."""

    def __init__(self) -> None:
        self.noted: Pending = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Note what `ensure` is given inside instead of reading it."""
        token = _pending.set(self.noted)
        try:
            yield
        finally:
            _pending.reset(token)

    def read(self) -> None:
        """Fail as the first condition wants that does not hold, if any does not; forget them."""
        pending, self.noted = self.noted, []
        if not pending:
            return
        device = pending[0][0].device
        flags = torch.stack([holds.to(device) for holds, _ in pending]).tolist()  # all at once
        for holds, (_, fail) in zip(flags, pending, strict=True):
            if not holds:
                fail()
