"""A compressed cache written to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalloc.errors import UnsupportedRequestError
from kvalloc.files import atomic_write
from kvalloc.formats.saved_cache import SavedCacheHeader, StoredTensor, tensor_digest
from kvalloc.models.weights import weights_digest
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.refusals import refuse

KEPT = {
    "kept_keys": "keys",
    "kept_values": "values",
    "kept_positions": "positions",
    "key_scales": "key_scales",
}
"""What `KeptEntries` has of these tensors of a layer's bits."""


def save_cache(cache: Any, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
    """Write what a cache holds; see `BudgetCache.save`.

    The file is safetensors: keys, values and columns of each layer as they are stored, and a JSON
    header with the budget profile, the digests and what the cache has seen, token ids too where it
    knows them. `notes` are plain values of the caller's, such as where the text came from.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if cache.interrupted is not None:
        raise UnsupportedRequestError(cache.interrupted)
    model = cache.decoder()
    refuse(
        saved_incomplete=not cache.prompt_complete,
        saved_without_model=model is None,
    )
    cache.end_turn()  # the queries of tokens that are not settled are not in the file
    tensors, rows = _tensors_of(cache), cache.arrival.row_profiles
    ids, seen = cache.read_ids, cache.get_seq_length()
    if ids is not None and len(ids) == 1 and ids.shape[1] >= seen:
        notes = {"ids": ids[0, :seen].tolist(), **(notes or {})}
    raw = {name: stored(tensor) for name, tensor in tensors.items()}
    header = SavedCacheHeader(
        model=type(model).__name__,
        model_digest=weights_digest(model),
        profile=cache.profile,
        row_profiles=None if rows is None else tuple(rows),
        longer_profile=cache.longer_profile,
        dtype=raw["0.keys"].dtype,  # type: ignore[arg-type]  # the record checks it
        batch=cache.batch,
        seen_tokens=cache.get_seq_length(),
        prompt_tokens=cache.arrival.prompt_tokens,
        competed_tokens=tuple(cache.arrival.competed.tolist()),
        decode_every=cache.options.decode_every,
        memory=cache.options.memory,
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


def _tensors_of(cache: Any) -> dict[str, Tensor]:
    """Return everything that is stored, by layer and name."""
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        own: dict[str, Tensor | None] = {"keys": layer.keys, "values": layer.values}
        if isinstance(layer, BudgetLayer):
            for part in () if layer.entries is None else layer.entries.parts:
                tensors_of = {name: getattr(part, field) for name, field in KEPT.items()}
                tensors_of["lengths"] = torch.from_numpy(part.lengths.copy())
                own |= {f"bits_{part.bits}.{name}": one for name, one in tensors_of.items()}
        for name, tensor in own.items():
            if tensor is not None:
                tensors[f"{index}.{name}"] = tensor.detach().contiguous().cpu()
    if not cache.arrival.visible.all():
        tensors["visible"] = cache.arrival.visible.to(torch.uint8)
    return tensors


def stored(tensor: Tensor) -> StoredTensor:
    """Return a tensor's bytes without torch."""
    return StoredTensor(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data=tensor.reshape(-1).view(torch.uint8).numpy(),
    )
