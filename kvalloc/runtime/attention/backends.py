"""Choice of the backend that attends: a kernel that reads entries as stored, or torch's operations.

On the CPU the kernel is written in C (`kvalloc.runtime.attention.cpu`). Others, such as the one on
CUDA, come through the entry-point group ``kvalloc.attention`` and are asked first. torch's
operations (`kvalloc.runtime.attention.torch`) serve every call. A backend that cannot serve a call
gives a reason, which is logged once.
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
    """Return all backends in the order of preference; the last one serves everything.

    Raises
    ------
    SolverError
        If a backend of another package cannot be imported, or is not a backend.
    """
    plugged = [load(ATTENTION, name, Backend)() for name in names(ATTENTION)]
    return (*plugged, CpuBackend(), TorchBackend())


def attend(call: AttentionCall, kept: Kept) -> Tensor:
    """Attend from one layer's new tokens to kept entries and later tokens.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, value_dim)
        Of the queries' type, contiguous.
    """
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
