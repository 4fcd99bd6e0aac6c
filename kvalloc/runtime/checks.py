"""Conditions on values of the device, which the host reads once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Noted = list[tuple[Tensor, Callable[[], None]]]

_noted: ContextVar[Noted | None] = ContextVar("kvalloc_checks", default=None)


def ensure(holds: Tensor, fail: Callable[[], None]) -> None:
    """Fail unless a condition holds; now, or where `Checks` note it, when those are read.

    Parameters
    ----------
    holds : Tensor of bool, ()
    fail : callable
        Raises, if it does not; may read what it says from the device.
    """
    noted = _noted.get()
    if noted is not None:
        noted.append((holds, fail))
    elif not bool(holds):
        fail()


class Checks:
    """What has been noted and not yet read: a host that reads waits for the device."""

    def __init__(self) -> None:
        self._noted: Noted = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what `ensure` is given inside instead of reading it."""
        token = _noted.set(self._noted)
        try:
            yield
        finally:
            _noted.reset(token)

    def read(self) -> None:
        """Fail as the first condition wants that does not hold, if any does not; forget them."""
        noted, self._noted = self._noted, []
        flags = [holds for holds, _ in noted]
        for holds, (_, fail) in zip(_values(flags) if flags else [], noted, strict=True):
            if not holds:
                fail()


def _values(flags: list[Tensor]) -> list[bool]:
    """Read flags from the device at once."""
    values: list[bool] = torch.stack([own.to(flags[0].device) for own in flags]).tolist()
    return values
