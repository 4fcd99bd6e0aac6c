"""Attention where some stored entries stand for more than one, so that their logits are raised.

sdpa and eager take a bias for each head in their mask. Flash attention takes none, and flex
attention one for all heads, so that there it is computed here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.runtime.masks import MaskKind, biased_mask

__all__ = ["biased_attention", "masked_attention"]


def biased_attention(
    logit_bias: Tensor,
    states: AttentionStates,
    compute: Compute,
    *,
    kind: MaskKind,
    visible: Tensor | None,
) -> Any:
    """One layer's attention over what is stored, with the bias of the first entries.

    Parameters
    ----------
    logit_bias : Tensor of float32, (batch, n_kv_heads, n_kept)
    states, compute
        What the layer's attention sees, and what it would do by itself.
    kind : MaskKind
        What mask that takes.
    visible : Tensor of bool, (batch, n_following), or None
        False hides padding among the last entries.
    """
    mask = biased_mask(logit_bias, states, visible=visible)
    if kind in ("additive", "boolean"):
        return compute(mask)
    return masked_attention(states, mask), None


def masked_attention(states: AttentionStates, mask: Tensor) -> Tensor:
    """Softmax attention with a mask that is added to the logits.

    Parameters
    ----------
    states : AttentionStates
        Its own mask is not used.
    mask : Tensor, (batch or 1, n_query_heads or 1, n_new_tokens, n_tokens)

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
        Contiguous.
    """
    queries, keys, values = states.queries, states.keys, states.values
    if states.softcap is None and states.sink_logits is None:
        output = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=states.scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous()
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    logits = (queries @ keys.transpose(2, 3)).float() * states.scaling
    if states.softcap is not None:
        logits = (logits / states.softcap).tanh_().mul_(states.softcap)
    logits = logits + mask.float()
    if states.sink_logits is not None:
        sinks = states.sink_logits.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(dim=-1)[..., : keys.shape[2]].to(values.dtype)
    return (weights @ values).transpose(1, 2).contiguous()
