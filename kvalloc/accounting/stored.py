"""Bytes that the layers of any cache store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvalloc.shape import HALF_BYTES


def storages(tensors: Iterable[Any]) -> list[tuple[Any, int, Any]]:
    """Return each storage once, the bytes that tensors show of it, and one tensor."""
    stored: dict[tuple[str, int], tuple[Any, int, Any]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = str(tensor.device), storage.data_ptr()
        _, shown, _ = stored.get(key, (storage, 0, tensor))
        stored[key] = storage, shown + tensor.nbytes, tensor
    return list(stored.values())


def layer_tensors(layer: Any) -> list[Any]:
    """Return all tensors of any layer."""
    if hasattr(layer, "stored_tensors"):
        return list(layer.stored_tensors())
    tensors = (getattr(layer, name, None) for name in ("keys", "values"))
    return [tensor for tensor in tensors if tensor is not None]


def bytes_at_16_bits(layers: Iterable[Any]) -> int:
    """Return the bytes of entries for later tokens, with unrounded numbers at 16 bits.

    Packed numbers, scales and positions count as stored, sliding layers as nothing.
    """
    total = 0
    for layer in layers:
        if getattr(layer, "is_sliding", True):
            continue
        for storage, shown, tensor in storages(layer_tensors(layer)):
            # One number an entry is its position.
            counted = min(tensor.itemsize, HALF_BYTES) if tensor.ndim > 1 else tensor.itemsize
            total += min(storage.nbytes(), shown) * counted // tensor.itemsize
    return total
