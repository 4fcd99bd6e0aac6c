"""Attention masks for layers that store fewer entries than tokens seen."""

from __future__ import annotations

import torch
from torch import Tensor

from kvalloc.attention_hook import AttentionStates

__all__ = ["biased_mask", "stored_mask"]


def stored_mask(
    new_tokens: int,
    stored_tokens: int,
    *,
    additive_dtype: torch.dtype | None,
    device: torch.device,
    visible: Tensor | None = None,
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
    visible : Tensor of bool, (batch, n_following), optional
        False hides padding among the last entries; a token always sees itself.

    Returns
    -------
    Tensor or None, (batch or 1, 1, new_tokens, stored_tokens)
        None for one new token that sees everything.
    """
    if new_tokens == 1 and visible is None:
        return None
    shown = torch.ones(new_tokens, stored_tokens, dtype=torch.bool, device=device)
    shown = shown.tril(stored_tokens - new_tokens)[None, None]
    if visible is not None:
        shown = shown & _with_own(visible.to(device), new_tokens, stored_tokens)[:, None]
    if additive_dtype is None:
        return shown
    mask = torch.zeros(shown.shape, dtype=additive_dtype, device=device)
    return mask.masked_fill(~shown, torch.finfo(additive_dtype).min)


def _with_own(visible: Tensor, new_tokens: int, stored_tokens: int) -> Tensor:
    """What is no padding, or the new token itself, (batch, new_tokens, stored_tokens)."""
    kept = stored_tokens - visible.shape[1]
    everywhere = torch.nn.functional.pad(visible, (kept, 0), value=True)[:, None]
    own = torch.ones(new_tokens, stored_tokens, dtype=torch.bool, device=visible.device)
    first = stored_tokens - new_tokens
    return everywhere | (own.tril(first) & own.triu(first))


def biased_mask(
    logit_bias: Tensor, states: AttentionStates, *, visible: Tensor | None = None
) -> Tensor:
    """Additive mask where some stored entries stand for more than one.

    Parameters
    ----------
    logit_bias : Tensor of float32, (batch, n_kv_heads, n_kept)
        Of the first entries of each KV head; all that follow have none.
    states : AttentionStates
        Its keys are the stored ones, the new tokens last.
    visible : Tensor of bool, (batch, n_following), optional
        False hides padding among the last entries.

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
        new,
        stored,
        additive_dtype=states.queries.dtype,
        device=states.keys.device,
        visible=visible,
    )
    return bias if causal is None else bias + causal
