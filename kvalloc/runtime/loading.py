"""A compressed cache from a file: ask today what was read yesterday."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.errors import ModelMismatchError, UnsupportedRequestError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.saved_cache import (
    header_fault,
    opened,
    read_header,
)
from kvalloc.models.structure import decoder_layers, decoder_of, weights_digest
from kvalloc.runtime.kept import RaggedEntries
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.making import make_cache
from kvalloc.runtime.packed import PackedEntries, PackedHeads
from kvalloc.runtime.saving import tensor_digest

__all__ = ["load_cache", "saved_notes"]


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


def _decided_before(decoder: nn.Module, rows: Sequence[Any]) -> list[BudgetProfile]:
    """Refuse a new prompt after `reset`: the file has the saved prompt's budgets and no more."""
    raise UnsupportedRequestError(
        "the budgets of this cache were decided from the prompt that it was saved with, and how "
        "is not in the file; make a new cache for another prompt"
    )


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


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header = read_header(path)
    with opened(path, "pt") as file:
        # What the library gives is a window on the whole file; the cache owns its storage.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if header.get("tensor_digest") != tensor_digest(tensors):
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
    if not allow_other_model and header.get("model_digest") != weights_digest(decoder_of(model)):
        raise ModelMismatchError(
            f"{path} was filled by a {header.get('model')} with other weights than this "
            f"{type(decoder_of(model)).__name__}; load that model, or allow another one of the "
            f"same sizes ({option('allow_other_model', True)})"
        )
