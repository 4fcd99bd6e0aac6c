"""A compressed cache written to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalloc.errors import UnsupportedRequestError, option
from kvalloc.files import atomic_write
from kvalloc.formats.saved_cache import (
    LayerKind,
    SavedCacheHeader,
    SavedLayer,
    StoredTensor,
    tensor_digest,
)
from kvalloc.models.structure import weights_digest
from kvalloc.runtime.kept import RaggedEntries
from kvalloc.runtime.layer import BudgetLayer

__all__ = ["save_cache", "stored"]


def save_cache(cache: Any, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
    """Write what a cache holds; see `BudgetCache.save`.

    The file is safetensors: keys, values and columns of each layer as they are stored, and a JSON
    header with the budget profile, the digests and what the cache has seen. `notes` are plain
    values of the caller's, such as where the text came from.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if cache.interrupted is not None:
        raise UnsupportedRequestError(cache.interrupted)
    if not cache.prompt_complete:
        raise UnsupportedRequestError(
            "this cache holds no complete prompt, so there is nothing to save; run the model with "
            "it first"
        )
    if cache.awaited_tokens:
        raise UnsupportedRequestError(
            f"this cache holds its whole prompt until {cache.awaited_tokens} more tokens have "
            "followed it, and the file would be that of a full cache; call cache.evict() before "
            "cache.save(), or ask it something first"
        )
    if cache.arrival.decode_every is not None:
        raise UnsupportedRequestError(
            "a cache that keeps its budget while decoding cannot be saved: the file has no place "
            f"for what its policy has noted so far; make one without {option('decode_every')}"
        )
    model = cache.decoder()
    if model is None:
        raise UnsupportedRequestError(
            "the model of this cache is gone, so the file could not say whose memory it holds; "
            "save the cache while its model is loaded"
        )
    (tensors, layers), rows = _tensors_of(cache), cache.arrival.row_profiles
    raw = {name: stored(tensor) for name, tensor in tensors.items()}
    header = SavedCacheHeader(
        model=type(model).__name__,
        model_digest=weights_digest(model),
        profile=cache.profile,
        row_profiles=None if rows is None else tuple(rows),
        dtype=raw["0.keys"].dtype,  # type: ignore[arg-type]  # the record checks it
        batch=cache.batch,
        seen_tokens=cache.get_seq_length(),
        prompt_tokens=cache.arrival.prompt_tokens,
        layers=tuple(layers),
        tensor_digest=tensor_digest(raw),
        versions={"torch": str(torch.__version__)},
        notes=dict(notes or {}),
    )
    metadata = {header.METADATA: json.dumps(header.record(), sort_keys=True)}
    with atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # a full disk is not an OSError there
            raise OSError(str(error)) from error


def _tensors_of(cache: Any) -> tuple[dict[str, Tensor], list[SavedLayer]]:
    """Everything stored, by layer and name, and of which kind each layer is."""
    tensors: dict[str, Tensor] = {}
    layers: list[SavedLayer] = []
    for index, layer in enumerate(cache.layers):
        own = {"keys": layer.keys, "values": layer.values}
        kind: LayerKind = "sliding"
        following = None
        if isinstance(layer, BudgetLayer):
            kind = "whole"
            if layer.kept_indices is not None:
                kind, own["kept_indices"] = "even", layer.kept_indices
            if layer.logit_bias is not None:
                own["logit_bias"] = layer.logit_bias
            if layer.entries is not None:
                packed = layer.entries.is_packed
                kind, following = ("packed", layer.packed_following) if packed else ("ragged", None)
                for part in layer.entries.parts:
                    own |= _entries_tensors(part, f"bits_{part.bits}." if packed else "")
        layers.append(SavedLayer(kind=kind, packed_following=following))
        for name, tensor in own.items():
            tensors[f"{index}.{name}"] = tensor.detach().contiguous().cpu()
    visible = cache.arrival.visible
    if visible is not None:
        tensors["visible"] = visible.to(torch.uint8)
    return tensors, layers


def _entries_tensors(entries: RaggedEntries, prefix: str) -> dict[str, Tensor]:
    found = {
        "kept_keys": entries.keys,
        "kept_values": entries.values,
        "kept_positions": entries.positions,
        "kept_bias": entries.bias,
        "key_scales": entries.key_scales,
        "lengths": torch.from_numpy(entries.lengths.copy()),
    }
    return {prefix + name: tensor for name, tensor in found.items() if tensor is not None}


def stored(tensor: Tensor) -> StoredTensor:
    """The same bytes without torch."""
    return StoredTensor(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data=tensor.reshape(-1).view(torch.uint8).numpy(),
    )
