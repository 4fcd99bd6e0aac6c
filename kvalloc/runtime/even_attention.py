"""Attention of one new token over entries of equal number, and the latest tokens held apart.

To append one token to what a layer stores means to copy all of it, which at each decoded token
costs more than to read it. A layer whose rows and heads keep the same number of entries stores
the latest tokens by themselves instead (`BudgetLayer.expect_apart`), and both parts go into one
softmax here. On CUDA the kernel of ragged entries reads them, as segments of equal length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.attention_hook import AttentionStates, Compute
from kvalloc.runtime.arrival import Step
from kvalloc.runtime.layers import BudgetLayer
from kvalloc.runtime.ragged import IntArray
from kvalloc.runtime.ragged_attention import has_triton

__all__ = ["EvenEntries", "attend_apart", "even_attention", "even_kernel_attention", "hold_apart"]

_CPU_TYPES = (torch.float32, torch.float64)
_KERNEL_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def hold_apart(layers: Iterable[BudgetLayer], step: Step) -> None:
    """Let those layers hold the next token apart that may."""
    if step.new_tokens != 1 or step.budgets is not None or step.remember:
        return
    for layer in layers:
        if _may_hold_apart(layer, step):
            layer.expect_apart()


def _may_hold_apart(layer: BudgetLayer, step: Step) -> bool:
    """Not where a bias or padding among the latest tokens asks for a mask over all that is stored.

    Nor where nothing here reads both parts: in half precision on the CPU the model's own attention
    has kernels.
    """
    if layer.kept_indices is None or layer.logit_bias is not None:
        return False
    if layer.device.type == "cuda":
        readable = has_triton() and layer.dtype in _KERNEL_TYPES
    else:
        readable = layer.device.type == "cpu" and layer.dtype in _CPU_TYPES
    return readable and step.following_visible(layer.following_tokens + 1) is None


def attend_apart(layer: BudgetLayer, states: AttentionStates, compute: Compute) -> Any:
    """Attention of one new token, where the layer holds the latest ones apart."""
    latest = (states.keys, states.values)
    if states.queries.is_cuda:
        return even_kernel_attention(states, layer.kept_apart), None
    if states.softcap is not None or states.sink_logits is not None:
        return compute(None, layer.keys, layer.values)
    output = even_attention(states.queries, layer.kept_apart, latest, scaling=states.scaling)
    return output, None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvenEntries:
    """Dense entries as the kernel of ragged ones reads them (`SpannedEntries`); nothing is copied.

    Attributes
    ----------
    keys, values : Tensor, (batch * n_kv_heads * n_entries, head_dim)
    lengths : ndarray of int64, (batch, n_kv_heads)
        All ``n_entries``.
    span_table : Tensor of int64, (batch * n_kv_heads, 4)
        Start and end of each segment, and an empty span.
    bias : None
        There is none.
    """

    keys: Tensor
    values: Tensor
    lengths: IntArray
    span_table: Tensor
    bias: None = None

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> EvenEntries:
        """From dense ones, each (batch, n_kv_heads, n_entries, head_dim), contiguous."""
        batch, n_kv_heads, n_entries, _ = keys.shape
        return cls(
            keys=keys.reshape(-1, keys.shape[-1]),
            values=values.reshape(-1, values.shape[-1]),
            lengths=np.full((batch, n_kv_heads), n_entries, dtype=np.int64),
            span_table=_even_spans(batch * n_kv_heads, n_entries, keys.device),
        )


@lru_cache(maxsize=256)
def _even_spans(n_segments: int, n_entries: int, device: torch.device) -> Tensor:
    """Spans of equal segments; remembered, since layers ask for the same ones at every token."""
    start = torch.arange(n_segments, dtype=torch.int64) * n_entries
    nothing = torch.zeros_like(start)
    return torch.stack([start, start + n_entries, nothing, nothing], dim=1).to(device)


def even_kernel_attention(
    states: AttentionStates, kept: tuple[Tensor, Tensor], *, splits: int | None = None
) -> Tensor:
    """`even_attention` on CUDA, also in half precision, with a model's soft cap or sink logits.

    Parameters
    ----------
    states : AttentionStates
        Its keys and values are those held apart.
    kept : tuple of Tensor, each (batch, n_kv_heads, n_entries, head_dim)
        Keys and values before them.
    splits : int, optional
        As for `kvalloc.runtime.ragged_kernel.kernel_attention`.

    Returns
    -------
    Tensor, (batch, 1, n_query_heads, head_dim)
        Contiguous.
    """
    from kvalloc.runtime.ragged_kernel import kernel_attention

    return kernel_attention(
        states.queries,
        EvenEntries.of(*kept),
        states.keys,
        states.values,
        scaling=states.scaling,
        softcap=states.softcap,
        sink_logits=states.sink_logits,
        splits=splits,
    )


def even_attention(
    queries: Tensor,
    kept: tuple[Tensor, Tensor],
    latest: tuple[Tensor, Tensor],
    *,
    scaling: float,
) -> Tensor:
    """Attention of one new token to all entries of two parts.

    Parameters
    ----------
    queries : Tensor, (batch, n_query_heads, 1, head_dim)
        The new token, positions applied.
    kept, latest : tuple of Tensor, each (batch, n_kv_heads, n_entries, head_dim)
        Keys and values of both parts.
    scaling : float
        Factor on the logits.

    Returns
    -------
    Tensor, (batch, 1, n_query_heads, head_dim)
        Contiguous.
    """
    batch, n_query_heads, _, head_dim = queries.shape
    n_kv_heads, n_kept = kept[0].shape[1:3]
    segments = batch * n_kv_heads
    rows = queries.reshape(segments, n_query_heads // n_kv_heads, head_dim) * scaling
    (kept_keys, kept_values), (keys, values) = (
        tuple(states.reshape(segments, states.shape[2], -1) for states in part)
        for part in (kept, latest)
    )
    logits = [rows.bmm(kept_keys.transpose(1, 2)), rows.bmm(keys.transpose(1, 2))]
    weights = torch.cat(logits, dim=-1).softmax(dim=-1)
    result = weights[..., :n_kept].bmm(kept_values)
    result.baddbmm_(weights[..., n_kept:], values)
    return result.view(batch, 1, n_query_heads, -1)
