"""Which backend attends: a kernel that reads entries as they are stored, or torch's operations.

On CUDA the kernel is written in Triton (`kvalloc.runtime.attention.triton`), on the CPU in C
(`kvalloc.runtime.attention.cpu`). torch's operations (`kvalloc.runtime.attention.torch`) serve
every call. A backend that cannot serve a call says why; the reason is logged once.
"""

from __future__ import annotations

import logging
from functools import cache

from torch import Tensor

from kvalloc.runtime.attention.call import AttentionCall, Backend
from kvalloc.runtime.attention.cpu import CpuBackend
from kvalloc.runtime.attention.torch import TorchBackend
from kvalloc.runtime.attention.triton import TritonBackend
from kvalloc.runtime.kept import Kept

_LOG = logging.getLogger(__name__)

BACKENDS: tuple[Backend, ...] = (TritonBackend(), CpuBackend(), TorchBackend())
"""In the order in which they are asked; the last one serves everything."""


def attend(call: AttentionCall, kept: Kept) -> Tensor:
    """Attend from one layer's new tokens to kept entries and the tokens that followed.

    Parameters
    ----------
    call : AttentionCall
    kept : Kept
        What is kept of the prompt.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, value_dim)
        Of the queries' type, contiguous.
    """
    return chosen(call, kept).attend(call, kept)


def chosen(call: AttentionCall, kept: Kept) -> Backend:
    """Return the first backend that serves a call."""
    for backend in BACKENDS[:-1]:
        reason = backend.refusal(call, kept)
        if reason is None:
            return backend
        _log_once(backend.name, reason)
    return BACKENDS[-1]


@cache
def _log_once(name: str, reason: str) -> None:
    _LOG.info("the %s does not serve attention: %s", name, reason)
