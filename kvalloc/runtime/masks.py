"""Attention masks for layers that store fewer entries than tokens seen."""

from __future__ import annotations

import torch
from torch import Tensor

from kvalloc.attention_hook import AttentionStates

__all__ = ["biased_mask", "stored_mask"]


def stored_mask(
    new_tokens: int, stored_tokens: int, *, additive_dtype: torch.dtype | None, device: torch.device
) -> Tensor | None:
    """Mask over the entries a layer stores: all kept ones visible, causal among the new tokens.

    Kept entries all lie before the new tokens, so which positions they had does not matter here.

    Parameters
    ----------
    new_tokens : int
        Tokens of this forward; they are the last ones stored.
    stored_tokens : int
        Entries each KV head holds, the new tokens included.
    additive_dtype : torch.dtype or None
        None makes a boolean mask (True = visible), a float type an additive one (0 = visible,
        else the type's lowest finite value, which cannot turn a row into NaN).
    device : torch.device
        Where the layer is.

    Returns
    -------
    Tensor or None, (1, 1, new_tokens, stored_tokens)
        None for one new token, which sees everything.
    """
    if new_tokens == 1:
        return None
    visible = torch.ones(new_tokens, stored_tokens, dtype=torch.bool, device=device)
    visible = visible.tril(stored_tokens - new_tokens)[None, None]
    if additive_dtype is None:
        return visible
    mask = torch.zeros(visible.shape, dtype=additive_dtype, device=device)
    return mask.masked_fill(~visible, torch.finfo(additive_dtype).min)


def biased_mask(logit_bias: Tensor, states: AttentionStates) -> Tensor:
    """Additive mask where some stored entries stand for more than one.

    Parameters
    ----------
    logit_bias : Tensor of float32, (batch, n_kv_heads, n_kept)
        Of the first entries of each KV head; all that follow have none.
    states : AttentionStates
        Its keys are the stored ones, the new tokens last.

    Returns
    -------
    Tensor of the queries' type, (batch, n_query_heads, new_tokens, stored_tokens)
        sdpa and eager both take it.
    """
    new, stored = states.queries.shape[2], states.keys.shape[2]
    group = states.queries.shape[1] // logit_bias.shape[1]
    bias = torch.nn.functional.pad(logit_bias, (0, stored - logit_bias.shape[-1]))
    bias = bias.to(states.queries.dtype).repeat_interleave(group, dim=1)[:, :, None]
    causal = stored_mask(
        new, stored, additive_dtype=states.queries.dtype, device=states.keys.device
    )
    return bias if causal is None else bias + causal
