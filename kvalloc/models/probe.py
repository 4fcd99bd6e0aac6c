"""A look at a model before it is used: one forward of a few tokens with a cache.

It shows how each layer rotates its queries, which heads each layer has, and whether each layer
attends, once in a forward, to exactly what its cache returned. Of a layer that does anything else,
nothing can be evicted or rounded: its answers would be wrong without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvalloc.errors import KVAllocError, UnsupportedModelError, one_line
from kvalloc.models.families import WITH_FULL_CACHE, cached_layers, layer_shapes
from kvalloc.models.names import cache_keyword
from kvalloc.models.rope import NO_ROTATION, Buffer, Rotation, rotation_of, why_fixed
from kvalloc.models.structure import (
    check_layers,
    context_limit,
    evaluating,
    input_device,
    text_config,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kvalloc.shape import LayerShape

_POSITIONS = (0, 1, 17, 200)
"""Positions of a probe: small ones for pairs that rotate fast, large ones for slow pairs."""

_TOKENS = (1, 2)
"""Tokens of a probe: two, because one may be the padding token, whose embedding is zero."""

_ONCE = (
    "kvalloc evicts and rounds what a cache stores, so each layer has to attend, once in a "
    f"forward, to what its cache returns; {WITH_FULL_CACHE}"
)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe has shown of a decoder.

    Attributes
    ----------
    rotations : dict of int to Rotation or str
        Of each layer that attends; a sentence if it is not known. It has no strong reference to
        the decoder.
    layers : tuple of LayerShape
        What each layer stores.
    n_query_heads : int
        Query heads of a layer that attends.
    final : bool
        Whether a later probe would find the same. Not if queries were zeros.
    """

    rotations: Mapping[int, Rotation | str] = field(default_factory=dict)
    layers: tuple[LayerShape, ...] = ()
    n_query_heads: int = 0
    final: bool = False

    @property
    def moves_queries(self) -> bool:
        """Return whether queries can be put elsewhere, in each layer that attends."""
        return all(why_fixed(one) is None for one in self.rotations.values())

    @property
    def knows_rotations(self) -> bool:
        """Return whether it is known how each layer that attends rotates, if it does."""
        return not any(isinstance(one, str) for one in self.rotations.values())

    @property
    def tables(self) -> set[int]:
        """Return the modules that have frequencies of the rotations, by `id`."""
        sources = [one.source for one in self.rotations.values() if isinstance(one, Rotation)]
        return {id(one.module()) for one in sources if isinstance(one, Buffer)}


def probe(
    decoder: Any,
    layers: Mapping[int, nn.Module],
    intercepting: Callable[[Callable[..., Any]], AbstractContextManager[None]],
    name: str,
) -> Probe:
    """Run a decoder over a few tokens, once, and return its findings.

    Parameters
    ----------
    decoder : nn.Module
        The model without its language-model head. Its own hooks are skipped, since they may be
        kvalloc's; hooks of its parts run, since they may load weights.
    layers : mapping of int to nn.Module
        The attention module of each layer.
    intercepting : callable
        Takes a handler of attention calls, and returns the ``with`` in which it is called.
    name : str
        Class of the model, for messages.

    Raises
    ------
    UnsupportedModelError
        If the model does not run, a layer attends to anything but what its cache returned, or not
        once in a forward.
    """
    seen, rotations = _Seen(dict(layers), cached_layers(decoder, name)), dict[int, Any]()
    try:
        with evaluating(decoder), intercepting(seen.attend):
            positions = _run(decoder, seen)
        several = bool(positions.any())
        for layer, states in seen.rotated.items():
            rotations[layer] = (
                rotation_of(seen.kind(layer), states, positions, decoder) if several else None
            )
    except KVAllocError:
        raise
    except Exception as error:  # models fail in any way
        seen.count()
        why = seen.fault or f"it raises {type(error).__name__}: {one_line(error)}"
        raise UnsupportedModelError(
            f"{name} does not run over a few tokens, which shows what its layers store: {why}; try "
            f"a newer transformers, or {WITH_FULL_CACHE}"
        ) from error
    if not seen.calls:
        why = "stores no keys and values, so nothing can be reduced"
        if seen.stored:
            why = "attends without transformers' attention interface, so kvalloc cannot see it"
        raise UnsupportedModelError(f"{name} {why}; {WITH_FULL_CACHE}")
    seen.count()
    if seen.fault is not None:
        raise UnsupportedModelError(f"{seen.fault}; {_ONCE}")
    if (last := max(seen.calls)) >= len(seen.layers):
        raise UnsupportedModelError(
            f"layer {last} of {name} attends, and its cache has {len(seen.layers)} layers; try a "
            f"newer transformers, or {WITH_FULL_CACHE}"
        )
    final = None not in rotations.values()
    if (fixed := _why_fixed(decoder, seen, rotations, positions)) is not None:
        rotations = dict.fromkeys(rotations, replace(NO_ROTATION, fixed=fixed))
    for layer, rotation in rotations.items():
        if rotation is None:
            why = "a probe finds zeros, no numbers, or a single position"
            rotations[layer] = f"it is not known when {seen.kind(layer)} rotates its queries: {why}"
    return Probe(
        rotations=rotations,
        layers=layer_shapes(decoder, seen.layers, seen.heads, seen.reads, seen.latents),
        n_query_heads=seen.n_query_heads,
        final=final,
    )


