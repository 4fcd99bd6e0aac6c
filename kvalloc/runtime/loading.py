"""A compressed cache from a file: ask today what was read yesterday."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.errors import ModelMismatchError, UnsupportedRequestError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.saved_cache import SavedCacheHeader, SavedLayer, StoredTensor
from kvalloc.models.structure import decoder_layers, decoder_of, weights_digest
from kvalloc.runtime.kept import RaggedEntries
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.making import make_cache
from kvalloc.runtime.packed import LayerEntries

__all__ = ["filled_cache", "load_cache"]


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
        If the file is missing, truncated, of another schema version, or not such a file as
        `BudgetCache.save` writes: nothing of it is believed before it is checked
        (`SavedCacheHeader.read`).
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
) -> Any:
    """`load_cache` of a file that was read, and so checked, already."""
    _check_model(path, header, model, allow_other_model=allow_other_model)
    decide = None if header.row_profiles is None else _decided_before
    cache = make_cache(header.profile, model, allow_other_model=allow_other_model, decide=decide)
    devices, bits = _devices(model, len(cache.layers)), header.profile.bits
    for index, (layer, saved) in enumerate(zip(cache.layers, header.layers, strict=True)):
        own = {
            name.removeprefix(f"{index}."): _tensor(tensor).to(devices[index])
            for name, tensor in tensors.items()
            if name.startswith(f"{index}.")
        }
        _fill(layer, saved, own, None if bits is None else bits[index])
        if isinstance(layer, BudgetLayer):
            layer.seen_tokens = header.seen_tokens
        else:
            layer.cumulative_length = header.seen_tokens
    arrival = cache.arrival
    arrival.prompt_tokens, arrival.complete = header.prompt_tokens, True
    arrival.row_profiles = header.row_profiles
    visible = tensors.get("visible")
    arrival.visible = None if visible is None else _tensor(visible).bool()
    return cache


def _tensor(stored: StoredTensor) -> Tensor:
    """The same for torch, in the same memory."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if not stored.data.size:
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(stored.data, dtype=dtype).reshape(stored.shape)


def _decided_before(decoder: nn.Module, rows: Sequence[Any]) -> list[BudgetProfile]:
    """Refuse a new prompt after `reset`: the file has the saved prompt's budgets and no more."""
    raise UnsupportedRequestError(
        "the budgets of this cache were decided from the prompt that it was saved with, and how "
        "is not in the file; make a new cache for another prompt"
    )


def _fill(layer: Any, saved: SavedLayer, own: dict[str, Tensor], bits: IntArray | None) -> None:
    """Put a layer into the state that was saved."""
    layer.lazy_initialization(own["keys"], own["values"])
    layer.keys, layer.values = own["keys"], own["values"]
    if saved.kind == "even":
        layer.kept_indices, layer.logit_bias = own["kept_indices"], own.get("logit_bias")
    elif saved.kind == "ragged":
        layer.entries = LayerEntries.whole(_entries(own, ""))
    elif saved.packed_following is not None and bits is not None:
        like = own["keys"][0, 0, :0].clone(), own["values"][0, 0, :0].clone()
        parts = [
            _entries(own, f"bits_{width}.", width, tuple(np.flatnonzero(bits == width).tolist()))
            for width in sorted(set(bits.tolist()), reverse=True)
        ]
        layer.entries = LayerEntries(parts=tuple(parts), like=like)
        layer.packed_following = saved.packed_following


def _entries(
    own: dict[str, Tensor], prefix: str, bits: int = 16, heads: tuple[int, ...] | None = None
) -> RaggedEntries:
    return RaggedEntries(
        keys=own[f"{prefix}kept_keys"],
        values=own[f"{prefix}kept_values"],
        positions=own[f"{prefix}kept_positions"],
        bias=own.get(f"{prefix}kept_bias"),
        key_scales=own.get(f"{prefix}key_scales"),
        lengths=own[f"{prefix}lengths"].cpu().numpy(),
        bits=bits,
        heads=heads,
    )


def _devices(model: nn.Module, n_layers: int) -> list[torch.device]:
    """Where each layer of the model computes."""
    modules = decoder_layers(model)
    if modules is None or len(modules) < n_layers:
        return [next(model.parameters()).device] * n_layers
    return [next(module.parameters()).device for module in modules][:n_layers]


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
