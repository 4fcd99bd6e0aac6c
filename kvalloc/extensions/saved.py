"""Caches in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.accounting.costs import WIDTHS
from kvalloc.errors import ModelMismatchError, UnsupportedRequestError, option
from kvalloc.extensions.making import extended
from kvalloc.formats.record import save_tensors
from kvalloc.formats.saved_cache import SavedCacheHeader, StoredTensor, tensor_digest
from kvalloc.models.structure import computing_device, decoder_layers, decoder_of
from kvalloc.models.weights import weights_digest
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.kept import Kept, Part, joined, pack
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.rows import Row, repeats_of
from kvalloc.runtime.store import Store
from kvalloc.runtime.tail import Tail

KEPT = {
    "kept_keys": "keys",
    "kept_values": "values",
    "kept_positions": "tokens",
    "key_scales": "key_scales",
}
"""Fields of a `Part` by the names of a layer's tensors."""


def save_cache(
    cache: BudgetCache, path: str | Path, *, notes: Mapping[str, Any] | None = None
) -> None:
    """Write a cache to a file, for `load_cache`.

    Parameters
    ----------
    cache : BudgetCache
    path : str or Path
        Usually ``*.safetensors``: entries as stored; profile, digests, counts and, if known, ids in
        a JSON header.
    notes : mapping, optional
        Plain values, such as the text's origin.

    Raises
    ------
    UnsupportedRequestError
        If no complete prompt is stored, rows are kept differently, layers have a state, or
        positions several axes.
    InputError
        If the folder is missing or read-only.
    """
    from safetensors.torch import save_file

    cache.check_intact()
    model, ways = cache.decoder(), {id(row.method) for row in cache.rows}
    same = len({row.profile.digest for row in cache.rows}) < 2
    one_by_one = len(ways) == len(cache.rows) and all(row.method.once for row in cache.rows)
    if len(ways) > 1 and not one_by_one:
        raise UnsupportedRequestError(
            f"rows of this cache are kept in {len(ways)} different ways, and a file holds one; "
            "read each row by itself, and save its cache"
        )
    if not cache.prompt_complete:
        raise UnsupportedRequestError(
            "this cache holds no complete prompt, so there is nothing to save; run the model with "
            "it first"
        )
    if model is None:
        raise UnsupportedRequestError(
            "the model of this cache is gone, so the file could not say whose memory it holds; "
            "save the cache while its model is loaded"
        )
    if cache.state_bytes:
        raise UnsupportedRequestError(
            "layers of this model have a state, which such a file does not hold; keep the cache in "
            "memory (copy.deepcopy), or save the text and read it again"
        )
    if any(row.scattered for row in cache.rows):
        raise UnsupportedRequestError(
            "tokens of images in this cache have positions on several axes, which such a file does "
            "not hold; keep the cache in memory (copy.deepcopy)"
        )
    cache.end_turn()  # queries since the latest eviction are not in the file
    tensors, ids, seen = _tensors_of(cache), cache.read_ids, cache.get_seq_length()
    if ids is not None and len(ids) == 1 and ids.shape[1] >= seen:
        notes = {"ids": ids[0, :seen].tolist(), **(notes or {})}
    raw = {name: stored(tensor) for name, tensor in tensors.items()}
    first, first_layer = cache.rows[0], min(cache.stores)
    header = SavedCacheHeader(
        model=type(model).__name__,
        model_digest=weights_digest(model),
        profile=cache.profile,
        row_profiles=None if same and not one_by_one else cache.row_profiles,
        longer_profile=first.method.longer_profile
        if first.profile is first.method.profile
        else None,
        dtype=raw[f"{first_layer}.keys"].dtype,  # type: ignore[arg-type]  # the record checks it
        batch=cache.batch,
        seen_tokens=seen,
        prompt_tokens=cache.door.prompt_columns or seen,
        ranked_tokens=tuple(row.ranked_at for row in cache.rows),
        decode_every=cache.options.decode_every,
        memory=cache.options.memory,
        tensor_digest=tensor_digest(raw),
        versions={"torch": str(torch.__version__)},
        notes=dict(notes or {}),
    )
    metadata = {header.METADATA: json.dumps(header.record(), sort_keys=True)}
    save_tensors(save_file, tensors, path, metadata)


