"""A look at a model before it is used: one forward of a few tokens with a cache.

It shows how each layer rotates its queries, which heads each layer has, and whether each layer
attends, once in a forward, to exactly what its cache returned. Of a layer that does anything else,
nothing can be evicted or rounded: its answers would be wrong without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvalloc.errors import UnsupportedModelError, one_line, warn_user
from kvalloc.models.names import cache_keyword
from kvalloc.models.rope import rotation_of
from kvalloc.models.structure import (
    Heads,
    configured_heads,
    context_limit,
    has_compiled_layers,
    input_device,
    text_config,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kvalloc.models.rope import Rotation

_POSITIONS = (0, 1, 17, 200)
"""Positions of a probe: small ones for pairs that rotate fast, large ones for slow pairs."""

_TOKENS = (1, 2)
"""Tokens of a probe: two, because one may be the padding token, whose embedding is zero."""

_ONCE = (
    "kvalloc evicts and rounds what a cache stores, so each layer has to attend, once in a "
    "forward, to what its cache returns; use this model with its full cache"
)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe has shown of a decoder.

    Attributes
    ----------
    rotations : dict of int to Rotation
        By layer. It has no strong reference to the decoder.
    heads : dict of int to Heads
        Heads that each layer asks with and stores. Empty if they were not seen.
    final : bool
        Whether a later probe would find the same. Not if the forward failed, queries were zeros,
        or the model is in training mode.
    """

    rotations: Mapping[int, Rotation]
    heads: Mapping[int, Heads]
    final: bool

    @property
    def tables(self) -> set[int]:
        """Return the modules that have frequencies of the rotations, by `id`."""
        return {id(one[0]()) for one in self.rotations.values() if not isinstance(one, str)}


def probe(
    decoder: Any,
    layers: Mapping[int, nn.Module],
    intercepting: Callable[[Callable[..., Any]], AbstractContextManager[None]],
) -> Probe:
    """Run a decoder over a few tokens, once, and return its findings.

    Warns if the forward fails, since policies that rotate queries are then not used.

    Parameters
    ----------
    decoder : nn.Module
        The model without its language-model head. Its own hooks are skipped, since they may be
        kvalloc's; hooks of its parts run, since they may load weights.
    layers : mapping of int to nn.Module
        The attention module of each layer.
    intercepting : callable
        Takes a handler of attention calls, and returns the ``with`` in which it is called.

    Raises
    ------
    UnsupportedModelError
        If a layer attends to anything but what its cache returned, or not once in a forward.
    """
    seen = _Seen({layer: type(module).__name__ for layer, module in layers.items()})
    rotations: dict[int, Any] = {}
    failure = ""
    try:
        with intercepting(seen.attend):
            positions = _run(decoder, seen)
        for layer in seen.queries.keys() & layers.keys():
            # dropout may change its queries then
            kind = seen.kinds[layer] + " in training mode" * decoder.training
            rotations[layer] = rotation_of(kind, seen.queries[layer], positions, decoder)
    except Exception as error:  # models fail in any way
        failure = f"a probe raises {type(error).__name__}: {one_line(error)}"
    # gradient checkpointing takes the cache away from a model in training
    complete = not failure and bool(seen.stored or not decoder.training)
    if complete or (failure and max(seen.calls.values(), default=0) > 1):
        seen.count()
    if seen.fault is not None:
        raise UnsupportedModelError(f"{seen.fault}; {_ONCE}")
    if failure:
        warn_user(f"it is not known how {type(decoder).__name__} rotates its queries: {failure}")
    final = not (failure or decoder.training or None in rotations.values())
    for layer, kind in seen.kinds.items():
        if failure or rotations.get(layer) is None:
            zeros = "a probe finds zeros or no numbers"
            why = failure or (zeros if layer in rotations else "a probe calls no attention of it")
            rotations[layer] = f"it is not known when {kind} rotates its queries: {why}"
    return Probe(rotations=rotations, heads=seen.heads if complete else {}, final=final)


def check_heads(decoder: Any, heads: Mapping[int, Heads]) -> None:
    """Refuse a model with other heads than its config says: bytes are counted by the config.

    Raises
    ------
    UnsupportedModelError
        Names the first layer that differs.
    """
    configured = configured_heads(decoder)
    layer = next((layer for layer in sorted(heads) if heads[layer] != configured), None)
    if layer is None:
        return
    seen = heads[layer]
    way_out = (
        "kvalloc works on models with the same heads in every layer, and keys and values of one "
        "size"
    )
    if {*heads.values()} == {Heads(configured.queries, seen.kv, seen.key_dim, seen.key_dim)}:
        way_out = f"set its num_key_value_heads to {seen.kv} and its head_dim to {seen.key_dim}"
    raise UnsupportedModelError(
        f"layer {layer} of {type(decoder).__name__} has {seen.differences(configured)}, but the "
        f"config says {configured.differences(seen)}; {way_out}"
    )


