"""Tensors that layers of any kind store now, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvalloc.accounting.stored import layer_tensors
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.layer import BudgetLayer

__all__ = ["free_slid_out", "kept_bytes"]


def kept_bytes(layers: Iterable[Any]) -> int | None:
    """Return the bytes of a prompt whose layers store it apart from what followed; None if not.

    Layers at fewer bits do until some of what followed has been rounded, too; sliding layers count
    as they are.
    """
    total = 0
    for layer in layers:
        own = layer_tensors(layer)
        if isinstance(layer, BudgetLayer):
            if layer.entries is None or layer.packed_following:
                return None
            own = layer.entries.tensors()
        total += sum(tensor.nbytes for tensor in own)
    return total


def free_slid_out(layer: Any, states: AttentionStates) -> None:
    """Give back the storage of prompt tokens that have left a sliding window.

    transformers keeps a view of the last tokens, whose storage is the whole prompt's. After one
    decoded token it has one entry more than the view, and to free that would copy the whole window
    for each token; it goes with the next one.
    """
    if states.queries.shape[2] == 1:
        return
    for name in ("keys", "values"):
        view: Tensor = getattr(layer, name)
        if view.untyped_storage().nbytes() > view.nbytes:
            setattr(layer, name, view.clone(memory_format=torch.contiguous_format))
