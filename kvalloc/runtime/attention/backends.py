"""Choice of the backend that attends.

Plug-ins of the group ``kvalloc.attention``, such as the CUDA kernel, come first, then C on the CPU,
then torch, which serves every call. Each refusal is logged once.
"""

from __future__ import annotations

import logging
from functools import cache

from torch import Tensor

from kvalloc.problem.registry import ATTENTION, load, names
from kvalloc.runtime.attention.call import AttentionCall, Backend
from kvalloc.runtime.attention.cpu import CpuBackend
from kvalloc.runtime.attention.torch import TorchBackend
from kvalloc.runtime.kept import Kept

_LOG = logging.getLogger(__name__)


@cache
def backends() -> tuple[Backend, ...]:
    """Return all backends in the order of preference.

    Raises
    ------
    SolverError
        If a plug-in cannot be imported, or is not a backend.
    """
    plugged = [load(ATTENTION, name, Backend)() for name in names(ATTENTION)]
    return (*plugged, CpuBackend(), TorchBackend())


def attend(call: AttentionCall, kept: Kept) -> Tensor:
    """Return the `chosen` backend's output; see `Backend.attend`."""
    return chosen(call, kept).attend(call, kept)


def chosen(call: AttentionCall, kept: Kept) -> Backend:
    """Return the first backend that serves a call."""
    for backend in backends():
        if (reason := backend.refusal(call, kept)) is None:
            break
        _log_once(backend.name, reason)
    return backend


@cache
def _log_once(name: str, reason: str) -> None:
    _LOG.info("the %s does not serve attention: %s", name, reason)
