"""Kernels that read kept entries in one pass: what they are given, and which one answers.

On CUDA it is written in Triton (`kvalloc.runtime.ragged_kernel`), on the CPU in C
(`kvalloc.runtime.cpu_kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from kvalloc.accounting import IntArray

__all__ = ["KERNEL_TYPES", "Kernel", "Packing", "SpannedEntries", "has_triton", "kernel_for"]

KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What kernels read."""


class SpannedEntries(Protocol):
    """Kept entries as kernels read them: flat, and where each segment's are.

    `RaggedEntries` are such, and `EvenEntries`, whose segments have the same number.
    """

    @property
    def keys(self) -> Tensor:
        """(n_entries, head_dim), contiguous."""

    @property
    def values(self) -> Tensor:
        """(n_entries, value_dim), contiguous."""

    @property
    def bias(self) -> Tensor | None:
        """Added to logits, float32, (n_entries,)."""

    @property
    def lengths(self) -> IntArray:
        """Entries of each segment, (batch, n_kv_heads)."""

    @property
    def span_table(self) -> Tensor:
        """Two spans of each segment, int64, (n_segments, 4): start and end, start and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How spanned entries at fewer bits are packed, see `kvalloc.runtime.segments.Segment`.

    Attributes
    ----------
    bits : int
        8 or 4.
    key_scales : Tensor of float16, (n_key_blocks, 2, head_dim)
    first_scales : Tensor of int64, (n_segments, 2)
        Which key scale is the first of each of a segment's two spans.
    """

    bits: int
    key_scales: Tensor
    first_scales: Tensor


class Kernel(Protocol):
    """The same as `kvalloc.runtime.ragged_attention.ragged_attention`, in one pass."""

    def __call__(
        self,
        queries: Tensor,
        entries: SpannedEntries,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        visible: Tensor | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Where the entries' keys and values are packed rows of uint8, `packing` tells how."""


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which torch for CUDA brings along."""
    return find_spec("triton") is not None


def kernel_for(queries: Tensor, keys: Tensor, values: Tensor, *stored: Tensor) -> Kernel | None:
    """The kernel that answers these queries, if there is one.

    Parameters
    ----------
    queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
    keys, values : Tensor, (batch, n_kv_heads, n_following, head_dim)
    *stored : Tensor
        Keys and values of kept entries, unless they are packed.

    Returns
    -------
    Kernel or None
        None where they are not all of one type, as under autocast where a model normalises
        queries and keys in float32; and where gradients are asked for, which kernels do not give.
    """
    given = (queries, keys, values, *stored)
    if queries.dtype not in KERNEL_TYPES or any(one.dtype != queries.dtype for one in given):
        return None
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        return None
    if queries.is_cuda and has_triton():
        from kvalloc.runtime.ragged_kernel import kernel_attention

        return kernel_attention
    if queries.device.type == "cpu":
        from kvalloc.runtime.cpu_kernel import cpu_attention, serves

        return cpu_attention if serves(queries, int(keys.shape[1])) else None
    return None
