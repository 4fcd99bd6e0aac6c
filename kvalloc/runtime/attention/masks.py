"""Attention masks for layers that store fewer entries than tokens seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvalloc.models.names import COLUMN, MaskFunction, takes_column


def shown_columns(mask: Any) -> Any:
    """Return which columns the ready-made mask of a forward shows, (batch, n_columns).

    Parameters
    ----------
    mask : object
        Of queries and keys, (batch, n, n_new_tokens, n_columns): True or 0 if a key is visible. Or
        such masks by kind of layer, as a model with images makes for its decoder. Any other mask
        is returned as it is.
    """
    mask = mask.get("full_attention") if isinstance(mask, Mapping) else mask
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return mask
    return _shown(mask).flatten(1, 2).any(dim=1)


def with_columns(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a forward's arguments, a ready-made causal mask replaced by the columns it shows."""
    mask = arguments.get("attention_mask")
    columns = shown_columns(mask)
    ready = mask.get("full_attention") if isinstance(mask, Mapping) else mask
    if isinstance(ready, Tensor) and ready is not columns:
        shown = _shown(ready)
        causal = torch.ones_like(shown[0, 0]).tril(shown.shape[-1] - shown.shape[-2])
        if not torch.equal(shown, (causal & columns[:, None, None]).expand_as(shown)):
            return arguments
    return arguments if columns is mask else {**arguments, "attention_mask": columns}


def _shown(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def stored_mask(
    function: MaskFunction,
    new_tokens: int,
    stored_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch: int,
    visible: Tensor | None = None,
) -> Any:
    """Make the mask that transformers would if nothing but the stored tokens had ever been.

    Kept entries all lie before the new tokens, so which positions they had does not matter here:
    they are all visible, and the new tokens are causal among themselves.

    Parameters
    ----------
    function : MaskFunction
        Of the model's attention implementation, see `kvalloc.models.names.mask_function`.
    new_tokens : int
        Tokens of this forward; they are the last ones stored.
    stored_tokens : int
        Entries each KV head holds, the new tokens included.
    dtype : torch.dtype
        Of a mask that is added (0 = visible, else the type's lowest finite value, which cannot
        turn a row into NaN).
    device : torch.device
        Where the layer is.
    batch : int
        Rows.
    visible : Tensor of bool, (batch, n_following), optional
        False hides padding among the last entries.

    Returns
    -------
    Tensor of dtype or bool, (batch, 1, new_tokens, stored_tokens)
        Or what else the implementation takes. None for one new token that sees everything, and
        where there is no padding to speak of.
    """
    if visible is None and new_tokens == 1:
        return None
    offset = stored_tokens - new_tokens
    place: dict[str, Any] = {"q_length": new_tokens, "q_offset": offset}
    if takes_column(function):
        place = {COLUMN: torch.arange(offset, stored_tokens, device=device)}
    if visible is not None:
        kept = stored_tokens - visible.shape[1]
        visible = torch.nn.functional.pad(visible, (kept, 0), value=True)
    return function(
        batch_size=batch,
        kv_length=stored_tokens,
        attention_mask=visible,
        allow_is_causal_skip=False,
        dtype=dtype,
        device=device,
        **place,
    )
