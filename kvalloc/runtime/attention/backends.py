"""Which backend attends: a kernel that reads entries as they are stored, or torch's operations.

On CUDA the kernel is written in Triton (`kvalloc.runtime.attention.triton`), on the CPU in C
(`kvalloc.runtime.attention.cpu`). Without one, entries at fewer bits are read from their codes by
one decoded token on the CPU (`kvalloc.runtime.attention.codes`); for all else some heads at a time
become numbers again, at most `SCRATCH_NUMBERS` of one layer, or one head of one row where that has
more; what was read is freed before the next heads are.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.runtime.attention.call import AttentionCall, Kernel
from kvalloc.runtime.attention.codes import codes_attention
from kvalloc.runtime.attention.masks import MaskKind, biased_mask
from kvalloc.runtime.attention.torch import even_attention, masked_attention, ragged_attention
from kvalloc.runtime.kept import FlatEntries, RaggedEntries
from kvalloc.runtime.packed import PackedEntries, PackedHeads

__all__ = [
    "apart_attention",
    "biased_attention",
    "entries_attention",
    "kernel_for",
    "reads_apart",
    "unpacked_attention",
]

SCRATCH_NUMBERS = 1 << 23
"""Keys and values that are numbers at the same time."""

KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What kernels read."""


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which torch for CUDA brings along."""
    return find_spec("triton") is not None


def kernel_for(call: AttentionCall, *stored: Tensor) -> Kernel | None:
    """The kernel that answers a call, if there is one.

    Parameters
    ----------
    call : AttentionCall
    *stored : Tensor
        Keys and values of kept entries, unless they are packed.

    Returns
    -------
    Kernel or None
        None where they are not all of one type, as under autocast where a model normalises
        queries and keys in float32; and where gradients are asked for, which kernels do not give.
    """
    given = (call.queries, call.keys, call.values, *stored)
    dtype = call.queries.dtype
    if dtype not in KERNEL_TYPES or any(one.dtype != dtype for one in given):
        return None
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        return None
    if call.queries.is_cuda and has_triton():
        from kvalloc.runtime.attention.triton import triton_attention

        return triton_attention
    if call.queries.device.type == "cpu":
        from kvalloc.runtime.attention.cpu import cpu_attention, serves

        return cpu_attention if serves(call) else None
    return None


def entries_attention(call: AttentionCall, entries: RaggedEntries | PackedEntries) -> Tensor:
    """Attention of one layer's new tokens over entries and the tokens after them.

    Parameters
    ----------
    call : AttentionCall
    entries : RaggedEntries or PackedEntries
        What is kept of the prompt; packed, also what followed it longer ago.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
        Of the queries' type, contiguous.
    """
    if isinstance(entries, RaggedEntries):
        kernel = kernel_for(call, entries.keys, entries.values)
        return ragged_attention(call, entries) if kernel is None else kernel(call, entries.flat)
    if len(entries.parts) == 1:
        return _part_attention(call, entries.parts[0])
    batch, n_query_heads, n_new, _ = call.queries.shape
    output = call.queries.new_empty(batch, n_new, n_query_heads, call.values.shape[-1])
    by_head = torch.arange(n_query_heads, device=output.device).view(call.keys.shape[1], -1)
    for part in entries.parts:
        heads = torch.tensor(part.heads, device=output.device)
        own = by_head.index_select(0, heads).view(-1)
        output.index_copy_(2, own, _part_attention(call.heads(heads, own), part))
    return output


def _part_attention(call: AttentionCall, part: PackedHeads) -> Tensor:
    """Attention to the heads of one width, on the shortest way that there is."""
    if part.bits == 16:
        return entries_attention(call, part.codes)
    queries = call.queries
    if queries.dtype == part.like[0].dtype:
        kernel = kernel_for(call)
        if kernel is not None and (part.aligned or not queries.is_cuda):
            return kernel(call, part.flat)
        if queries.device.type == "cpu" and queries.dtype in KERNEL_TYPES and call.plain:
            return codes_attention(call, part)
    return unpacked_attention(call, part)


def unpacked_attention(call: AttentionCall, part: PackedHeads) -> Tensor:
    """Attention to the heads of one width, some of which at a time become numbers.

    Parameters
    ----------
    call : AttentionCall
    part : PackedHeads

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
    """
    batch, n_query_heads, n_new, _ = call.queries.shape
    group = n_query_heads // len(part.heads)
    output = call.queries.new_empty(batch, n_new, n_query_heads, call.values.shape[-1])
    for rows, places in part.runs(SCRATCH_NUMBERS):
        own = slice(places.start * group, places.stop * group)
        some = call.cut(rows, places, own)
        output[rows, :, own] = entries_attention(some, part.numbers(rows, places))
    return output


# As many entries in every head, and the latest tokens held apart


def reads_apart(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether something reads entries and the latest tokens where they are stored apart."""
    if device.type == "cuda":
        return has_triton() and dtype in KERNEL_TYPES
    return device.type == "cpu" and dtype in (*KERNEL_TYPES, torch.float64)


def apart_attention(
    call: AttentionCall, kept: tuple[Tensor, Tensor], bias: Tensor | None = None
) -> Tensor | None:
    """Attention of one new token to what is kept and to the latest tokens, on the shortest way.

    To append one token to what a layer stores means to copy all of it, which at each decoded token
    costs more than to read it. So a layer whose rows and heads keep the same number of entries
    stores the latest tokens by themselves, and both parts go into one softmax here. A kernel reads
    them as segments of equal length.

    Parameters
    ----------
    call : AttentionCall
        Its keys and values are those held apart.
    kept : tuple of Tensor, each (batch, n_kv_heads, n_entries, head_dim)
        Keys and values before them.
    bias : Tensor of float32, (batch, n_kv_heads, n_biased), optional
        Added to the logits of the first of those.

    Returns
    -------
    Tensor, (batch, 1, n_query_heads, head_dim), or None
        None where a model's soft cap or sink logits are for its own attention.
    """
    kernel = kernel_for(call, *kept)
    if kernel is not None and all(each.is_contiguous() for each in kept):
        return kernel(call, FlatEntries.even(*kept, bias))
    return None if call.changes_logits else even_attention(call, kept, bias)


def biased_attention(
    logit_bias: Tensor,
    states: AttentionStates,
    compute: Compute,
    *,
    kind: MaskKind,
    visible: Tensor | None = None,
) -> Any:
    """One layer's attention where some stored entries stand for more than one.

    Parameters
    ----------
    logit_bias : Tensor of float32, (batch, n_kv_heads, n_kept)
        Added to the logits of the first entries.
    states, compute
        What the layer's attention sees, and what it would do by itself.
    kind : MaskKind
        What mask that takes.
    visible : Tensor of bool, (batch, n_following), optional
        False hides padding among the last entries.
    """
    mask = biased_mask(logit_bias, states, visible=visible)
    if kind in ("additive", "boolean"):
        return compute(mask)
    return masked_attention(states, mask), None
