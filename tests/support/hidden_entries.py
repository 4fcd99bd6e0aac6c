"""The oracle for models of any family: a full cache, and a mask that hides what is evicted.

It answers on eager attention, and uses nothing of kvalloc but the list of entries that stay. Which
layer of the cache an attention call reads is told from its keys. If they are not what a layer has
returned, they were made from what the latest layer has returned.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from runtime_oracle import as_stored, visible
from transformers import DynamicCache

from kvalloc.models import names

EAGER = "eager_attention_forward"
"""Eager attention in each modeling file."""


def full_layers(cache: Any) -> list[int]:
    """Return the layers of a cache that store every token."""
    layers = enumerate(cache.layers)
    return [i for i, one in layers if getattr(one, "keys", None) is not None and not one.is_sliding]


class Twin:
    """A copy of a model that reads what the model reads, with a full cache of its own.

    The first forward runs on the model's own attention, so that the same numbers are rounded when
    they are stored. Later ones run on eager attention.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Before anything is applied to it.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.cache = copy.deepcopy(model), DynamicCache(config=model.config)
        self.has_read = False
        for layer, store in enumerate(self.cache.layers):
            if hasattr(store, "update"):
                store.update = self._noting(layer, store.update)
        files = {sys.modules[type(module).__module__] for module in self.model.modules()}
        self._files = [file for file in files if hasattr(file, EAGER)]
        self._visible: dict[int, torch.Tensor] = {}
        self._returned: dict[int, torch.Tensor] = {}  # keys by layer, the latest last

    def logits(self, **inputs: Any) -> torch.Tensor:
        """Return the logits of new tokens, which see no hidden entry."""
        with ExitStack() as stack:
            if self.has_read:
                self.model.set_attn_implementation("eager")
                for file in self._files:
                    hiding = self._hiding(getattr(file, EAGER))
                    stack.enter_context(mock.patch.object(file, EAGER, hiding))
            self.has_read = True
            return self.model(**inputs, **names.cache_keyword(self.model, self.cache)).logits

    def follow(self, cache: Any) -> None:
        """From now on hide what a cache has evicted, and round what it has rounded."""
        columns = torch.arange(self.cache.get_seq_length())
        for layer in full_layers(self.cache):
            kept, store = cache.kept_indices(layer), self.cache.layers[layer]
            before = columns <= kept.amax(dim=(1, 2))[:, None]  # the window is always kept
            self._visible[layer] = visible(kept, len(columns)) | ~before[:, None]
            if not self._visible[layer].all():
                for part in ("keys", "values"):
                    exact = getattr(store, part)
                    rounded = torch.where(before[:, None, :, None], as_stored(exact), exact)
                    setattr(store, part, rounded)

    def _noting(self, layer: int, update: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            self._returned.pop(layer, None)
            self._returned[layer] = result[0]
            return result

        return noting

    def _hiding(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        def hiding(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
        ) -> Any:
            readers = [layer for layer, keys in self._returned.items() if keys is key]
            layer = readers[0] if readers else next(reversed(self._returned))
            shown = self._visible.get(layer)
            if shown is not None and hasattr(module, "layer_idx"):  # else it reads no cache
                columns, lowest = key.shape[2], torch.finfo(query.dtype).min
                shown = torch.nn.functional.pad(shown, (0, columns - shown.shape[2]), value=True)
                shown = shown.repeat_interleave(query.shape[1] // shown.shape[1], dim=1)
                zeros = query.new_zeros(1, 1, query.shape[2], columns)
                if attention_mask is None:
                    attention_mask = zeros
                elif attention_mask.dtype == torch.bool:  # made for sdpa, by ``generate()``
                    attention_mask = zeros.masked_fill(~attention_mask, lowest)
                attention_mask = attention_mask.masked_fill(~shown[:, :, None], lowest)
            return attend(module, query, key, value, attention_mask, **kwargs)

        return hiding
