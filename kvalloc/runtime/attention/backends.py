"""Which backend attends: a kernel that reads entries as they are stored, or torch's operations.

On CUDA the kernel is written in Triton (`kvalloc.runtime.attention.triton`), on the CPU in C
(`kvalloc.runtime.attention.cpu`). torch's operations (`kvalloc.runtime.attention.torch`) serve
every call. A backend that cannot serve a call says why; the reason is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvalloc.runtime.attention.call import AttentionCall, Backend
from kvalloc.runtime.attention.cpu import CpuBackend
from kvalloc.runtime.attention.torch import TorchBackend
from kvalloc.runtime.attention.triton import TritonBackend
from kvalloc.runtime.kept import KeptEntries

__all__ = ["BACKENDS", "attend", "chosen"]

_LOG = logging.getLogger(__name__)

BACKENDS: tuple[Backend, ...] = (TritonBackend(), CpuBackend(), TorchBackend())
"""In the order in which they are asked; the last one serves everything."""


def attend(call: AttentionCall, kept: Sequence[KeptEntries]) -> Tensor:
    """Attend from one layer's new tokens to kept entries and the tokens that followed.

    Parameters
    ----------
    call : AttentionCall
    kept : sequence of KeptEntries
        What is kept of the prompt, one record for the heads of each width.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, value_dim)
        Of the queries' type, contiguous.
    """
    if len(kept) == 1:
        return chosen(call, kept[0]).attend(call, kept[0])
    heads = tuple(head for part in kept for head in part.heads or ())
    group, outputs, first = call.queries.shape[1] // len(heads), [], 0
    order = _order(heads, group, call.queries.device)
    call = call if order is None else call.of_heads(*order[:2])
    for part in kept:
        assert part.heads is not None, "parts of a layer say which heads they are"
        last = first + len(part.heads)
        some = call.of_heads(range(first, last), range(first * group, last * group))
        outputs.append(chosen(some, part).attend(some, part))
        first = last
    output = torch.cat(outputs, dim=2)
    return output if order is None else output.index_select(2, order[2])


def chosen(call: AttentionCall, kept: KeptEntries) -> Backend:
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


@cache
def _order(
    heads: tuple[int, ...], group: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return KV heads, their query heads, and the way back of these, on the device.

    None where the heads stand in this order already.
    """
    if heads == tuple(range(len(heads))):
        return None
    own = torch.tensor(heads, device=device)
    queries = (own[:, None] * group + torch.arange(group, device=device)).view(-1)
    return own, queries, queries.argsort()
