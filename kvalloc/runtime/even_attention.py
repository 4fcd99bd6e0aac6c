"""Attention of one new token over entries of equal number, and the latest tokens held apart.

To append one token to what a layer stores means to copy all of it, which at each decoded token
costs more than to read it. A layer whose rows and heads keep the same number of entries stores
the latest tokens by themselves instead (`BudgetLayer.expect_apart`), and both parts go into one
softmax here. The kernel of ragged entries reads them, where there is one, as segments of equal
length. Without it, in half precision on the CPU some entries at a time become float32, so few that
they stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.runtime.arrival import Step
from kvalloc.runtime.biased_attention import masked_attention
from kvalloc.runtime.kernels import KERNEL_TYPES, Kernel, has_triton, kernel_for
from kvalloc.runtime.layers import BudgetLayer
from kvalloc.runtime.masks import biased_mask

__all__ = [
    "SCRATCH_NUMBERS",
    "EvenEntries",
    "apart_attention",
    "attend_apart",
    "even_attention",
    "even_kernel_attention",
    "hold_apart",
]

SCRATCH_NUMBERS = 1 << 18
"""Numbers of half precision that are float32 at the same time."""

_CPU_TYPES = (*KERNEL_TYPES, torch.float64)


def hold_apart(layers: Iterable[BudgetLayer], step: Step) -> None:
    """Let those layers hold the next token apart that may."""
    if step.new_tokens != 1 or step.budgets is not None or step.remember:
        return
    for layer in layers:
        if _may_hold_apart(layer, step):
            layer.expect_apart()


def _may_hold_apart(layer: BudgetLayer, step: Step) -> bool:
    """Not where padding among the latest tokens asks for a mask, nor where nothing reads both."""
    if layer.kept_indices is None:
        return False
    if layer.device.type == "cuda":
        readable = has_triton() and layer.dtype in KERNEL_TYPES
    else:
        readable = layer.device.type == "cpu" and layer.dtype in _CPU_TYPES
    return readable and step.following_visible(layer.following_tokens + 1) is None


def attend_apart(layer: BudgetLayer, states: AttentionStates, compute: Compute) -> Any:
    """Attention of one new token, where the layer holds the latest ones apart."""
    bias = layer.logit_bias
    output = apart_attention(states, layer.kept_apart, bias=bias)
    if output is not None:
        return output, None
    if bias is None:
        return compute(None, layer.keys, layer.values)
    joined = replace(states, keys=layer.keys, values=layer.values)
    return masked_attention(joined, biased_mask(bias, joined)), None


def apart_attention(
    states: AttentionStates, kept: tuple[Tensor, Tensor], *, bias: Tensor | None = None
) -> Tensor | None:
    """Attention of one new token to what is kept and to the latest tokens, on the shortest way.

    Parameters
    ----------
    states : AttentionStates
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
    kernel = kernel_for(states.queries, states.keys, states.values, *kept)
    if kernel is not None and all(each.is_contiguous() for each in kept):
        return even_kernel_attention(states, kept, kernel, bias=bias)
    if states.softcap is not None or states.sink_logits is not None:
        return None
    latest = (states.keys, states.values)
    return even_attention(states.queries, kept, latest, scaling=states.scaling, bias=bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvenEntries:
    """Dense entries as kernels of ragged ones read them (`SpannedEntries`); nothing is copied.

    Attributes
    ----------
    keys, values : Tensor, (batch * n_kv_heads * n_entries, head_dim)
    lengths : ndarray of int64, (batch, n_kv_heads)
        All ``n_entries``.
    span_table : Tensor of int64, (batch * n_kv_heads, 4)
        Start and end of each segment, and an empty span.
    bias : Tensor of float32, (batch * n_kv_heads * n_entries,), or None
        Added to their logits.
    """

    keys: Tensor
    values: Tensor
    lengths: IntArray
    span_table: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> EvenEntries:
        """From dense ones, each (batch, n_kv_heads, n_entries, head_dim), contiguous.

        The bias is of the first entries of each, (batch, n_kv_heads, n_biased); others have none.
        """
        batch, n_kv_heads, n_entries, _ = keys.shape
        lengths, span_table = _even_layout(batch, n_kv_heads, n_entries, keys.device)
        if bias is not None:
            missing = n_entries - int(bias.shape[-1])
            bias = torch.nn.functional.pad(bias, (0, missing)) if missing else bias
            bias = bias.float().reshape(-1)
        return cls(
            keys=keys.reshape(-1, keys.shape[-1]),
            values=values.reshape(-1, values.shape[-1]),
            lengths=lengths,
            span_table=span_table,
            bias=bias,
        )


@lru_cache(maxsize=256)
def _even_layout(
    batch: int, n_kv_heads: int, n_entries: int, device: torch.device
) -> tuple[IntArray, Tensor]:
    """Lengths and spans of equal segments; remembered, as layers ask for the same ones."""
    lengths = np.full((batch, n_kv_heads), n_entries, dtype=np.int64)
    lengths.flags.writeable = False
    start = torch.arange(batch * n_kv_heads, dtype=torch.int64) * n_entries
    nothing = torch.zeros_like(start)
    return lengths, torch.stack([start, start + n_entries, nothing, nothing], dim=1).to(device)


def even_kernel_attention(
    states: AttentionStates,
    kept: tuple[Tensor, Tensor],
    kernel: Kernel,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """`apart_attention` by a kernel.

    Parameters
    ----------
    states, kept, bias
        As there; what is kept is contiguous.
    kernel : Kernel

    Returns
    -------
    Tensor, (batch, 1, n_query_heads, head_dim)
        Contiguous.
    """
    return kernel(
        states.queries,
        EvenEntries.of(*kept, bias),
        states.keys,
        states.values,
        scaling=states.scaling,
        softcap=states.softcap,
        sink_logits=states.sink_logits,
    )


def even_attention(
    queries: Tensor,
    kept: tuple[Tensor, Tensor],
    latest: tuple[Tensor, Tensor],
    *,
    scaling: float,
    bias: Tensor | None = None,
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
    bias : Tensor of float32, (batch, n_kv_heads, n_biased), optional
        Added to the logits of the first kept ones.

    Returns
    -------
    Tensor, (batch, 1, n_query_heads, head_dim)
        Of the queries' type, contiguous.
    """
    batch, n_query_heads, _, head_dim = queries.shape
    n_kv_heads, n_kept = kept[0].shape[1:3]
    segments = batch * n_kv_heads
    work = torch.promote_types(queries.dtype, torch.float32)
    rows = queries.reshape(segments, n_query_heads // n_kv_heads, head_dim).to(work) * scaling
    (kept_keys, kept_values), (keys, values) = (
        tuple(states.reshape(segments, *states.shape[2:]) for states in part)
        for part in (kept, latest)
    )
    logits = torch.cat([_logits(rows, kept_keys), _logits(rows, keys)], dim=-1)
    if bias is not None:
        logits[..., : bias.shape[-1]] += bias.reshape(segments, 1, -1)
    weights = logits.softmax(dim=-1)
    result = _answer(weights[..., :n_kept], kept_values)
    _add_answer(result, weights[..., n_kept:], values)
    return result.to(queries.dtype).view(batch, 1, n_query_heads, -1)


def _logits(rows: Tensor, keys: Tensor) -> Tensor:
    """Of rows (n_segments, group, head_dim) in float32 or float64, (n_segments, group, n)."""
    if keys.dtype == rows.dtype:
        return rows.bmm(keys.transpose(1, 2))
    found = [rows.bmm(keys[:, own].to(rows.dtype).transpose(1, 2)) for own in _slices(keys)]
    return rows.new_empty(*rows.shape[:2], 0) if not found else torch.cat(found, dim=-1)


def _answer(weights: Tensor, values: Tensor) -> Tensor:
    """The weighted values, (n_segments, group, head_dim)."""
    if values.dtype == weights.dtype:
        return weights.bmm(values)  # a tenth of the whole faster than adding to zeros
    result = weights.new_zeros(*weights.shape[:2], values.shape[-1])
    _add_answer(result, weights, values)
    return result


def _add_answer(result: Tensor, weights: Tensor, values: Tensor) -> None:
    """Add the weighted values to the result, (n_segments, group, head_dim)."""
    if values.dtype == weights.dtype:
        result.baddbmm_(weights, values)
        return
    for own in _slices(values):
        result.baddbmm_(weights[..., own], values[:, own].to(weights.dtype))


def _slices(states: Tensor) -> Iterator[slice]:
    """Which entries of (n_segments, n, head_dim) become float32 together."""
    step = max(SCRATCH_NUMBERS // (int(states.shape[0]) * int(states.shape[2])), 1)
    return (slice(first, first + step) for first in range(0, int(states.shape[1]), step))
