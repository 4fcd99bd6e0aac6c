"""The peers that only round: transformers' quantised cache, by quanto and by HQQ."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

from kvalloc.errors import MissingDependencyError

# quanto compiles a kernel at its first use, with the ninja that is installed beside this Python
os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
COMPILER = os.environ.get("CXX", "c++")


class QuantoLayer(QuantoQuantizedLayer):
    """Says what it stores, so that its bytes are read like those of every other cache."""

    def stored_tensors(self) -> Iterator[Tensor]:
        """Codes, scales and shifts, and what is not rounded yet."""
        for packed in (self._quantized_keys, self._quantized_values):
            yield from (packed._data._data, packed._scale, packed._shift)
        yield from (self.keys, self.values)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantoLayer:
        """Quanto's tensors cannot be copied; here they are replaced, and never changed."""
        return copy.copy(self)


class HQQLayer(HQQQuantizedLayer):
    """The same, by HQQ, for prompts of any length."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, dict[str, Any]]:
        """Filled up with zeros, as HQQ packs nothing but whole bytes of whole groups."""
        _, n_heads, n_tokens, head_dim = tensor.shape
        packed = self.q_group_size * 8 // self.nbits
        missing = -n_tokens % (packed // gcd(packed, n_heads * head_dim))
        codes, meta = super()._quantize(pad(tensor, (0, 0, 0, missing)), axis)
        return codes, {**meta, "tokens": n_tokens}

    def _dequantize(self, q_tensor: tuple[Tensor, dict[str, Any]]) -> Tensor:
        return super()._dequantize(q_tensor)[:, :, : q_tensor[1]["tokens"]]

    def stored_tensors(self) -> Iterator[Tensor]:
        """Codes, scales and zero points, and what is not rounded yet."""
        for codes, meta in (self._quantized_keys, self._quantized_values):
            yield from (codes, meta["scale"], meta["zero"])
        yield from (self.keys, self.values)


BACKENDS: dict[str, tuple[Any, int]] = {"quanto": (QuantoLayer, 0), "HQQ": (HQQLayer, 1)}
"""Of each backend its layer, and the axis that transformers' documentation recommends."""


def quantized_cache(model: PreTrainedModel, backend: str, bits: int) -> Cache:
    """An empty quantised cache, at the defaults of transformers: groups of 64, 128 not rounded.

    Those 128 are tokens that follow a prompt; of the prompt everything is rounded. Layers with a
    sliding window stay as they are, as with every other method.

    Raises
    ------
    MissingDependencyError
        If the backend is not installed, or quanto has no compiler.
    """
    if backend == "quanto" and shutil.which(COMPILER) is None:
        raise MissingDependencyError(f"quanto needs a C++ compiler, and there is no {COMPILER}")
    layer, axis = BACKENDS[backend]
    try:
        cache = QuantizedCache(backend.lower(), model.config, bits, axis, axis)
    except ImportError as error:
        raise MissingDependencyError(
            f"{backend} is not installed here: 'make peers' installs it"
        ) from error
    cache.layers = [
        plain if plain.is_sliding else layer(bits, axis, axis)
        for plain in DynamicCache(config=model.config).layers
    ]
    return cache
