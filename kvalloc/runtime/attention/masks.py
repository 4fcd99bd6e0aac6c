"""Attention masks for reduced layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvalloc.shape import WINDOWED


def shown_columns(arguments: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the columns that a forward's mask shows, and whether it is ready-made.

    A ready-made mask, (batch, n, n_new_tokens, n_columns), has True or 0 where a key is visible;
    its columns are bool, (batch, n_columns). Other masks stay as they are.
    """
    passed_mask = arguments.get("attention_mask")
    mask = _of_full_attention(passed_mask)
    if isinstance(mask, Tensor) and mask.ndim == 4:
        mask = _shown(mask).flatten(1, 2).any(dim=1)
    return mask, mask is not passed_mask


def with_columns(decoder: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a forward's arguments, with a ready-made mask replaced by its columns.

    Only if each kind of layer has its usual mask. Gemma 4's sliding layers let tokens of an image
    see each other.
    """
    passed_mask, (columns, ready) = arguments.get("attention_mask"), shown_columns(arguments)
    config: Any = decoder.config
    kinds = getattr(config, "layer_types", None) or ("full_attention",)
    masks = passed_mask if isinstance(passed_mask, Mapping) else dict.fromkeys(kinds, passed_mask)
    for kind, mask in masks.items():
        if isinstance(mask, Tensor) and mask.ndim == 4:
            shown = _shown(mask)
            past = shown.shape[-1] - shown.shape[-2]
            expected = torch.ones_like(shown[0, 0]).tril(past)
            if kind.startswith(WINDOWED):
                window = kind.startswith("sliding") and config.sliding_window or 0
                expected = expected.triu(past + 1 - window)
            if columns is not None:
                expected = expected & columns[:, None, None, -shown.shape[-1] :]
            if (shown != expected).any():
                return arguments
    return {**arguments, "attention_mask": columns} if ready else arguments


def seen_among_new(mask: Any, columns: Tensor) -> Tensor | None:
    """Return which new tokens each new token sees, (batch, n_new_tokens, n_new_tokens).

    None if heads see different tokens, or new tokens different past ones.
    """
    shown = _shown(_of_full_attention(mask))
    past = shown.shape[-1] - shown.shape[-2]
    if shown.shape[1] > 1 or (shown[..., :past] != columns[:, None, None, :past]).any():
        return None
    return shown[:, 0, :, past:]


def _of_full_attention(mask: Any) -> Any:
    if not isinstance(mask, Mapping) or any(
        not isinstance(one, Tensor | None) for one in mask.values()
    ):
        return mask
    masks = [one for kind, one in mask.items() if not kind.startswith(WINDOWED)]
    masks = [one for one in masks if isinstance(one, Tensor)]
    return max(masks, key=lambda one: one.ndim, default=None)  # of states (batch, n_columns)


def _shown(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0
