"""What a cache stores now: entries, their positions, and bytes; on layers of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.arrival import Arrival
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.shape import ModelShape

__all__ = ["Account", "free_slid_out", "stored_tensors"]


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


def stored_tensors(layer: Any) -> list[Tensor]:
    """All K and V tensors of a layer of any kind."""
    if isinstance(layer, BudgetLayer):
        return layer.stored_tensors()
    return [] if layer.keys is None else [layer.keys, layer.values]


def plain_bytes(shape: ModelShape, row_tokens: IntArray) -> int:
    """Bytes of K and V of a plain cache whose rows have so many tokens, (batch,)."""
    lengths, rows = np.unique(row_tokens, return_counts=True)
    return sum(
        shape.full_bytes(int(length), int(count))
        for length, count in zip(lengths, rows, strict=True)
        if length
    )


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


class Account:
    """The part of a cache that tells what it stores."""

    profile: BudgetProfile
    arrival: Arrival
    layers: list[Any]
    get_seq_length: Callable[[], int]

    @property
    def batch(self) -> int:
        """Rows that are stored; 0 before the first forward."""
        return stored_rows(self.layers[0])

    @property
    def retained_bytes(self) -> int:
        """Bytes of K and V storage allocated now: every storage once and in full."""
        return allocated_bytes(self.layers)

    @property
    def full_bytes(self) -> int:
        """Bytes a plain cache would store for the same tokens seen; padding does not count.

        Of a sliding layer the last ``sliding_window - 1`` entries count, and one more where, after
        a decoded token, it is still allocated, and in `retained_bytes` as well.
        """
        if not self.batch:
            return 0
        shape = replace(self.profile.shape, dtype_bytes=self.layers[0].dtype.itemsize)
        tokens = self.arrival.row_tokens(self.get_seq_length(), self.batch)
        return plain_bytes(shape, tokens) + slid_out_bytes(self.layers)

    @property
    def kept_tokens(self) -> IntArray:
        """Entries stored now, ``(n_layers, n_kv_heads)``; where rows differ, those of the most."""
        found: IntArray = self.kept_tokens_by_row.max(axis=0, initial=0)
        return found

    @property
    def kept_tokens_by_row(self) -> IntArray:
        """Entries stored now, ``(batch, n_layers, n_kv_heads)``."""
        heads = self.profile.shape.n_kv_heads
        found = np.zeros((self.batch, len(self.layers), heads), dtype=np.int64)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, BudgetLayer):
                counts = layer.stored_counts()
                found[:, index] = 0 if counts is None else counts
            elif layer.keys is not None:
                found[:, index] = int(layer.keys.shape[-2])
        return found

    def kept_indices(self, layer: int) -> Tensor:
        """Original positions of the prompt's entries that a layer keeps.

        While a prompt arrives in chunks, of all that has come of it; where the budget is kept
        while decoding, also of the tokens that followed up to the latest eviction.

        Parameters
        ----------
        layer : int
            A full-attention layer.

        Returns
        -------
        Tensor of int32, (batch, n_kv_heads, n_kept)
            Columns of the input in increasing order; -1 beyond the end of a head that keeps fewer
            than another. These four bytes an entry are the cache's own book-keeping and do not
            count as K or V bytes.

        Raises
        ------
        InputError
            If the layer is a sliding one, or no prompt has been seen.
        """
        stored = self.layers[layer]
        if not isinstance(stored, BudgetLayer):
            raise InputError(f"layer {layer} is a sliding-window layer: it keeps the last tokens")
        if not stored.stored or self.arrival.prompt_tokens is None:
            raise InputError("the cache has seen no prompt yet; run the model with it first")
        return stored.kept_positions(self.arrival.prompt_tokens)