@dataclass
class _Seen:
    """What layers store and attend to in one forward.

    Attributes
    ----------
    kinds : dict of int to str
        Class of each layer's attention.
    queries : dict of int to Tensor
        Of the latest call of each layer.
    heads : dict of int to Heads
    stored : dict of int to list
        What the cache returned, and copies of it, by layer.
    calls : dict of int to int
        Attention calls of each layer.
    fault : str or None
        The first thing that is wrong.
    """

    kinds: dict[int, str]
    queries: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, Heads] = field(default_factory=dict)
    stored: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    fault: str | None = None

    def cache(self, config: Any) -> Any:
        """Return a plain cache, and note its updates."""
        from transformers import DynamicCache

        cache: Any = DynamicCache(config=config)
        plain = cache.update

        def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            states = plain(keys, values, layer, *args, **kwargs)
            self.stored[layer].append((states, [copies.clone() for copies in states]))
            return states

        cache.update = update
        return cache

    def attend(self, states: Any, compute: object) -> tuple[Tensor, None]:
        """Answer as attention to a single key does, which returns its value.

        A layer with sinks would compute something that depends on the position, too.
        """
        layer, attended = states.layer, (states.keys, states.values)
        self.calls[layer] += 1
        self.queries[layer] = states.queries
        returned, copies = self.stored[layer][-1] if layer in self.stored else (attended, attended)
        for name, now, was, copied in zip(
            ("keys", "values"), attended, returned, copies, strict=True
        ):
            if self.fault is None and not _is_same(now, was, copied):
                difference = f"{_size(now)}, stored are {_size(was)}"
                if now.shape == was.shape:
                    difference = "of the same size, changed or copied after they were stored"
                kind = self.kinds.get(layer)
                self.fault = f"layer {layer} of {kind} attends to other {name} than its cache "
                self.fault += f"returned: {difference}"
        n_query_heads, n_new = states.queries.shape[1:3]
        n_kv_heads, key_dim = returned[0].shape[1::2]
        self.heads[layer] = Heads(n_query_heads, n_kv_heads, key_dim, returned[1].shape[-1])
        group = n_query_heads // states.values.shape[1]
        newest = states.values[:, :, -n_new:]  # there are others if a layer runs several times
        return newest.repeat_interleave(group, dim=1).transpose(1, 2).contiguous(), None

    def count(self) -> None:
        """Look whether each layer has stored and attended once."""
        for layer in sorted(self.calls.keys() | self.stored.keys()):
            calls, updates = self.calls[layer], len(self.stored[layer])
            if (calls, updates) != (1, 1):
                kind = self.kinds.get(layer, "the model")
                self.fault = (
                    f"layer {layer} of {kind} makes {calls} attention calls and {updates} updates "
                    "of the cache in one forward, expected 1 and 1"
                )
                return


def _is_same(states: Tensor, returned: Tensor, copy: Tensor) -> bool:
    """Return whether attention is given what the cache returned, and nobody wrote to it."""
    same = states is returned or states.is_set_to(returned)
    return same and not float((states - copy).abs().nansum())


def _size(states: Tensor) -> str:
    return f"{states.shape[1]} heads of {states.shape[-1]} numbers"


def _run(decoder: Any, seen: _Seen) -> Tensor:
    """Run a decoder over a few tokens at several positions, and return the positions.

    Each token is a row of its own. Its queries then depend on the token and the position alone,
    even if attention, a convolution or a recurrence mixes the tokens of a row.
    """
    import torch

    if has_compiled_layers(decoder):
        raise UnsupportedModelError("its layers are compiled")
    device = input_device(decoder)
    device = torch.device("cpu") if device.type == "meta" else device  # a hook loads the weights
    n_positions = context_limit(decoder) or _POSITIONS[-1] + 1
    if n_positions == 1:
        raise UnsupportedModelError("its context has a single position")
    positions = torch.tensor(_POSITIONS, device=device).clamp(max=n_positions - 1)
    config = text_config(decoder)
    ids = torch.tensor(_TOKENS, device=device).clamp(max=config.vocab_size - 1)
    # a model in training, or a router of experts, may draw random numbers
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        type(decoder).forward(
            decoder,
            input_ids=ids.repeat_interleave(len(positions))[:, None],
            position_ids=positions.repeat(len(ids))[:, None],
            use_cache=not decoder.training,  # some say that it goes badly with checkpointing
            **cache_keyword(decoder, seen.cache(config)),
        )
    return positions
