"""A compressed cache from a file: ask today what was read yesterday."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.saved_cache import SavedCacheHeader, StoredTensor
from kvalloc.models.structure import computing_device, decoder_layers, decoder_of
from kvalloc.models.weights import weights_digest
from kvalloc.runtime.kept import KeptEntries
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.making import build_cache
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.packed import LayerEntries
from kvalloc.runtime.refusals import refuse
from kvalloc.runtime.saving import KEPT


def load_cache(path: str | Path, model: nn.Module, *, allow_other_model: bool = False) -> Any:
    """Load a cache as it was when it was saved, for the same model.

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
        Pass it to the model as its cache. Each layer is on the device of the model's layer.

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
    """Load a cache from a file that was read, and so checked, already; see `load_cache`."""
    _check_model(path, header, model, allow_other_model=allow_other_model)
    decide = None if header.row_profiles is None else _decided_before
    options = CacheOptions(
        allow_other_model=True,  # this model filled the cache, whatever its profile is of
        decode_every=header.decode_every,
        memory=header.memory,
    )
    cache = build_cache(model, header.profile, options, decide=decide, longer=header.longer_profile)
    visible = torch.ones(header.batch, header.seen_tokens, dtype=torch.bool, device="cpu")
    if (shown := tensors.get("visible")) is not None:
        visible = _tensor(shown).bool()
    devices = _devices(model, len(cache.layers))
    for index, (layer, device) in enumerate(zip(cache.layers, devices, strict=True)):
        own = {
            name.removeprefix(f"{index}."): _tensor(tensor).to(device)
            for name, tensor in tensors.items()
            if name.startswith(f"{index}.")
        }
        layer.lazy_initialization(own["keys"], own["values"])
        layer.keys, layer.values = own["keys"], own["values"]
        if isinstance(layer, BudgetLayer):
            _fill(layer, own, header, index)
        else:
            layer.cumulative_length = header.seen_tokens
    competed = np.array(header.competed_tokens)
    cache.arrival.resume(visible, header.prompt_tokens, competed, header.row_profiles)
    if (ids := header.ids) is not None:
        cache.read_ids = torch.tensor([ids], device="cpu")
    return cache


def _tensor(stored: StoredTensor) -> Tensor:
    """Return a stored tensor as one of torch, in the same memory."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if not stored.data.size:
        return torch.empty(stored.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(stored.data, dtype=dtype).reshape(stored.shape)


def _decided_before(decoder: nn.Module, rows: Sequence[Any]) -> list[BudgetProfile]:
    """Refuse a new prompt after `reset`: the file has the saved prompt's budgets and no more."""
    refuse(decided_in_file=True)
    return []


def _fill(layer: BudgetLayer, own: dict[str, Tensor], header: SavedCacheHeader, index: int) -> None:
    """Put a layer into the state that was saved."""
    shape, bits = header.profile.shape, header.profile.bits
    layer.seen_tokens = header.seen_tokens
    widths = np.full(shape.n_kv_heads, 16) if bits is None else bits[index]
    if f"bits_{widths[0]}.lengths" not in own:
        return
    parts = [
        KeptEntries(
            **{field: own.get(f"bits_{width}.{name}") for name, field in KEPT.items()},  # type: ignore[arg-type]
            lengths=own[f"bits_{width}.lengths"].cpu().numpy(),
            bits=width,
            heads=tuple(np.flatnonzero(widths == width).tolist()),
        )
        for width in sorted(set(widths.tolist()), reverse=True)
    ]
    like = own["keys"][0, 0, :0].clone(), own["values"][0, 0, :0].clone()
    layer.entries = LayerEntries(parts=tuple(parts), like=like)


def _devices(model: nn.Module, n_layers: int) -> list[torch.device]:
    """Return the device on which each layer of the model computes."""
    modules = decoder_layers(model)
    if modules is None or len(modules) < n_layers:
        return [computing_device(model)] * n_layers
    return [computing_device(module) for module in modules][:n_layers]


def _check_model(
    path: str | Path, header: SavedCacheHeader, model: nn.Module, *, allow_other_model: bool
) -> None:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    decoder = decoder_of(model)
    refuse(other_dtype=header.dtype != dtype and (path, header.dtype, dtype))
    other = not allow_other_model and header.model_digest != weights_digest(decoder)
    refuse(other_weights=other and (path, header.model, type(decoder).__name__))
