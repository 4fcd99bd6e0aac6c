"""Predictions of a model that reads a text with K and V in formats of other engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.measure.engine_formats import gguf_order, round_trip
from kvalloc.measure.mini_prefill import begun_at, check_seen, layers_of, run_apart
from kvalloc.models.attention import AttentionStates, intercept_attention
from kvalloc.models.structure import evaluating, input_device

if TYPE_CHECKING:
    from kvalloc.accounting import FloatArray, IntArray
    from kvalloc.models.attention import Compute
    from kvalloc.shape import ModelShape

_WHOLE = -1
_SMALLEST = -1e30
"""In place of the log of 0, which no product with 0 bears."""


class FormatProbe:
    """The unchanged predictions of one text, and the harm of formats.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The same afterwards.
    token_ids : ndarray of int64, (n_tokens,)
        The text.
    names : sequence of str
        Formats.
    shape : ModelShape
        Of the model.

    Raises
    ------
    UnsupportedModelError
        If the model's decoder layers or their attention cannot be seen.
    """

    @torch.no_grad()
    def __init__(
        self, model: Any, token_ids: IntArray, names: Sequence[str], shape: ModelShape
    ) -> None:
        self._model, self._names, self._shape = model, names, shape
        self._ids = torch.from_numpy(token_ids)[None].to(input_device(model))
        self._layers, self._apart = layers_of(model), run_apart(model, states=True)
        self._entering: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers if self._apart else ()):
                hook = layer.register_forward_pre_hook(self._watch(index), with_kwargs=True)
                stack.callback(hook.remove)
            logits = self._logits(None, {"input_ids": self._ids})
        storing = [index for index, one in enumerate(shape.by_layer) if one.kv_heads]
        check_seen(model, storing, self._seen)
        self._full = _log_probabilities(logits)
        self._weights, self._best = self._full.exp(), logits.argmax(dim=-1)

    @torch.no_grad()
    def single(self, layer: int) -> dict[str, FloatArray]:
        """Return the losses of each prediction with K or V of one layer in each format.

        Returns
        -------
        dict
            ``kls``: KL(unchanged || formats), nats, (2, n_formats, n_tokens); 0 if the layer stores
            no K and V.
        """
        count = len(self._names)
        kls = np.zeros((2, count, self._ids.shape[1]))
        if not self._shape.by_layer[layer].kv_heads:
            return {"kls": kls}
        begun: AbstractContextManager[None] = nullcontext()
        inputs = {"input_ids": self._ids}
        if self._apart:
            entering = self._entering[layer]
            begun = begun_at(self._layers, layer, entering)
            inputs = {"inputs_embeds": entering}
        with begun:
            for side, index in np.ndindex(2, count):
                choices = np.full((self._shape.n_layers, 2), _WHOLE)
                choices[layer, side] = index
                kls[side, index] = self._divergences(self._logits(choices, inputs))
        return {"kls": kls}

    @torch.no_grad()
    def mixed(self, mixtures: IntArray) -> dict[str, FloatArray]:
        """Return the losses of each prediction with each mixture of formats in the whole cache.

        Parameters
        ----------
        mixtures : ndarray of int64, (n_mixtures, n_layers, 2)
            Index of the format of each layer's keys and values, -1 for 16 bits.

        Returns
        -------
        dict
            ``kls``: nats, (n_mixtures, n_tokens). ``agrees``: 1 where the most likely next token is
            the same.
        """
        kls, agrees = [], []
        for choices in mixtures:
            logits = self._logits(choices, {"input_ids": self._ids})
            kls.append(self._divergences(logits))
            agrees.append((logits.argmax(dim=-1) == self._best).double().cpu().numpy())
        return {"kls": np.stack(kls), "agrees": np.stack(agrees)}

    def _divergences(self, logits: Tensor) -> FloatArray:
        """Return the KL of each prediction.

        As `kvalloc.measure.kl.row_divergences` does, at a quarter of its time: a short text costs
        as much there as in the model.
        """
        terms = (self._full - _log_probabilities(logits)).mul_(self._weights)
        return terms.sum(dim=-1).double().cpu().numpy()

    def _logits(self, choices: IntArray | None, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits of a forward in which attention sees K and V in chosen formats."""

        def handler(states: AttentionStates, compute: Compute) -> tuple[Tensor, Tensor | None]:
            reads = self._shape.by_layer[states.layer].reads
            layer = states.layer if reads is None else reads
            self._seen.add(states.layer)
            keys, values = states.keys, states.values
            if choices is not None:
                key, value = choices[layer].tolist()
                if key != _WHOLE:
                    order = gguf_order(self._model, states.rotation, int(keys.shape[-1]))
                    keys = round_trip(keys, self._names[key], keys=True, order=order)
                if value != _WHOLE:
                    values = round_trip(values, self._names[value], keys=False)
            return compute(states.mask, keys, values)

        with evaluating(self._model), intercept_attention(self._model, handler):
            logits: Tensor = self._model(**inputs, use_cache=False).logits[0]
        return logits

    def _watch(self, index: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._entering[index] = args[0] if args else kwargs["hidden_states"]

        return hook


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1).clamp_(min=_SMALLEST)
