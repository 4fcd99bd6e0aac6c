"""What a cache stores now: entries, their positions, and bytes; on layers of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.shape import ModelShape

__all__ = [
    "allocated_bytes",
    "free_slid_out",
    "kept_bytes",
    "plain_bytes",
    "slid_out_bytes",
    "stored_counts",
    "stored_rows",
    "stored_tensors",
]


def stored_rows(layer: Any) -> int:
    """Rows of the batch that a layer stores; 0 before the first forward."""
    if isinstance(layer, BudgetLayer):
        return layer.batch
    return 0 if layer.keys is None or layer.keys.ndim < 4 else int(layer.keys.shape[0])


def allocated_bytes(layers: Iterable[Any]) -> int:
    """Bytes of K and V storage of these layers: every storage once and in full."""
    storages = {}
    for layer in layers:
        for tensor in stored_tensors(layer):
            storage = tensor.untyped_storage()
            storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def kept_bytes(layers: Iterable[Any]) -> int | None:
    """Bytes of K and V of a prompt whose layers store it apart from what followed; None if not.

    Layers at fewer bits do until some of what followed has been rounded, too; sliding layers count
    as they are.
    """
    total = 0
    for layer in layers:
        own = stored_tensors(layer)
        if isinstance(layer, BudgetLayer):
            if layer.entries is None or layer.packed_following:
                return None
            own = layer.entries.tensors()
        total += sum(tensor.nbytes for tensor in own)
    return total


def stored_tensors(layer: Any) -> list[Tensor]:
    """All K and V tensors of a layer of any kind."""
    if isinstance(layer, BudgetLayer):
        return layer.stored_tensors()
    return [] if layer.keys is None else [layer.keys, layer.values]


def plain_bytes(shape: ModelShape, row_tokens: IntArray) -> int:
    """Bytes of K and V of a plain cache whose rows have so many tokens, (batch,)."""
    return sum(shape.full_bytes(tokens) for tokens in row_tokens.tolist() if tokens)


def slid_out_bytes(layers: Iterable[Any]) -> int:
    """Bytes of entries that have left a sliding window and are allocated still."""
    return sum(
        tensor.untyped_storage().nbytes() - tensor.nbytes
        for layer in layers
        if not isinstance(layer, BudgetLayer)
        for tensor in stored_tensors(layer)
    )


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


def stored_counts(layers: Sequence[Any], batch: int, n_kv_heads: int) -> IntArray:
    """Entries that these layers store, ``(batch, n_layers, n_kv_heads)``."""
    found = np.zeros((batch, len(layers), n_kv_heads), dtype=np.int64)
    for index, layer in enumerate(layers):
        if isinstance(layer, BudgetLayer):
            counts = layer.stored_counts()
            found[:, index] = 0 if counts is None else counts
        elif layer.keys is not None:
            found[:, index] = int(layer.keys.shape[-2])
    return found
