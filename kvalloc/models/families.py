"""Families of models: each layer's kind, of its layer in transformers' cache, and sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.names import has_state, layer_kind, state_tensors
from kvalloc.models.structure import text_config
from kvalloc.shape import LayerShape, LayerType

WITH_FULL_CACHE = "use this model with its full cache"


def cached_layers(model: Any, name: str | None = None) -> list[Any]:
    """Return new layers of the cache that transformers makes for a model, in order.

    Raises
    ------
    UnsupportedModelError
        If there is none, or one is of an unknown kind or attends to images.
    """
    from transformers import DynamicCache

    name, layers = name or type(model).__name__, DynamicCache(config=text_config(model)).layers
    if not layers:
        raise UnsupportedModelError(
            f"transformers caches no layer of {name} by its config, so there is nothing to reduce; "
            f"{WITH_FULL_CACHE}"
        )
    if getattr(text_config(model), "cross_attention_layers", None):
        raise UnsupportedModelError(
            f"layers of {name} attend to images beside the text (cross-attention), and kvalloc "
            f"takes no entries away there; {WITH_FULL_CACHE}"
        )
    for layer in layers:
        if layer_kind(layer) is None:
            raise UnsupportedModelError(
                f"{name} caches {type(layer).__name__}s, which kvalloc does not know; try a newer "
                f"transformers, or {WITH_FULL_CACHE}"
            )
    return layers


def layer_shapes(
    model: Any,
    cached: Sequence[Any],
    stored: Mapping[int, Mapping[str, int]],
    reads: Mapping[int, int],
    latents: Collection[int],
) -> tuple[LayerShape, ...]:
    """Return the shapes of layers.

    By layer, `stored` has sizes, as in `LayerShape`, and `reads` the source of other layers'
    entries; `cached` is the cache after the forward, `latents` the layers that store latents.
    """
    configured = dict(enumerate(getattr(text_config(model), "layer_types", None) or ()))
    shapes = []
    for index, layer in enumerate(cached):
        kind: LayerType | None = layer_kind(layer)
        assert kind is not None
        if index in stored:
            if kind == "full" and index in latents:
                kind = "latent"
            if kind == "sliding" and "chunked" in str(configured.get(index)):
                kind = "chunked"
        elif index in reads:
            kind = "shared"
        elif not has_state(layer):
            kind = "none"
        elif kind != "sliding":
            kind = "state"
        shapes.append(
            LayerShape(
                kind=kind,
                **stored.get(index, {}),
                window=getattr(layer, "sliding_window", None),
                reads=reads.get(index),
                state_bytes=sum(one.nbytes // len(one) for one in state_tensors(layer)),
            )
        )
    return tuple(shapes)