def _tensors_of(cache: BudgetCache) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        stored_tensors: dict[str, Tensor | None] = {"keys": layer.keys, "values": layer.values}
        if isinstance(layer, Store) and layer.kept is not None and layer.tail is not None:
            stored_tensors["latest"] = torch.from_numpy(layer.tail.lengths.copy())
            for part in _by_width(layer.kept):
                names = {name: getattr(part, field) for name, field in KEPT.items()}
                names["kept_positions"] = part.positions
                lengths = np.zeros((layer.rows, layer.kept.heads), dtype=np.int64)
                lengths.flat[part.segments] = part.lengths
                names["lengths"] = torch.from_numpy(lengths)
                stored_tensors |= {f"bits_{part.bits}.{name}": one for name, one in names.items()}
        for name, tensor in stored_tensors.items():
            if tensor is not None:
                tensors[f"{index}.{name}"] = tensor.detach().contiguous().cpu()
    if (visible := cache.door.visible) is not None:
        tensors["visible"] = visible.to(torch.uint8)
    if repeats := repeats_of(cache.rows, range(cache.batch)):
        size = cache.batch, cache.get_seq_length()
        counts = tensors["repeats"] = torch.ones(size, dtype=torch.int32, device="cpu")
        for row, known in repeats.items():
            counts[row, : len(known)] = known
    return tensors


def _by_width(kept: Kept) -> list[Part]:
    """Return one part for each width, rounded again if scales differ."""
    result = []
    for bits in dict.fromkeys(part.bits for part in kept.parts):
        same = [part for part in kept.parts if part.bits == bits]
        if len(same) > 1:
            whole = joined([part.unpacked(kept.like) for part in same])
            same = [pack(one, bits, same, torch.bfloat16) for one in whole]
        result += same
    return result


def stored(tensor: Tensor) -> StoredTensor:
    """Return a tensor's bytes without torch."""
    return StoredTensor(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data=tensor.reshape(-1).view(torch.uint8).numpy(),
    )


def load_cache(
    path: str | Path, model: nn.Module, *, allow_other_model: bool = False
) -> BudgetCache:
    """Load a saved cache onto the devices of its model.

    Parameters
    ----------
    path : str or Path
    model : transformers.PreTrainedModel
        The same weights in the same type.
    allow_other_model : bool
        Accept another model's entries, of the same sizes, such as a fine-tune's.

    Returns
    -------
    BudgetCache

    Raises
    ------
    ProfileFileError
        If the file is missing or invalid, all checked before use (`SavedCacheHeader.read`).
    ModelMismatchError
        If another model filled the cache.
    """
    return filled_cache(path, *SavedCacheHeader.read(path), model, allow_other_model)


def filled_cache(
    path: str | Path,
    header: SavedCacheHeader,
    tensors: Mapping[str, StoredTensor],
    model: nn.Module,
    allow_other_model: bool,
) -> BudgetCache:
    """Load a cache from a checked file; see `load_cache`."""
    _check_model(path, header, model, allow_other_model=allow_other_model)
    decided = header.row_profiles
    options = CacheOptions(
        allow_other_model=True,  # this model filled the cache, even with a profile of another one
        decode_every=header.decode_every,
        memory=header.memory and header.memory // len(decided or "1"),
    )
    ways = [
        Way(
            profile=stored_tensors,
            options=options,
            longer_profile=header.longer_profile,
            once=decided is not None,
        )
        for stored_tensors in decided or (header.profile,)
    ]
    cache = build_rows(model, ways)
    visible = None
    if (shown := tensors.get("visible")) is not None:
        visible = _tensor(shown).bool()
    devices = _devices(model, len(cache.layers))
    for index, (layer, device) in enumerate(zip(cache.layers, devices, strict=True)):
        if not cache.profile.shape.by_layer[index].kv_heads:
            continue
        stored_tensors = {
            name.removeprefix(f"{index}."): _tensor(tensor).to(device)
            for name, tensor in tensors.items()
            if name.startswith(f"{index}.")
        }
        layer.lazy_initialization(stored_tensors["keys"], stored_tensors["values"])
        layer.keys, layer.values = stored_tensors["keys"], stored_tensors["values"]
        if isinstance(layer, Store):
            _fill(layer, stored_tensors, header)
        else:
            layer.cumulative_length = header.seen_tokens
    fill_rows(cache, header.seen_tokens, header.prompt_tokens, visible, header.ranked_tokens)
    if (counts := tensors.get("repeats")) is not None:
        known = _tensor(counts).long()
        cache.rows = [
            replace(row, repeats=known[place, : row.seen]) for place, row in enumerate(cache.rows)
        ]
    if (ids := header.ids) is not None:
        cache.read_ids = torch.tensor([ids], device="cpu")
    return extended(cache)


