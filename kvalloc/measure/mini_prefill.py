"""Mini-prefill: a forward pass that exists only to be looked at.

No KV cache is kept, the language-model head never runs, and the pass ends where the last layer's
attention would begin (XKV, Section IV-A and Figure 7).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.attention import AttentionStates, intercept_attention
from kvalloc.models.structure import decoder_layers, decoder_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import Compute


class _LastLayerSeen(Exception):
    """Nothing that follows is needed. Never leaves this module."""


def mini_prefill(
    model: Any,
    input_ids: Tensor,
    look: Callable[[AttentionStates], None],
    *,
    layers: Collection[int],
) -> None:
    """Run a model's decoder up to the last layer that is wanted.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model. Its config, hooks and training flags are the same afterwards.
    input_ids : Tensor of int64, (batch, n_tokens)
        Prompts of equal length, without padding.
    look : callable
        Called with what each wanted layer's attention sees, in the order of the layers. It must
        not keep the tensors.
    layers : collection of int
        The wanted layers. The last one's attention output, its MLP, all later layers, the final
        norm and the head are never computed.

    Raises
    ------
    UnsupportedModelError
        If the model's attention cannot be seen.

    References
    ----------
    XKV, Section IV-A.
    """
    import torch

    last = max(layers)
    seen: set[int] = set()

    def handler(states: AttentionStates, compute: Compute) -> tuple[Tensor, Tensor | None]:
        if states.layer in layers:
            look(states)
            seen.add(states.layer)
        if states.layer == last:
            raise _LastLayerSeen
        return compute(states.mask)

    decoder = decoder_of(model)
    with (
        torch.inference_mode(),
        evaluating(decoder),
        intercept_attention(model, handler),
        suppress(_LastLayerSeen),
    ):
        decoder(input_ids=input_ids, use_cache=False)
    check_seen(model, layers, seen)


def check_seen(model: Any, layers: Iterable[int], seen: Container[int]) -> None:
    """Refuse a model with a layer whose attention was not seen.

    Raises
    ------
    UnsupportedModelError
    """
    missing = next((layer for layer in layers if layer not in seen), None)
    if missing is not None:
        raise UnsupportedModelError(
            f"the attention of layer {missing} of {type(model).__name__} never went through "
            "transformers' attention interface, so kvalloc cannot see it"
        )


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """Dropout off, and each module's own flag back afterwards."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def layers_of(model: Any) -> Any:
    """The decoder layers of a model, in order.

    Raises
    ------
    UnsupportedModelError
        If they are not where they are in transformers' decoders.
    """
    layers = decoder_layers(model)
    if layers is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps its decoder layers where kvalloc does not find them, so "
            "no loss can be measured on it"
        )
    return layers


@contextmanager
def begun_at(layers: Any, begin: int, hidden: Tensor) -> Iterator[None]:
    """Let the decoder begin at one layer, with what is known to enter it."""

    def enter(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

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
