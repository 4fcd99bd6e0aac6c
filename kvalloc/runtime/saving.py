"""A compressed cache in a file: ask today what was read yesterday."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.errors import ModelMismatchError, UnsupportedRequestError, option
from kvalloc.files import atomic_write
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.saved_cache import (
    HEADER,
    SCHEMA_VERSION,
    header_digest,
    header_fault,
    opened,
    read_header,
)
from kvalloc.models.structure import decoder_layers, decoder_of
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.kept import RaggedEntries
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.making import make_cache
from kvalloc.runtime.packed import PackedEntries, PackedHeads

__all__ = ["load_cache", "model_digest", "save_cache", "saved_notes"]

_SAMPLES = 64


def save_cache(
    cache: BudgetCache, path: str | Path, *, notes: Mapping[str, Any] | None = None
) -> None:
    """Write what a cache holds; see `BudgetCache.save`.

    The file is safetensors: keys, values and columns of each layer as they are stored, and a JSON
    header with the budget profile, the digests and what the cache has seen. `notes` are plain
    values of the caller's, such as where the text came from; `saved_notes` reads them again.
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
    tensors, layers = _tensors_of(cache)
    header = {
        "schema_version": SCHEMA_VERSION,
        "kind": "kvalloc.cache",
        "model": type(model).__name__,
        "model_digest": model_digest(model),
        "profile": cache.profile.record(),
        "dtype": str(cache.layers[0].keys.dtype).removeprefix("torch."),
        "batch": cache.batch,
        "seen_tokens": cache.get_seq_length(),
        "prompt_tokens": cache.arrival.prompt_tokens,
        "layers": layers,
        "tensor_digest": _tensor_digest(tensors),
        "versions": {"torch": torch.__version__},
        "notes": dict(notes or {}),
    }
    rows = cache.arrival.row_profiles
    if rows is not None:
        header["row_profiles"] = [profile.record() for profile in rows]
    header["header_digest"] = header_digest(json.loads(json.dumps(header)))
    metadata = {HEADER: json.dumps(header, sort_keys=True)}
    with atomic_write(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # a full disk is not an OSError there
            raise OSError(str(error)) from error


def load_cache(path: str | Path, model: nn.Module, *, allow_other_model: bool = False) -> Any:
    """A cache as it was when it was saved, for the same model.

    Parameters
    ----------
    path : str or Path
        Written by `BudgetCache.save`.
    model : transformers.PreTrainedModel
        The model that filled it: the same weights in the same type.
    allow_other_model : bool
        Accept other weights of the same sizes, such as a fine-tune's. Its answers are then those
        of a model that was given somebody else's memory.

    Returns
    -------
    BudgetCache
        Pass it as ``past_key_values``. Each layer is on the device of the model's layer.

    Raises
    ------
    ProfileFileError
        If the file is missing, truncated, edited or of another schema version.
    ModelMismatchError
        If another model filled the cache.
    """
    header, tensors = _read(Path(path))
    _check_model(path, header, model, allow_other_model=allow_other_model)
    profile = BudgetProfile.from_record(path, header["profile"])
    by_prompt = header.get("row_profiles") is not None
    decide = _decided_before if by_prompt else None
    cache = make_cache(profile, model, allow_other_model=allow_other_model, decide=decide)
    if len(header["layers"]) != len(cache.layers):
        raise header_fault(path, "layers", len(header["layers"]), f"{len(cache.layers)} layers")
    devices = _devices(model, len(cache.layers))
    for index, (layer, kind) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        own = {
            name.split(".", 1)[1]: tensor.to(devices[index])
            for name, tensor in tensors.items()
            if name.split(".", 1)[0] == str(index)
        }
        _fill(layer, kind, own, header)
    arrival = cache.arrival
    arrival.prompt_tokens, arrival.complete = header["prompt_tokens"], True
    if by_prompt:
        arrival.decide([BudgetProfile.from_record(path, row) for row in header["row_profiles"]])
    visible = tensors.get("visible")
    arrival.visible = None if visible is None else visible.bool().to(devices[0])
    return cache


def _decided_before(decoder: nn.Module, rows: Sequence[Any]) -> list[BudgetProfile]:
    """Refuse a new prompt after `reset`: the file has the saved prompt's budgets and no more."""
    raise UnsupportedRequestError(
        "the budgets of this cache were decided from the prompt that it was saved with, and how "
        "is not in the file; make a new cache for another prompt"
    )


def model_digest(model: nn.Module) -> str:
    """A digest of a model's weights from samples of each, so that a large model takes no time.

    Names, shapes and types of all parameters and 64 values of each, spread evenly: another
    checkpoint, a fine-tune or another type gives another digest. Somebody who changes values in
    between on purpose is not noticed.

    Parameters
    ----------
    model : nn.Module
        With or without its language-model head, which is left out.
    """
    hasher = hashlib.sha256()
    for name, parameter in sorted(decoder_of(model).named_parameters()):
        hasher.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        if parameter.device.type == "meta" or not parameter.numel():
            continue
        flat = parameter.detach().reshape(-1)
        places = torch.linspace(
            0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64
        )
        found = flat[places.long().to(flat.device)].float().cpu()
        hasher.update(found.numpy().tobytes())
    return hasher.hexdigest()


def _tensors_of(cache: BudgetCache) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Everything stored, by layer and name, and of which kind each layer is."""
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        own = {"keys": layer.keys, "values": layer.values}
        kind: str = "sliding"
        more: dict[str, Any] = {}
        if isinstance(layer, BudgetLayer):
            kind = "whole"
            if layer.kept_indices is not None:
                kind, own["kept_indices"] = "even", layer.kept_indices
            if layer.logit_bias is not None:
                own["logit_bias"] = layer.logit_bias
            if isinstance(layer.entries, RaggedEntries):
                kind = "ragged"
                own |= _entries_tensors(layer.entries)
            if isinstance(layer.entries, PackedEntries):
                kind = "packed"
                own |= _packed_tensors(layer.entries)
                more = {
                    "bits": layer.entries.bits.tolist(),
                    "packed_following": layer.packed_following,
                }
        layers.append({"kind": kind, "tensors": sorted(own), **more})
        for name, tensor in own.items():
            tensors[f"{index}.{name}"] = tensor.detach().contiguous().cpu()
    visible = cache.arrival.visible
    if visible is not None:
        tensors["visible"] = visible.to(torch.uint8).contiguous().cpu()
    return tensors, layers


def _entries_tensors(entries: RaggedEntries) -> dict[str, Tensor]:
    found = {
        "kept_keys": entries.keys,
        "kept_values": entries.values,
        "kept_positions": entries.positions,
        "lengths": torch.from_numpy(entries.lengths.copy()),
    }
    if entries.bias is not None:
        found["kept_bias"] = entries.bias
    return found


def _packed_tensors(entries: PackedEntries) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for part in entries.parts:
        own = _entries_tensors(part.codes)
        if part.key_scales is not None:
            own["key_scales"] = part.key_scales
        found |= {f"bits_{part.bits}.{name}": tensor for name, tensor in own.items()}
    return found


def _packed_entries(
    own: dict[str, Tensor], bits: list[int], like: tuple[Tensor, Tensor]
) -> PackedEntries:
    parts = []
    for width in sorted(set(bits), reverse=True):
        mine = {
            name.removeprefix(f"bits_{width}."): tensor
            for name, tensor in own.items()
            if name.startswith(f"bits_{width}.")
        }
        part = PackedHeads(
            bits=width,
            heads=tuple(head for head, each in enumerate(bits) if each == width),
            codes=_ragged_entries(mine),
            key_scales=mine.get("key_scales"),
            like=like,
        )
        parts.append(part)
    return PackedEntries(parts=tuple(parts))


def _ragged_entries(own: dict[str, Tensor]) -> RaggedEntries:
    return RaggedEntries(
        keys=own["kept_keys"],
        values=own["kept_values"],
        positions=own["kept_positions"],
        bias=own.get("kept_bias"),
        lengths=own["lengths"].cpu().numpy().astype(np.int64),
    )


def _fill(layer: Any, kind: dict[str, Any], own: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Put a layer into the state that was saved."""
    keys, values = own["keys"], own["values"]
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if not isinstance(layer, BudgetLayer):
        layer.cumulative_length = header["seen_tokens"]
        return
    layer.seen_tokens = header["seen_tokens"]
    if kind["kind"] == "even":
        layer.kept_indices = own["kept_indices"]
        layer.logit_bias = own.get("logit_bias")
    if kind["kind"] == "ragged":
        layer.entries = _ragged_entries(own)
    if kind["kind"] == "packed":
        like = keys[0, 0, :0].clone(), values[0, 0, :0].clone()
        layer.entries = _packed_entries(own, kind["bits"], like)
        layer.packed_following = int(kind["packed_following"])


def _devices(model: nn.Module, n_layers: int) -> list[torch.device]:
    """Where each layer of the model computes."""
    modules = decoder_layers(model)
    if modules is None or len(modules) < n_layers:
        return [next(model.parameters()).device] * n_layers
    return [next(module.parameters()).device for module in modules][:n_layers]


def saved_notes(path: str | Path) -> dict[str, Any]:
    """What was noted when a cache was saved, without reading what it holds.

    Parameters
    ----------
    path : str or Path
        Written by `save_cache`.

    Returns
    -------
    dict
        Empty where nothing was noted.

    Raises
    ------
    ProfileFileError
        If the file is missing or truncated, not of this schema version, or its header was edited.
    """
    notes: dict[str, Any] = read_header(path).get("notes", {})
    return notes


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header = read_header(path)
    with opened(path, "pt") as file:
        # What the library gives is a window on the whole file; the cache owns its storage.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if header.get("tensor_digest") != _tensor_digest(tensors):
        found = header.get("tensor_digest")
        raise header_fault(path, "tensor_digest", found, "that of its tensors")
    return header, tensors


def _check_model(
    path: str | Path, header: dict[str, Any], model: nn.Module, *, allow_other_model: bool
) -> None:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if header.get("dtype") != dtype:
        raise ModelMismatchError(
            f"{path} holds {header.get('dtype')} entries, but the model computes in {dtype}; load "
            f"the model in {header.get('dtype')}"
        )
    if not allow_other_model and header.get("model_digest") != model_digest(model):
        raise ModelMismatchError(
            f"{path} was filled by a {header.get('model')} with other weights than this "
            f"{type(decoder_of(model)).__name__}; load that model, or allow another one of the "
            f"same sizes ({option('allow_other_model', True)})"
        )


def _tensor_digest(tensors: dict[str, Tensor]) -> str:
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        raw: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        hasher.update(raw)
    return hasher.hexdigest()
