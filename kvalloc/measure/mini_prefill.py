"""Mini-prefill: a forward pass that only shows attention.

It stores no KV cache, does not run the language-model head, and ends where the last layer's
attention would begin (XKV, Section IV-A and Figure 7).
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

    With chunks, all of them run through one layer before any runs through the next. So keys and
    values of only one layer are stored at a time, beside its hidden states.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model. Its config, hooks and training flags are unchanged afterwards.
    input_ids : Tensor of int64, (batch, n_tokens)
        Prompts of equal length, without padding.
    look : callable
        Called with the attention states of each requested layer, in order. It must not keep the
        tensors.
    layers : collection of int
        Requested layers. The last one's attention output and all later parts are not computed,
        except once for a model, to find its rotation on a few tokens.
    chunk : int, optional
        Tokens in one forward; all by default, and if layers do not `run_apart`. `look` is then
        called with each chunk's queries, and all keys and values up to it.

    Raises
    ------
    UnsupportedModelError
        If the model's attention cannot be seen.

    References
    ----------
    XKV, Section IV-A.
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
    """Run chunks through one decoder layer.

    Parameters
    ----------
    entering : Tensor, (batch, n_tokens, hidden_size), or None
        Input of the layer; overwritten by its output. None for the first one.

    Returns
    -------
    Tensor, the same, or None
        None for the last layer.
    """
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
    """Refuse a model with a layer of unseen attention.

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


def run_apart(model: Any, *, states: bool = False) -> bool:
    """Return whether each layer of a model runs on the output of the previous one alone.

    A layer may also get the tokens.

    Parameters
    ----------
    states : bool
        Whether layers may have states.
    """
    probe = probe_of(model)
    special = any(one.kind == "shared" or (one.state_bytes and not states) for one in probe.layers)
    special |= len(layers_of(model)) != len(probe.layers)  # LongCat's layers attend twice
    return not (special or probe.passes_more)


def layers_of(model: Any) -> Any:
    """Return the decoder layers of a model, in order.

    Raises
    ------
    UnsupportedModelError
        If they are not in the usual place.
    """
    layers = decoder_layers(model)
    if layers is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps its decoder layers where kvalloc does not find them, so "
            "no loss can be measured on it"
        )
    return layers


class LayerInputs:
    """Inputs of each decoder layer in one forward, so that later forwards can begin at a layer."""

    def __init__(self, model: Any) -> None:
        self._layers, self._apart = layers_of(model), run_apart(model, states=True)
        self._entering: dict[Any, Tensor] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the inputs of the layers in a forward."""

        def record(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._entering[layer] = args[0] if args else kwargs["hidden_states"]

        with ExitStack() as stack:
            for layer in self._layers if self._apart else ():
                stack.callback(layer.register_forward_pre_hook(record, with_kwargs=True).remove)
            yield

    def begun(self, layer: int, n_rows: int) -> AbstractContextManager[None]:
        """Let forwards of ``rows`` copies of those tokens begin at a layer, if each runs apart."""
        if not self._apart:
            return nullcontext()
        hidden = self._entering[self._layers[layer]].repeat(n_rows, 1, 1)
        return begun_at(self._layers, layer, hidden)


@contextmanager
def begun_at(layers: Any, begin: int, hidden: Tensor) -> Iterator[None]:
    """Let the decoder begin at one layer, with known hidden states.

    It gets its tokens too: some models add their embeddings later.
    """

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
