"""Which backend attends: a kernel that reads entries as they are stored, or torch's operations.

On CUDA the kernel is written in Triton (`kvalloc.runtime.attention.triton`), on the CPU in C
(`kvalloc.runtime.attention.cpu`). torch's operations (`kvalloc.runtime.attention.torch`) serve
every call. A backend that cannot serve a call says why; the reason is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kvalloc.runtime.attention.call import AttentionCall, Backend
from kvalloc.runtime.attention.cpu import CpuBackend
from kvalloc.runtime.attention.torch import TorchBackend
from kvalloc.runtime.attention.triton import TritonBackend
from kvalloc.runtime.kept import FlatEntries
from kvalloc.runtime.quantization import rotated

__all__ = ["BACKENDS", "attend", "chosen"]

_LOG = logging.getLogger(__name__)

BACKENDS: tuple[Backend, ...] = (TritonBackend(), CpuBackend(), TorchBackend())
"""In the order in which they are asked; the last one serves everything."""


def attend(call: AttentionCall, kept: Sequence[FlatEntries]) -> Tensor:
    """Attention of one layer's new tokens over kept entries and the tokens that followed.

    Parameters
    ----------
    call : AttentionCall
    kept : sequence of FlatEntries
        What is kept of the prompt, one record for the heads of each width.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, value_dim)
        Of the queries' type, contiguous.
    """
    if len(kept) == 1:
        return _attend(call, kept[0])
    batch, n_query_heads, n_new, _ = call.queries.shape
    group = n_query_heads // call.keys.shape[1]
    output = call.queries.new_empty(batch, n_new, n_query_heads, call.values.shape[-1])
    for part in kept:
        assert part.heads is not None, "parts of a layer say which heads they are"
        heads, own = _places(part.heads, group, output.device)
        some = call.heads(heads, own)
        output.index_copy_(2, own, _attend(some, part))
    return output


def _attend(call: AttentionCall, kept: FlatEntries) -> Tensor:
    """As `attend`; values at 3 bits are rotated, and so are all others here, and the answer."""
    if kept.bits != 3:
        return chosen(call, kept).attend(call, kept)
    queries, keys, values = call.queries.float(), call.keys.float(), rotated(call.values)
    turned = replace(call, queries=queries, keys=keys, values=values)
    found = chosen(turned, kept).attend(turned, kept)
    return rotated(found).to(call.queries.dtype)


def chosen(call: AttentionCall, kept: FlatEntries) -> Backend:
    """The first backend that serves a call."""
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
def _places(heads: tuple[int, ...], group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """KV heads, and the query heads that belong to them, on the device."""
    own = torch.tensor(heads, device=device)
    members = torch.arange(group, device=device)
    return own, (own[:, None] * group + members).view(-1)
