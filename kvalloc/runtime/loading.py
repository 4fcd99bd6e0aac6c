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
from kvalloc.formats.saved_cache import SavedCacheHeader, SavedLayer
from kvalloc.models.structure import decoder_layers, decoder_of, weights_digest
from kvalloc.runtime.kept import RaggedEntries
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.making import make_cache
from kvalloc.runtime.packed import PackedEntries, PackedHeads
from kvalloc.runtime.saving import tensor_digest

__all__ = ["load_cache"]


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
    decide = None if header.row_profiles is None else _decided_before
    cache = make_cache(header.profile, model, allow_other_model=allow_other_model, decide=decide)
    devices = _devices(model, len(cache.layers))
    for index, (layer, saved) in enumerate(zip(cache.layers, header.layers, strict=True)):
        own = {
            name.split(".", 1)[1]: tensor.to(devices[index])
            for name, tensor in tensors.items()
            if name.split(".", 1)[0] == str(index)
        }
        _fill(layer, saved, own, header)
    arrival = cache.arrival
    arrival.prompt_tokens, arrival.complete = header.prompt_tokens, True
    if header.row_profiles is not None:
        arrival.decide(list(header.row_profiles))
    visible = tensors.get("visible")
    arrival.visible = None if visible is None else visible.bool().to(devices[0])
    return cache


def _decided_before(decoder: nn.Module, rows: Sequence[Any]) -> list[BudgetProfile]:
    """Refuse a new prompt after `reset`: the file has the saved prompt's budgets and no more."""
    raise UnsupportedRequestError(
        "the budgets of this cache were decided from the prompt that it was saved with, and how "
        "is not in the file; make a new cache for another prompt"
    )


def _packed_entries(
    own: dict[str, Tensor], bits: Sequence[int], like: tuple[Tensor, Tensor]
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


def _fill(layer: Any, saved: SavedLayer, own: dict[str, Tensor], header: SavedCacheHeader) -> None:
    """Put a layer into the state that was saved."""
    keys, values = own["keys"], own["values"]
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if not isinstance(layer, BudgetLayer):
        layer.cumulative_length = header.seen_tokens
        return
    layer.seen_tokens = header.seen_tokens
    if saved.kind == "even":
        layer.kept_indices = own["kept_indices"]
        layer.logit_bias = own.get("logit_bias")
    if saved.kind == "ragged":
        layer.entries = _ragged_entries(own)
    if saved.bits is not None and saved.packed_following is not None:
        like = keys[0, 0, :0].clone(), values[0, 0, :0].clone()
        layer.entries = _packed_entries(own, saved.bits, like)
        layer.packed_following = saved.packed_following


def _devices(model: nn.Module, n_layers: int) -> list[torch.device]:
    """Where each layer of the model computes."""
    modules = decoder_layers(model)
    if modules is None or len(modules) < n_layers:
        return [next(model.parameters()).device] * n_layers
    return [next(module.parameters()).device for module in modules][:n_layers]


def _read(path: Path) -> tuple[SavedCacheHeader, dict[str, Tensor]]:
    header = SavedCacheHeader.load(path)
    with header.opened(path, "pt") as file:
        # What the library gives is a window on the whole file; the cache owns its storage.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if (found := header.tensor_digest) != tensor_digest(tensors):
        raise header.file_error(path, "tensor_digest", found, "that of its tensors")
    return header, tensors


def _check_model(
    path: str | Path, header: SavedCacheHeader, model: nn.Module, *, allow_other_model: bool
) -> None:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    if header.dtype != dtype:
        raise ModelMismatchError(
            f"{path} holds {header.dtype} entries, but the model computes in {dtype}; load "
            f"the model in {header.dtype}"
        )
    if not allow_other_model and header.model_digest != weights_digest(decoder_of(model)):
        raise ModelMismatchError(
            f"{path} was filled by a {header.model} with other weights than this "
            f"{type(decoder_of(model)).__name__}; load that model, or allow another one of the "
            f"same sizes ({option('allow_other_model', True)})"
        )
