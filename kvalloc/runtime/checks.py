"""Conditions on device values, read once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Pending = list[tuple[Tensor, Callable[[], None]]]

_pending: ContextVar[Pending | None] = ContextVar("kvalloc_checks", default=None)


def ensure(holds: Tensor, fail: Callable[[], None]) -> None:
    """Call ``fail``, which raises, unless a condition holds: now, or when `Checks` are read."""
    pending = _pending.get()
    if pending is not None:
        pending.append((holds, fail))
    elif not bool(holds):
        fail()


class Checks:
    """Conditions to read at once: each read waits for the device."""

    def __init__(self) -> None:
        self.noted: Pending = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the conditions of `ensure` inside."""
        token = _pending.set(self.noted)
        try:
            yield
        finally:
            _pending.reset(token)

    def read(self) -> None:
        """Fail by the first condition that does not hold; forget all."""
        pending, self.noted = self.noted, []
        if not pending:
            return
        device = pending[0][0].device
        flags = torch.stack([holds.to(device) for holds, _ in pending]).tolist()  # all at once
        for holds, (_, fail) in zip(flags, pending, strict=True):
            if not holds:
                fail()