def fill_rows(
    cache: BudgetCache,
    seen: int,
    prompt_columns: int,
    visible: Tensor | None,
    ranked: tuple[int, ...],
) -> None:
    """Let a filled cache continue after a prompt within its budget."""
    cache.door.resume(visible, prompt_columns)
    methods = cache.methods if len(cache.methods) == len(ranked) else cache.methods * len(ranked)
    cache.rows = []
    for place, (method, ranked_at) in enumerate(zip(methods, ranked, strict=True)):
        tokens = cache.door.count(place, seen)
        row = Row(method=method, profile=method.profile, prompt=tokens, seen=tokens)
        cache.rows.append(replace(row, evicted_at=tokens, ranked_at=ranked_at))


def _tensor(stored: StoredTensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if not stored.data.size:
        return torch.empty(stored.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(stored.data, dtype=dtype).reshape(stored.shape)


def _fill(layer: Store, tensors: dict[str, Tensor], header: SavedCacheHeader) -> None:
    layer.seen, heads = header.seen_tokens, int(tensors["keys"].shape[1])
    if "latest" not in tensors:
        return
    layer.tail = Tail((tensors["keys"], tensors["values"]), tensors["latest"].cpu().numpy())
    layer.keys, layer.values = layer.tail.states
    lengths = {
        bits: tensors[name].cpu().numpy().ravel()
        for bits in WIDTHS
        if (name := f"bits_{bits}.lengths") in tensors
    }
    empty, parts = sum(lengths.values()) == 0, []
    for bits, counts in lengths.items():
        named = {field: tensors.get(f"bits_{bits}.{name}") for name, field in KEPT.items()}
        segments = np.flatnonzero((counts > 0) | empty)
        empty = np.zeros_like(empty)
        part = Part(**named, segments=segments, lengths=counts[segments], bits=bits)  # type: ignore[arg-type]
        parts.append(part.compact(header.seen_tokens))
    like = tensors["keys"][0, 0, :0].clone(), tensors["values"][0, 0, :0].clone()
    layer.kept = Kept(parts=tuple(parts), rows=header.batch, heads=heads, like=like)


def _devices(model: nn.Module, n_layers: int) -> list[torch.device]:
    modules = decoder_layers(model)
    if modules is None or len(modules) < n_layers:
        return [computing_device(model)] * n_layers
    return [computing_device(module) for module in modules][:n_layers]


def _check_model(
    path: str | Path, header: SavedCacheHeader, model: nn.Module, *, allow_other_model: bool
) -> None:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    decoder = decoder_of(model)
    if header.dtype != dtype:
        raise ModelMismatchError(
            f"{path} holds {header.dtype} entries, but the model computes in {dtype}; load the "
            f"model in {header.dtype}"
        )
    if not allow_other_model and header.model_digest != weights_digest(decoder):
        raise ModelMismatchError(
            f"{path} was filled by a {header.model} with other weights, adapters or config than "
            f"this {type(decoder).__name__}; load that model, or allow another one of the same "
            f"sizes ({option('allow_other_model', True)})"
        )
