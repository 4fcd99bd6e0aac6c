"""Attention of one new token over entries of equal number, and the latest tokens held apart.

To append one token to what a layer stores means to copy all of it, which at each decoded token
costs more than to read it. A layer whose rows and heads keep the same number of entries stores
the latest tokens by themselves instead (`BudgetLayer.expect_apart`), and both parts go into one
softmax here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvalloc.attention_hook import AttentionStates
from kvalloc.runtime.arrival import Step
from kvalloc.runtime.layers import BudgetLayer

__all__ = ["attends_apart", "can_hold_apart", "even_attention"]


def can_hold_apart(layer: BudgetLayer, step: Step) -> bool:
    """Whether a layer's next token may be held apart from what it stores.

    Not where something has to look at all that is stored as one tensor (a policy that goes on
    noting scores, a bias, padding among the latest tokens), nor in half precision, where the
    model's own attention has kernels without which the products here would be slow or inexact.
    """
    if step.new_tokens != 1 or step.budgets is not None or step.remember:
        return False
    if layer.kept_indices is None or layer.logit_bias is not None:
        return False
    if layer.device.type != "cpu" or layer.dtype not in (torch.float32, torch.float64):
        return False
    return step.following_visible(layer.following_tokens + 1) is None


def attends_apart(states: AttentionStates) -> bool:
    """Whether the model's attention is nothing but a softmax of products."""
    return states.softcap is None and states.sink_logits is None


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