@dataclass
class _Seen:
    """What layers store and attend to in one forward.

    Attributes
    ----------
    modules : dict of int to nn.Module
        Each layer's attention.
    layers : list
        Of the cache.
    rotated : dict of int to Tensor
        Queries and new keys of the latest call of each layer, by head.
    values : dict of int to Tensor
        New values of that call.
    heads : dict of int to (int, int, int)
        KV heads, and numbers of a key and of a value, of each layer that stores entries.
    reads : dict of int to int
        Of each layer that attends to what another one's cache returned, which.
    latents : set of int
        Layers that expand what their cache returned.
    stored : dict of int to list
        What the cache returned, and copies of it, by layer.
    calls : dict of int to int
        Attention calls of each layer.
    fault : str or None
        The first thing that is wrong.
    """

    modules: dict[int, nn.Module]
    layers: list[Any]
    rotated: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    heads: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    latents: set[int] = field(default_factory=set)
    stored: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    n_query_heads: int = 0
    fault: str | None = None

    def kind(self, layer: int) -> str:
        """Return the class of a layer's attention."""
        return type(self.modules[layer]).__name__ if layer in self.modules else "the model"

    def cache(self) -> Any:
        """Return a plain cache, and note its updates."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        cache.layers, cache.layer_class_to_replicate = self.layers, None
        plain = cache.update

        def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            states = plain(keys, values, layer, *args, **kwargs)
            self.stored[layer].append((states, [copies.clone() for copies in states]))
            heads, dim = keys.shape[1::2]
            self.heads[layer] = heads, dim, values.shape[-1]
            return states

        cache.update = update
        return cache

    def attend(self, states: Any, compute: object) -> tuple[Tensor, None]:
        """Answer as attention to a single key does, which returns its value.

        A layer with sinks would compute something that depends on the position, too.
        """
        import torch

        layer, attended = states.layer, (states.keys, states.values)
        self.calls[layer] += 1
        mask = states.mask
        floats = getattr(mask, "is_floating_point", None)  # flex attention's has none
        biased = floats is not None and floats() and (mask * (mask > -1e4)).any()
        if self.fault is None and (states.biased or biased):
            self.fault = f"layer {layer} of {self.kind(layer)} adds numbers to its logits"
        self.n_query_heads, n_new = states.queries.shape[1:3]
        # there are others if a layer runs several times
        newest, values = states.keys[:, :, -n_new:], states.values[:, :, -n_new:]
        self.rotated[layer] = torch.cat([states.queries, newest], dim=1)
        self.values[layer] = values
        source = layer
        if layer not in self.stored:  # it may attend to what another layer stores
            source = next((i for i, one in self.stored.items() if one[-1][0][0] is states.keys), -1)
            if source >= 0:
                self.reads[layer] = source
        returned, copies = self.stored[source][-1] if source in self.stored else (attended,) * 2
        if states.latents is not None and layer in self.stored:
            self.latents.add(layer)
            attended = states.latents
        for name, now, was, copied in zip(
            ("keys", "values"), attended, returned, copies, strict=True
        ):
            if self.fault is None and not _is_same(now, was, copied):
                difference = f"{_size(now)}, stored are {_size(was)}"
                if now.shape == was.shape:
                    difference = "of the same size, changed or copied after they were stored"
                self.fault = f"layer {layer} of {self.kind(layer)} attends to other {name} than "
                self.fault += f"its cache returned: {difference}"
        group = self.n_query_heads // states.values.shape[1]
        return values.repeat_interleave(group, dim=1).transpose(1, 2).contiguous(), None

    def count(self) -> None:
        """Look whether each layer has stored and attended once."""
        for layer in sorted(self.calls.keys() | self.stored.keys()):
            calls, updates = self.calls[layer], len(self.stored[layer])
            expected = 1 - (layer in self.reads)
            if (calls, updates) != (1, expected):
                self.fault = (
                    f"layer {layer} of {self.kind(layer)} makes {calls} attention calls and "
                    f"{updates} updates of the cache in one forward, expected 1 and {expected}"
                )
                return


def _why_fixed(
    decoder: Any, seen: _Seen, rotations: Mapping[int, Any], positions: Tensor
) -> str | None:
    """Return why no rotation puts queries elsewhere, if positions come by other means."""
    name = type(decoder).__name__
    if [*rotations.values()] == [NO_ROTATION] * len(seen.layers):
        # a model of attention alone knows no other order: it takes positions from elsewhere
        return f"the queries of {name} are the same at all positions of a probe"
    if None in rotations.values():
        return None
    # no layer rotates its values: they change with what the first layer reads
    changes = (rotation_of(name, one, positions, decoder) for one in seen.values.values())
    if any(one not in (None, NO_ROTATION) for one in changes):
        return f"{name} has positions in its embeddings, and does not rotate by them"
    return None


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

    check_layers(decoder)
    device = input_device(decoder)
    device = torch.device("cpu") if device.type == "meta" else device  # a hook loads the weights
    n_positions = context_limit(decoder) or _POSITIONS[-1] + 1
    positions = torch.tensor(_POSITIONS, device=device).clamp(max=n_positions - 1)
    config = text_config(decoder)
    ids = torch.tensor(_TOKENS, device=device).clamp(max=config.vocab_size - 1)
    # a router of experts may draw random numbers
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        type(decoder).forward(
            decoder,
            input_ids=ids.repeat_interleave(len(positions))[:, None],
            position_ids=positions.repeat(len(ids))[:, None],
            use_cache=True,
            **cache_keyword(decoder, seen.cache()),
        )
    return positions
