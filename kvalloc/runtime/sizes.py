"""The layers that transformers would cache for a model, with reducible ones in their place."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.structure import text_config
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.shape import ModelShape

__all__ = ["make_layers"]


def make_layers(model: nn.Module, shape: ModelShape) -> list[CacheLayerMixin]:
    """Cache layers for the model, its full-attention ones replaced by `BudgetLayer`.

    Sliding layers are transformers' own: they hold a constant number of entries anyway.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder-only model.
    shape : ModelShape
        Its sizes, which say which layers get budgets.

    Returns
    -------
    list of CacheLayerMixin, one a model layer

    Raises
    ------
    UnsupportedModelError
        If a layer caches anything but keys and values of full or sliding attention.
    """
    layers: list[Any] = DynamicCache(config=text_config(model)).layers
    expected = [
        DynamicLayer if t == "full" else DynamicSlidingWindowLayer for t in shape.layer_types
    ]
    found = [type(layer) for layer in layers]
    if found != expected:
        kinds = ", ".join(sorted({kind.__name__ for kind in found}))
        raise UnsupportedModelError(
            f"transformers caches {type(model).__name__} in {len(found)} layers of {kinds}; "
            "kvalloc reduces full attention next to sliding-window attention only"
        )
    return [BudgetLayer() if type(layer) is DynamicLayer else layer for layer in layers]
