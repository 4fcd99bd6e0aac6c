"""Attention masks for layers that store fewer entries than tokens seen."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["stored_mask"]


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
