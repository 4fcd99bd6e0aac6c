"""Attention masks for layers that store fewer entries than tokens seen."""

from __future__ import annotations

import inspect
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["MaskKind", "mask_kind", "stored_mask"]

#: How an attention implementation takes its mask. Eager attention adds it to the logits; sdpa
#: takes True for what is seen; flash attention is causal by itself, aligned at the end, and takes
#: the padding alone, (batch, n_tokens); flex attention takes a `BlockMask`.
MaskKind: TypeAlias = Literal["additive", "boolean", "padding", "block"]


def mask_kind(base: str) -> MaskKind | None:
    """The kind of mask that an attention implementation takes; None if it is not known.

    Implementations from elsewhere (flash attention of the kernels hub, say) are known by the mask
    function that they are registered with.

    Parameters
    ----------
    base : str
        Its name in transformers' tables, e.g. ``"sdpa"``.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask, flex_attention_mask

    if base in ("eager", "sdpa"):
        return "additive" if base == "eager" else "boolean"
    function = AttentionMaskInterface._global_mapping.get(base)
    if function is flash_attention_mask:
        return "padding"
    return "block" if function is flex_attention_mask else None


def stored_mask(
    new_tokens: int,
    stored_tokens: int,
    *,
    kind: MaskKind,
    dtype: torch.dtype,
    device: torch.device,
    batch: int,
    visible: Tensor | None = None,
) -> Any:
    """Mask over the entries a layer stores: all kept ones visible, causal among the new tokens.

    Kept entries all lie before the new tokens, so which positions they had does not matter here.

    Parameters
    ----------
    new_tokens : int
        Tokens of this forward; they are the last ones stored.
    stored_tokens : int
        Entries each KV head holds, the new tokens included.
    kind : {"additive", "boolean", "padding", "block"}
        What the model's attention takes, see `MaskKind`.
    dtype : torch.dtype
        Of an additive mask (0 = visible, else the type's lowest finite value, which cannot turn a
        row into NaN).
    device : torch.device
        Where the layer is.
    batch : int
        Rows.
    visible : Tensor of bool, (batch, n_following), optional
        False hides padding among the last entries; on sdpa and eager a token always sees itself.

    Returns
    -------
    Tensor of dtype or bool, (batch or 1, 1, new_tokens, stored_tokens)
        Or of bool, (batch, stored_tokens), of kind "padding"; a `BlockMask` of kind "block". None
        for one new token that sees everything, and where there is no padding to speak of.
    """
    if visible is None and (new_tokens == 1 or kind == "padding"):
        return None
    if kind in ("padding", "block"):
        if visible is not None:
            kept = stored_tokens - visible.shape[1]
            visible = torch.nn.functional.pad(visible.to(device), (kept, 0), value=True)
        if kind == "padding":
            return visible
        return _block_mask(new_tokens, stored_tokens, device=device, batch=batch, visible=visible)
    shown = torch.ones(new_tokens, stored_tokens, dtype=torch.bool, device=device)
    shown = shown.tril(stored_tokens - new_tokens)[None, None]
    if visible is not None:
        shown = shown & _with_own(visible.to(device), new_tokens, stored_tokens)[:, None]
    if kind == "boolean":
        return shown
    mask = torch.zeros(shown.shape, dtype=dtype, device=device)
    return mask.masked_fill(~shown, torch.finfo(dtype).min)


def _block_mask(
    new_tokens: int,
    stored_tokens: int,
    *,
    device: torch.device,
    batch: int,
    visible: Tensor | None,
) -> Any:
    """The mask that transformers would make if nothing but the stored tokens had ever been."""
    from transformers.masking_utils import flex_attention_mask

    offset = stored_tokens - new_tokens
    known = inspect.signature(flex_attention_mask).parameters
    if "q_length" in known:
        place: dict[str, Any] = {"q_length": new_tokens, "q_offset": offset, "device": device}
    else:  # older transformers pass the columns of the new tokens
        place = {"cache_position": torch.arange(offset, stored_tokens, device=device)}
    return flex_attention_mask(
        batch_size=batch, kv_length=stored_tokens, attention_mask=visible, **place
    )


def _with_own(visible: Tensor, new_tokens: int, stored_tokens: int) -> Tensor:
    """What is no padding, or the new token itself, (batch, new_tokens, stored_tokens)."""
    kept = stored_tokens - visible.shape[1]
    everywhere = torch.nn.functional.pad(visible, (kept, 0), value=True)[:, None]
    own = torch.ones(new_tokens, stored_tokens, dtype=torch.bool, device=visible.device)
    first = stored_tokens - new_tokens
    return everywhere | (own.tril(first) & own.triu(first))
