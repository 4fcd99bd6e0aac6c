"""Figures of a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import full_bytes
from kvalloc.accounting.stored import bytes_at_16_bits, layer_tensors, storages
from kvalloc.errors import InputError, one_line
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.names import state_tensors
from kvalloc.runtime.door import Door
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.rows import Method, Row
from kvalloc.runtime.store import Store
from kvalloc.units import share_text, size


class CacheFigures(Cache):
    """Profiles and sizes of a cache."""

    layers: list[Any]
    methods: tuple[Method, ...]
    door: Door
    rows: list[Row]
    read_ids: Tensor | None = None  # the first tokens that it has seen, as far as they are known
    token_kinds: Mapping[str, int] | None = None  # ids that stand for tokens of images and such

    @property
    def stores(self) -> dict[int, Store]:
        """Layers of full attention, by number."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, Store)}

    @property
    def profile(self) -> BudgetProfile:
        """Profile of the first row; its detail describes all methods."""
        first = self.rows[0].profile if self.rows else self.methods[0].profile
        details = dict.fromkeys(method.profile.detail for method in self.methods)
        if len(details) < 2:
            return first
        return first.replace(detail=one_line("; ".join(details), 100))

    @property
    def row_profiles(self) -> tuple[BudgetProfile, ...]:
        """Profile of each row."""
        return tuple(row.profile for row in self.rows)

    @property
    def options(self) -> CacheOptions:
        """Options of the cache."""
        return self.methods[0].options

    @property
    def prompt_complete(self) -> bool:
        """Whether the whole prompt was seen."""
        return self.door.complete

    @property
    def reduced(self) -> bool:
        """Whether any entry was evicted, padding included."""
        return any(store.kept is not None for store in self.stores.values())

    @property
    def batch(self) -> int:
        """Stored rows; 0 before the first forward."""
        return next(layer for layer in self.layers if isinstance(layer, Store)).rows

    @property
    def retained_bytes(self) -> int:
        """Bytes allocated now, positions too; each storage counts in full."""
        return sum(int(storage.nbytes()) for storage, _, _ in storages(self.tensors()))

    @property
    def share(self) -> float:
        """Stored share of a 16-bit cache of all tokens seen; 0 before the first forward.

        Positions of kept entries count, sliding layers do not.
        """
        if not self.batch:
            return 0.0
        shape = self.methods[0].profile.shape
        tokens = sum(row.seen for row in self.rows)
        whole = shape.bytes_per_entry * shape.n_kv_heads * len(shape.full_layers)
        return bytes_at_16_bits(self.layers) / max(1, tokens * whole)

    @property
    def state_bytes(self) -> int:
        """Bytes of states, which no budget changes."""
        return sum(tensor.nbytes for layer in self.layers for tensor in state_tensors(layer))

    @property
    def share_text(self) -> str:
        """Requested share, if known, stored bytes, and states."""
        text = share_text(self.retained_bytes, self.full_bytes, self.profile.target_text)
        return f"{text}, states {size(self.state_bytes)}" if self.state_bytes else text

    @property
    def full_bytes(self) -> int:
        """Bytes of a 16-bit cache of all tokens seen, without padding.

        A sliding layer counts its last ``sliding_window - 1`` entries, and one more if allocated by
        a decoded token, as in `retained_bytes`.
        """
        if not self.batch:
            return 0
        shape = self.methods[0].profile.shape
        shape = replace(shape, dtype_bytes=next(iter(self.stores.values())).keys.dtype.itemsize)
        slid_out: int = sum(
            tensor.untyped_storage().nbytes() - tensor.nbytes
            for layer in self.layers
            if not isinstance(layer, Store)
            for tensor in layer_tensors(layer)
        )
        return sum(full_bytes(shape, row.seen) for row in self.rows if row.seen) + slid_out

    @property
    def kept_tokens(self) -> IntArray:
        """Entries stored now, ``(n_layers, n_kv_heads)``; the most if rows differ."""
        counts: IntArray = self.kept_tokens_by_row.max(axis=0, initial=0)
        return counts

    @property
    def kept_tokens_by_row(self) -> IntArray:
        """Entries stored now, ``(batch, n_layers, n_kv_heads)``."""
        heads = self.methods[0].profile.shape.n_kv_heads
        counts: IntArray = np.zeros((self.batch, len(self.layers), heads), dtype=np.int64)
        tokens = self.tokens
        for index, layer in enumerate(self.layers if self.batch else ()):
            if isinstance(layer, Store):
                counts[:, index] = layer.counts(tokens)
            elif (keys := getattr(layer, "keys", None)) is not None:
                counts[:, index] = keys.shape[-2]
        return counts

    @property
    def kept_by_kind(self) -> dict[str, tuple[float, int]] | None:
        """Kept entries of each kind of token, and its tokens seen.

        A kind is ``"text"`` or one of `kvalloc.models.structure.token_kinds`. The first is the mean
        over KV heads of full-attention layers; both sum over rows. None unless under
        `kvalloc.apply`.
        """
        if (ids := self.read_ids) is None or self.token_kinds is None or not self.batch:
            return None
        ids = ids.cpu()
        (n_rows, n_columns), kinds = ids.shape, torch.zeros_like(ids)
        for number, token in enumerate(self.token_kinds.values(), start=1):
            kinds[ids == token] = number
        if (visible := self.door.visible) is not None:
            kinds[~visible[:, :n_columns]] = -1
        stay = torch.zeros(n_rows, n_columns + 1, device="cpu")
        for layer in self.stores:
            kept = self.kept_indices(layer).cpu().long()
            # all after the last of these are stored, since the window always is
            latest = torch.arange(n_columns + 1, device="cpu") > kept.amax(dim=(1, 2))[:, None]
            places = torch.where((kept < 0) | (kept > n_columns), n_columns, kept).flatten(1)
            each = torch.full(places.shape, 1 / kept.shape[1], device="cpu")
            stay += latest.float().scatter_add(1, places, each)
        counts = dict[str, tuple[float, int]]()
        for number, kind in enumerate(("text", *self.token_kinds)):
            if (n_seen := int((kinds == number).sum())) > 0:
                n_kept = float(stay[:, :n_columns][kinds == number].sum()) / len(self.stores)
                counts[kind] = n_kept, n_seen
        return counts

    @property
    def tokens(self) -> IntArray:
        """Tokens that each row has seen, ``(batch,)``."""
        return np.array([row.seen for row in self.rows], dtype=np.int64)

    def tensors(self) -> Iterator[Tensor]:
        """Return all K and V tensors, and states."""
        of_layer = (layer_tensors, state_tensors)
        return (tensor for layer in self.layers for read in of_layer for tensor in read(layer))

    def kept_indices(self, layer: int) -> Tensor:
        """Return the positions of a prompt's entries that a layer keeps.

        Between chunks: of the chunks so far. Later: also of tokens up to the latest eviction.

        Parameters
        ----------
        layer : int

        Returns
        -------
        Tensor of int32, (batch, n_kv_heads, n_kept)
            Increasing columns of the input; -1 pads heads that keep fewer.

        Raises
        ------
        InputError
            If the layer has no budgets, or before a prompt.
        """
        store = self.layers[layer]
        if not isinstance(store, Store):
            kind = self.methods[0].profile.shape.layer_types[layer]
            raise InputError(
                f"layer {layer} is of the kind '{kind}': what it holds has a constant size, and "
                "nothing of it is kept by a budget"
            )
        if not self.batch or self.door.prompt_columns is None:
            raise InputError("the cache has seen no prompt yet; run the model with it first")
        prompt = min(self.door.prompt_columns, store.seen)
        columns, heads = list[Tensor](), int(store.keys.shape[1])
        for row, seen in enumerate(self.tokens.tolist()):
            latest = 0 if store.tail is None else seen - int(store.tail.lengths[row])
            # after the prompt, where decoding evicts as well
            end = max(self.door.count(row, prompt), latest)
            new = torch.arange(latest, end, dtype=torch.int32, device=store.keys.device)
            kept = [new] * heads
            if store.kept is not None:
                _, _, positions = store.kept.padded(np.array([row]))
                kept = [
                    torch.cat([head[:length], new])
                    for head, length in zip(positions[0], store.kept.lengths[row], strict=True)
                ]
            columns += [self.door.in_columns(row, tokens) for tokens in kept]
        padded = nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=-1)
        return padded.view(len(self.rows), heads, -1).int()
