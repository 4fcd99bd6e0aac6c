"""Attention masks for layers that store fewer entries than tokens seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
