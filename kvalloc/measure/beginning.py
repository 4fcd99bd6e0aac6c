"""A decoder that begins at one of its layers, with what is known to enter it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from kvalloc.errors import UnsupportedModelError
from kvalloc.models import structure


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a model, in order.

    Raises
    ------
    UnsupportedModelError
        If they are not where they are in transformers' decoders.
    """
    layers = structure.decoder_layers(model)
    if layers is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps its decoder layers where kvalloc does not find them, so "
            "no loss can be measured on it"
        )
    return layers


@contextmanager
def begun_at(layers: Any, begin: int, hidden: Tensor, n_variants: int) -> Iterator[None]:
    """Let the decoder begin at one layer, with what is known to enter it."""

    def enter(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        start = hidden.expand(n_variants, -1, -1)
        if args:
            return (start, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": start}

    def skip(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    with ExitStack() as stack:
        for layer in layers[:begin]:
            stack.callback(_put_back, layer, layer.__dict__.get("forward"))
            layer.forward = skip
        handle = layers[begin].register_forward_pre_hook(enter, with_kwargs=True)
        stack.callback(handle.remove)
        yield


def _put_back(layer: Any, own_forward: Any) -> None:
    if own_forward is None:
        del layer.__dict__["forward"]
    else:  # a layer spread over devices has a forward of its own
        layer.forward = own_forward
