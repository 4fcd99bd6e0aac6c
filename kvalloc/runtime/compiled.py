"""Compiled decoder: a graph decodes one token after a prompt."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from kvalloc.errors import UnsupportedRequestError
from kvalloc.models import names
from kvalloc.runtime.forwards import (
    INSTALLED,
    Installed,
    caches,
    hooked_cache,
    installed,
)

ATTENTION = "kvalloc_token"
"""Name of the attention of a compiled decoder."""

UNCOMPILED = (
    "with a kvalloc cache a graph holds one token that follows a complete prompt, without "
    "gradients; all else runs uncompiled: leave out fullgraph=True, or read the prompt with the "
    "model that is not compiled"
)


_UNSEEN = (torch.Tag.cudagraph_unsafe,)
"""Unseen effects of an operation change a cache and no argument, so no graph may repeat it."""


@torch.library.custom_op("kvalloc::begin", mutates_args=(), tags=_UNSEEN)
def _begin_token(number: Tensor, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Begin a forward; return its token, which orders operations, and the tokens seen."""
    cache, decoder = _cache_of(number)
    seen = cache.layers[0].get_seq_length()
    name = "inputs_embeds" if tokens.ndim > 2 else "input_ids"
    entry: Installed = vars(decoder)[INSTALLED]
    entry.close(completed=False)
    arguments = {name: tokens, "attention_mask": mask}
    entry.begin(decoder, cache, arguments, decoded=True)
    # filled there: a number of the host would be copied, for which it waits
    return tokens.clone(), torch.full((), seen, dtype=torch.long, device=tokens.device)


@_begin_token.register_fake
def _(number: Tensor, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tokens), tokens.new_empty((), dtype=torch.long)


@torch.library.custom_op("kvalloc::attend", mutates_args=(), tags=_UNSEEN)
def _attend_token(
    number: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scaling: float | None,
    softcap: float | None,
    sliding_window: int | None,
) -> Tensor:
    cache, decoder = _cache_of(number)
    entry: Installed = vars(decoder)[INSTALLED]
    forward = entry.open_forwards[threading.get_ident()]
    options = {"scaling": scaling, "softcap": softcap, "sliding_window": sliding_window}
    named = {name: one for name, one in options.items() if one is not None}
    query = query.clone()  # a cache may note it, and a compiler gives its storage to others
    try:
        keys, values = cache.update(key, value, layer)
        mask = _token_mask(decoder, query, keys, forward.mask)
        output, _ = entry.switch.answer(forward.attend, layer, query, keys, values, mask, **named)
    except BaseException:
        entry.close(completed=False)
        raise
    return output.to(query.dtype).contiguous()


@_attend_token.register_fake
def _(number: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


@torch.library.custom_op("kvalloc::end", mutates_args=(), tags=_UNSEEN)
def _end_token(number: Tensor, hidden: Tensor) -> Tensor:
    """End a forward, and return its last states."""
    _, decoder = _cache_of(number)
    vars(decoder)[INSTALLED].close(completed=True)
    return hidden.clone()


@_end_token.register_fake
def _(number: Tensor, hidden: Tensor) -> Tensor:
    return torch.empty_like(hidden)


def _cache_of(number: Tensor) -> tuple[Any, nn.Module]:
    cache = caches[int(number)]
    return cache, cache.decoder()


def _token_mask(decoder: nn.Module, query: Tensor, keys: Tensor, columns: Tensor | None) -> Any:
    if columns is None:
        return None
    function = names.mask_function(names.base_implementation(decoder.config))
    assert function is not None
    stored = int(keys.shape[2])
    shown = columns[:, -stored:].bool()
    place: dict[str, Any] = {"q_length": 1, "q_offset": stored - 1}
    if names.takes(function, names.COLUMN):
        place = {names.COLUMN: torch.full((1,), stored - 1, device=query.device)}
    return function(
        batch_size=int(query.shape[0]),
        kv_length=stored,
        # a reduced layer's kept entries are all shown
        attention_mask=torch.nn.functional.pad(shown, (stored - shown.shape[1], 0), value=True),
        allow_is_causal_skip=False,
        dtype=query.dtype,
        device=query.device,
        **place,
    )


class DecodedToken(Cache):
    """Cache of a compiled decoder, which stores nothing."""

    def __init__(self, cache: Any, seen: Tensor, implementation: str, argument: str) -> None:
        self.cache, self.seen = cache, seen
        self.implementation, self.argument = implementation, argument
        self.layers = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the arguments: `kvalloc::attend` adds them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the tokens seen."""
        return self.seen


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Answer a layer; its mask holds the cache's number."""
    output = torch.ops.kvalloc.attend(
        attention_mask, query, key, value, module.layer_idx, scaling, softcap, sliding_window
    )
    return output, None


def before_traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Decode one token after a prompt in the graph, which other forwards break."""
    cache = hooked_cache(args, kwargs)
    entry = installed(module)
    if cache is None:
        if entry is not None and entry.serving:
            names.break_graph(UNCOMPILED)
        return None
    if entry is None:
        return None
    if not entry.graphs:
        _refuse_graphs()
    tokens = kwargs.get("inputs_embeds")
    tokens = kwargs.get("input_ids") if tokens is None else tokens
    implementation, mask = names.base_implementation(module.config), kwargs.get("attention_mask")
    if (
        args
        or tokens is None
        or tokens.shape[1] != 1
        or not cache.prompt_complete
        or torch.is_grad_enabled()
        or implementation not in ("sdpa", "eager")
        or not entry.switch.renames
        or kwargs.get("use_cache") is False
        or kwargs.get("output_attentions")
        or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2))
        or not cache.traceable
    ):
        names.break_graph(UNCOMPILED)
    tokens, seen = torch.ops.kvalloc.begin(cache.number, tokens, mask)
    names.set_implementation(module.config, ATTENTION)
    changed = {
        "input_ids" if tokens.ndim == 2 else "inputs_embeds": tokens,
        "attention_mask": cache.number,
        entry.argument: DecodedToken(cache, seen, implementation, entry.argument),
    }
    if entry.column and kwargs.get(names.COLUMN) is None:  # Dynamo cannot count up to a tensor
        changed[names.COLUMN] = seen[None]
    return (), {**names.without_cache(kwargs), **changed}


def after_token(module: nn.Module, token: DecodedToken, output: Any) -> Any:
    """Restore the config's implementation and the output's cache."""
    names.set_implementation(module.config, token.implementation)
    if output is None:  # it failed
        return None
    hidden = torch.ops.kvalloc.end(token.cache.number, output[0])
    if isinstance(output, tuple):
        return hidden, *(token.cache if one is token else one for one in output[1:])
    output.last_hidden_state = hidden
    setattr(output, token.argument, token.cache)
    return output


def _refuse_graphs() -> None:
    raise UnsupportedRequestError(f"{names.compile_obstacle()}, or do not compile the model")


names.mark_constant(_refuse_graphs)
