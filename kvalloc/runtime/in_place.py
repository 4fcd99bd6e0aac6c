"""A decoded token that changes nothing but numbers in storage that is there: a CUDA graph's.

1. `storage`, after a token, on the host: whether the next one can be, and what it reads and writes.
   Where that is, `tables` says, and what is launched: one graph serves all that launch the same.
2. `count`, before it, on the host: counts it in each layer, and says on the device where it goes.
3. `decode`, in each layer, on the device alone: writes it, and attends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.attention.backends import chosen
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.kept import KeptLayer
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.prompt import Prompt
from kvalloc.runtime.tail import FIRST_TOKENS


@torch.no_grad()
def storage(prompt: Prompt) -> tuple[object, ...]:
    """Get ready for a token that is decoded in place; return what it reads and writes.

    Nothing where it is not to be: entries or states are not all there are, the prompt is held, its
    policy reads by the query, padding has followed, or an answer is so short that room to spare
    would take more than it.
    """
    layers, arrival = prompt.budget_layers, prompt.arrival
    tokens, every = layers[0].dense_tokens, prompt.schedule.every
    if (
        len(layers) < len(prompt.layers)
        or prompt.interrupted is not None
        or prompt.whole is not None
        or prompt.n_following <= FIRST_TOKENS
        or prompt.reader is not None
        or prompt.given is not None
        or not all(_is_ready(layer, tokens) for layer in layers)
        or not bool(arrival.visible[:, arrival.visible.shape[1] - tokens :].all())
    ):
        return ()
    interval, latest = prompt.interval(), 0
    if every is not None:
        due = arrival.settled + every.interval(arrival.settled, prompt.token_bytes)
        latest = max(min(prompt.wanted_following(due), due - arrival.settled), 1)
    found = [one for layer in layers for one in layer.reserve(interval, latest)]
    return tuple(found) if len({layer.unfinished.latest.taken for layer in layers}) == 1 else ()


def _is_ready(layer: BudgetLayer, tokens: int) -> bool:
    reads = layer.reduced and layer.attention is not None
    return reads and layer.dense_tokens == tokens


def count(prompt: Prompt) -> tuple[object, ...]:
    """Count a token that has begun in every layer; return what it reads and writes."""
    layers, forward = prompt.budget_layers, prompt.forward
    assert forward is not None
    found = tuple(one for layer in layers for one in layer.in_place())
    for layer in layers:
        layer.count(forward.step.columns)
    return found


def decode(
    layer: BudgetLayer, table: Tensor, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Write a token that was counted, and attend to all that a layer stores.

    Parameters
    ----------
    layer : BudgetLayer
    table : Tensor of int64, (n_places,)
        What `tables` gives of the layer, on the device.
    queries, keys, values : Tensor, (batch, n_heads, 1, head_dim)

    Returns
    -------
    Tensor, (batch, 1, n_query_heads, value_dim)
    """
    assert layer.entries is not None
    call, kept = _call(layer, queries), layer.entries.kept
    return chosen(call, kept).repeat(call, kept, (queries, keys, values), table)


def tables(prompt: Prompt) -> tuple[Hashable, list[list[int]]] | None:
    """Return what a token launches in all layers, and the numbers of each that this depends on.

    None where the same launches cannot serve other tokens.
    """
    keys, numbers = [], []
    for call, kept in _calls(prompt):
        if (found := chosen(call, kept).table(call, kept)) is None:
            return None
        keys.append(found[0])
        numbers.append(found[1])
    return tuple(keys), numbers


@torch.no_grad()
def warm_up(prompt: Prompt, handle: Tensor) -> None:
    """Attend once in each layer, so that whatever is compiled for it is there."""
    for index, (call, kept) in enumerate(_calls(prompt)):
        chosen(call, kept).repeat(call, kept, None, handle[0, 0, index])


def _calls(prompt: Prompt) -> Iterator[tuple[AttentionCall, KeptLayer]]:
    """Yield what a token of nothing asks of each layer, and what that keeps."""
    for layer in prompt.budget_layers:
        assert layer.attention is not None
        assert layer.entries is not None
        heads, head_dim = layer.attention.queries.shape[1::2]
        queries = layer.attention.queries.new_zeros(layer.batch, heads, 1, head_dim)
        yield _call(layer, queries), layer.entries.kept


def _call(layer: BudgetLayer, queries: Tensor) -> AttentionCall:
    assert layer.attention is not None
    states: AttentionStates = replace(
        layer.attention, queries=queries, keys=layer.keys, values=layer.values
    )
    call = AttentionCall.of(states, tail=layer.tail)
    return replace(call, latest=layer.latest_queries)
