"""Attention of one new token over entries of equal number, and the latest tokens held apart.

To append one token to what a layer stores means to copy all of it, which at each decoded token
costs more than to read it. A layer whose rows and heads keep the same number of entries stores
the latest tokens by themselves instead (`BudgetLayer.expect_apart`), and both parts go into one
softmax here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvalloc.attention_hook import AttentionStates, Compute
from kvalloc.runtime.arrival import Step
from kvalloc.runtime.layers import BudgetLayer

__all__ = ["attend_apart", "even_attention", "hold_apart"]


def hold_apart(layers: Iterable[BudgetLayer], step: Step) -> None:
    """Let those layers hold the next token apart that may."""
    if step.new_tokens != 1 or step.budgets is not None or step.remember:
        return
    for layer in layers:
        if _may_hold_apart(layer, step):
            layer.expect_apart()


def _may_hold_apart(layer: BudgetLayer, step: Step) -> bool:
    """Not where a bias or padding among the latest tokens asks for a mask over all that is stored.

    Nor in half precision, for which the model's own attention has kernels.
    """
    if layer.kept_indices is None or layer.logit_bias is not None:
        return False
    if layer.device.type != "cpu" or layer.dtype not in (torch.float32, torch.float64):
        return False
    return step.following_visible(layer.following_tokens + 1) is None


def attend_apart(layer: BudgetLayer, states: AttentionStates, compute: Compute) -> Any:
    """Attention of one new token, where the layer holds the latest ones apart."""
    if states.softcap is not None or states.sink_logits is not None:
        return compute(None, layer.keys, layer.values)
    latest = (states.keys, states.values)
    output = even_attention(states.queries, layer.kept_apart, latest, scaling=states.scaling)
    return output, None


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
