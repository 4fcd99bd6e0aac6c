"""What a reduced cache does with the layers that are transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvalloc.attention_hook import AttentionStates
from kvalloc.runtime.layers import BudgetLayer

__all__ = ["free_slid_out", "stored_tensors"]


def stored_tensors(layer: Any) -> list[Tensor]:
    """All K and V tensors of a layer of any kind."""
    if isinstance(layer, BudgetLayer):
        return layer.stored_tensors()
    return [] if layer.keys is None else [layer.keys, layer.values]


def free_slid_out(layer: Any, states: AttentionStates) -> None:
    """Give back the storage of prompt tokens that have left a sliding window.

    transformers keeps a view of the last tokens, whose storage is the whole prompt's.
    """
    if states.queries.shape[2] == 1:
        return
    for name in ("keys", "values"):
        view: Tensor = getattr(layer, name)
        if view.untyped_storage().nbytes() > view.nbytes:
            setattr(layer, name, view.clone(memory_format=torch.contiguous_format))
