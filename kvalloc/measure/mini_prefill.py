"""Mini-prefill: a forward that only shows attention (XKV, Section IV-A and Figure 7).

It stores no KV cache, and ends at the last layer's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.attention import AttentionStates, intercept_attention, probe_of
from kvalloc.models.names import cache_keyword
from kvalloc.models.structure import decoder_layers, decoder_of, evaluating

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import Compute


class _Seen(Exception):
    """Ends the forward."""


def mini_prefill(
    model: Any,
    input_ids: Tensor,
    look: Callable[[AttentionStates], None],
    *,
    layers: Collection[int],
    chunk: int | None = None,
) -> None:
    """Run a model's decoder up to the last requested layer.

    All chunks run through one layer before the next: only one layer's entries are stored.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Unchanged afterwards.
    input_ids : Tensor of int64, (batch, n_tokens)
        Prompts of equal length, without padding.
    look : callable
        Called with requested layers' states, in order; must not keep tensors.
    chunk : int, optional
        Tokens in one forward; all by default, and if layers do not `run_apart`. `look` gets each
        chunk's queries, and all keys and values up to it.

    Raises
    ------
    UnsupportedModelError
        If attention cannot be seen.
    """
    import torch

    last, n_tokens = max(layers), input_ids.shape[1]
    seen: set[int] = set()
    running: int | None = None  # the one layer that a chunk runs through

    def handler(states: AttentionStates, compute: Compute) -> tuple[Tensor, Tensor | None]:
        if states.layer in layers and running in (None, states.layer):
            look(states)
            seen.add(states.layer)
        if states.layer == last:
            raise _Seen
        return compute(states.mask)

    decoder = decoder_of(model)
    with torch.inference_mode(), evaluating(decoder), intercept_attention(model, handler):
        if chunk is None or chunk >= n_tokens or not run_apart(model):
            with suppress(_Seen):
                decoder(input_ids=input_ids, use_cache=False)
        else:
            ends = [*range(n_tokens, 0, -chunk)][::-1]
            pieces = [slice(begin, end) for begin, end in pairwise([0, *ends])]
            entering: Tensor | None = None
            for running in range(last + 1):
                entering = _one_layer(model, input_ids, entering, running, pieces)
    check_seen(model, layers, seen)


def _one_layer(
    model: Any, input_ids: Tensor, entering: Tensor | None, layer: int, pieces: Sequence[slice]
) -> Tensor | None:
    """Run chunks through a layer; write outputs over its inputs, (batch, n_tokens, hidden_size)."""
    from transformers import DynamicCache

    decoder, layers = decoder_of(model), layers_of(model)
    cache = DynamicCache(config=decoder.config)
    # Lengths and masks are taken from any layer of the cache, and only this one ever gets keys.
    cache.layers = [cache.layers[layer]] * len(cache.layers)
    leaving: list[Tensor] = []

    def leave(module: Any, args: object, output: Any) -> None:
        leaving.append(output[0] if isinstance(output, tuple) else output)
        raise _Seen

    handle = layers[layer].register_forward_hook(leave)
    try:
        for piece in pieces:
            with ExitStack() as stack, suppress(_Seen):
                if entering is not None and layer:
                    stack.enter_context(begun_at(layers, layer, entering[:, piece]))
                keyword = cache_keyword(decoder, cache)
                decoder(input_ids=input_ids[:, piece], use_cache=True, **keyword)
            if leaving:
                out = leaving.pop()
                if entering is None:
                    entering = out.new_empty(*input_ids.shape, out.shape[-1])
                entering[:, piece] = out
    finally:
        handle.remove()
    return entering


def check_seen(model: Any, layers: Iterable[int], seen: Container[int]) -> None:
    """Raise `UnsupportedModelError` for a layer of unseen attention."""
    missing = next((layer for layer in layers if layer not in seen), None)
    if missing is not None:
        raise UnsupportedModelError(
            f"the attention of layer {missing} of {type(model).__name__} never went through "
            "transformers' attention interface, so kvalloc cannot see it"
        )


def run_apart(model: Any, *, states: bool = False) -> bool:
    """Return whether layers, maybe with `states`, need only the last output and the tokens."""
    probe = probe_of(model)
    special = any(one.kind == "shared" or (one.state_bytes and not states) for one in probe.layers)
    special |= len(layers_of(model)) != len(probe.layers)  # LongCat's layers attend twice
    return not (special or probe.passes_more)


def layers_of(model: Any) -> Any:
    """Return a model's decoder layers, in order, or raise `UnsupportedModelError`."""
    layers = decoder_layers(model)
    if layers is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps its decoder layers where kvalloc does not find them, so "
            "no loss can be measured on it"
        )
    return layers


class LayerInputs:
    """Inputs of decoder layers in one forward, for later forwards."""

    def __init__(self, model: Any) -> None:
        self._layers, self._apart = layers_of(model), run_apart(model, states=True)
        self._entering: dict[Any, Tensor] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record them in a forward."""

        def record(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._entering[layer] = args[0] if args else kwargs["hidden_states"]

        with ExitStack() as stack:
            for layer in self._layers if self._apart else ():
                stack.callback(layer.register_forward_pre_hook(record, with_kwargs=True).remove)
            yield

    def begun(self, layer: int, n_rows: int) -> AbstractContextManager[None]:
        """Let forwards of `n_rows` copies begin at a layer, if layers `run_apart`."""
        if not self._apart:
            return nullcontext()
        hidden = self._entering[self._layers[layer]].repeat(n_rows, 1, 1)
        return begun_at(self._layers, layer, hidden)


@contextmanager
def begun_at(layers: Any, begin: int, hidden: Tensor) -> Iterator[None]:
    """Let the decoder, with its tokens, begin at a layer with known hidden states."""

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
