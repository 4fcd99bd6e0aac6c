"""Probe of a model: one forward of a few tokens with a cache.

It shows each layer's rotation and heads, and whether it attends once to exactly its cache's output.
Else, answers with evicted or rounded entries would be silently wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvalloc.errors import KVAllocError, UnsupportedModelError, one_line
from kvalloc.models.families import WITH_FULL_CACHE, cached_layers, layer_shapes
from kvalloc.models.names import cache_keyword
from kvalloc.models.rope import NO_ROTATION, UNKNOWN, Buffer, Rotation, layer_rotation, rotation_of
from kvalloc.models.structure import (
    check_layers,
    context_limit,
    decoder_layers,
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
"""Tokens of a probe: two, because one may be the padding token with the embedding zero."""

_ONCE = (
    "kvalloc evicts and rounds what a cache stores, so each layer has to attend, once in a "
    f"forward, to what its cache returns; {WITH_FULL_CACHE}"
)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Findings about a decoder.

    Attributes
    ----------
    rotations : dict of int to Rotation
        Of each layer that attends, without a strong reference to the decoder.
    passes_more : bool
        Whether decoder layers return more than hidden states.
    final : bool
        Whether a later probe would find the same.
    """

    rotations: Mapping[int, Rotation] = field(default_factory=dict)
    layers: tuple[LayerShape, ...] = ()
    n_query_heads: int = 0
    passes_more: bool = False
    final: bool = False

    @property
    def moves_queries(self) -> bool:
        """Whether all layers' queries can be rotated to other positions."""
        return all(one.fixed is None for one in self.rotations.values())

    @property
    def knows_rotations(self) -> bool:
        """Whether all rotations are known."""
        return all(one.known for one in self.rotations.values())

    @property
    def tables(self) -> set[int]:
        """Modules with frequencies of the rotations, by `id`."""
        used = [(one.source, *(one.scales or ())) for one in self.rotations.values()]
        return {id(one.module()) for one in chain(*used) if isinstance(one, Buffer)}


def probe(
    decoder: Any,
    layers: Mapping[int, nn.Module],
    intercepting: Callable[[Callable[..., Any]], AbstractContextManager[None]],
    name: str,
) -> Probe:
    """Probe a decoder by a few tokens.

    Its own hooks, maybe kvalloc's, are skipped; hooks of its parts, which may load weights, run.
    `layers` receives each layer's attention; `intercepting` takes a handler and returns its
    context.

    Raises
    ------
    UnsupportedModelError
        If the model does not run, or a layer does not attend exactly once to its cache's output.
    """
    seen = _Seen(decoder, layers, cached_layers(decoder, name))
    try:
        with evaluating(decoder), intercepting(seen.attend):
            positions = _run(decoder, seen)
        rotations, final = _rotations(seen, positions)
    except KVAllocError:
        raise
    except Exception as error:  # models fail in any way
        raised = f"it raises {type(error).__name__}: {one_line(error)}"
        why = next(iter(seen.faults), raised)
        raise UnsupportedModelError(
            f"{name} does not run over a few tokens, which shows what its layers store: {why}; try "
            f"a newer transformers, or {WITH_FULL_CACHE}"
        ) from error
    if not seen.calls:
        why = "stores no keys and values, so nothing can be reduced"
        if seen.stored:
            why = "attends without transformers' attention interface, so kvalloc cannot see it"
        raise UnsupportedModelError(f"{name} {why}; {WITH_FULL_CACHE}")
    if (fault := seen.fault()) is not None:
        raise UnsupportedModelError(f"{fault}; {_ONCE}")
    if (last := max(seen.latest)) >= len(seen.layers):
        raise UnsupportedModelError(
            f"layer {last} of {name} attends, and its cache has {len(seen.layers)} layers; try a "
            f"newer transformers, or {WITH_FULL_CACHE}"
        )
    sizes = {
        layer: {"kv_heads": k.shape[1], "key_dim": k.shape[-1], "value_dim": v.shape[-1]}
        for layer, updates in seen.stored.items()
        for (k, v), _ in updates
    }
    latents = {states.layer for states in seen.calls if states.latents is not None}
    return Probe(
        rotations=rotations,
        layers=layer_shapes(decoder, seen.layers, sizes, seen.reads, latents),
        n_query_heads=seen.calls[-1].queries.shape[1],
        passes_more=any(isinstance(one, tuple) and len(one) > 1 for one in seen.returned),
        final=final,
    )


@dataclass
class _Seen:
    """Stored entries and attention calls of one forward.

    `reads` has the source of other layers' entries, `stored` the cache's outputs with copies.
    """

    decoder: Any
    modules: Mapping[int, nn.Module]
    layers: list[Any]
    calls: list[Any] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)
    stored: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    faults: list[str] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)

    @property
    def latest(self) -> dict[int, Any]:
        return {states.layer: states for states in self.calls}

    def module(self, layer: int) -> nn.Module:
        return self.modules.get(layer, self.decoder)

    def kind(self, layer: int) -> str:
        return type(self.module(layer)).__name__

    def cache(self) -> Any:
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        cache.layers, cache.layer_class_to_replicate = self.layers, None
        plain = cache.update

        def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            states = plain(keys, values, layer, *args, **kwargs)
            self.stored[layer].append((states, [copies.clone() for copies in states]))
            return states

        cache.update = update
        return cache

    def attend(self, states: Any, compute: object) -> tuple[Tensor, None]:
        """Answer with the only key's value, also if the layer has sinks; note faults."""
        layer, mask = states.layer, states.mask
        self.calls.append(states)
        floats = getattr(mask, "is_floating_point", None)  # flex attention's has none
        biased = floats is not None and floats() and (mask * (mask > -1e4)).any()
        name = f"layer {layer} of {self.kind(layer)}"
        if states.biased or biased:
            self.faults.append(f"{name} adds numbers to its logits")
        source = layer
        if layer not in self.stored:  # it may attend to what another layer stores
            source = next((i for i, one in self.stored.items() if one[-1][0][0] is states.keys), -1)
            if source >= 0:
                self.reads[layer] = source
        attended = states.latents or (states.keys, states.values)
        returned, copies = self.stored[source][-1] if source in self.stored else (attended,) * 2
        triples = zip(attended, returned, copies, strict=True)
        for part, (now, was, copied) in zip(("keys", "values"), triples, strict=True):
            if not _is_same(now, was, copied):
                difference = f"{_size(now)}, stored are {_size(was)}"
                if now.shape == was.shape:
                    difference = "of the same size, changed or copied after they were stored"
                difference = f"than its cache returned: {difference}"
                self.faults.append(f"{name} attends to other {part} {difference}")
        group = states.queries.shape[1] // states.values.shape[1]
        values = _newest(states.values).repeat_interleave(group, dim=1)
        return values.transpose(1, 2).contiguous(), None

    def fault(self) -> str | None:
        """Return a sentence on a layer that has not stored and attended once, or a fault."""
        calls = Counter(states.layer for states in self.calls)
        for layer in sorted(calls.keys() | self.stored.keys()):
            updates, expected = len(self.stored[layer]), 1 - (layer in self.reads)
            if (calls[layer], updates) != (1, expected):
                return (
                    f"layer {layer} of {self.kind(layer)} makes {calls[layer]} attention calls and "
                    f"{updates} updates of the cache in one forward, expected 1 and {expected}"
                )
        return next(iter(self.faults), None)


def _rotations(seen: _Seen, positions: Tensor) -> tuple[dict[int, Rotation], bool]:
    decoder, name = seen.decoder, type(seen.decoder).__name__
    rotations, final, fixed = dict[int, Rotation](), True, None
    for layer, states in seen.latest.items():
        module, keys = seen.module(layer), _newest(states.keys)
        rotation = layer_rotation(module, states.queries, keys, positions, decoder)
        if rotation is None:
            why = "a probe finds zeros, no numbers, or a single position"
            why = f"it is not known when {seen.kind(layer)} rotates its queries: {why}"
            rotation, final = replace(UNKNOWN, fixed=why), False
        rotations[layer] = rotation
    # no layer rotates its values: they change with what the first layer reads
    changes = (
        rotation_of(name, _newest(one.values), positions, decoder) for one in seen.latest.values()
    )
    if [*rotations.values()] == [NO_ROTATION] * len(seen.layers):
        # a model of attention alone knows no other order: it takes positions from elsewhere
        fixed = f"the queries of {name} are the same at all positions of a probe"
    elif final and any(one not in (None, NO_ROTATION) for one in changes):
        fixed = f"{name} has positions in its embeddings, and does not rotate by them"
    if fixed is not None:
        rotations = dict.fromkeys(rotations, replace(NO_ROTATION, fixed=fixed))
    return rotations, final


def _newest(states: Tensor) -> Tensor:
    """Return the latest states: a layer that runs several times has others."""
    return states[:, :, -1:]


def _is_same(states: Tensor, returned: Tensor, copy: Tensor) -> bool:
    same = states is returned or states.is_set_to(returned)
    return same and not float((states - copy).abs().nansum())


def _size(states: Tensor) -> str:
    return f"{states.shape[1]} heads of {states.shape[-1]} numbers"


def _run(decoder: Any, seen: _Seen) -> Tensor:
    """Run a decoder over a few tokens at several positions, one a row; return the positions."""
    import torch

    check_layers(decoder)
    device = input_device(decoder)
    device = torch.device("cpu") if device.type == "meta" else device  # a hook loads the weights
    n_positions = context_limit(decoder) or _POSITIONS[-1] + 1
    positions = torch.tensor(_POSITIONS, device=device).clamp(max=n_positions - 1)
    config = text_config(decoder)
    ids = torch.tensor(_TOKENS, device=device).clamp(max=config.vocab_size - 1)
    hooks = ExitStack()
    for layer in decoder_layers(decoder) or ():
        handle = layer.register_forward_hook(lambda *call: seen.returned.append(call[-1]))
        hooks.callback(handle.remove)
    # a router of experts may draw random numbers
    drawn = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with hooks, torch.no_grad(), drawn:
        type(decoder).forward(
            decoder,
            input_ids=ids.repeat_interleave(len(positions))[:, None],
            position_ids=positions.repeat(len(ids))[:, None],
            use_cache=True,
            **cache_keyword(decoder, seen.cache()),
        )
    return positions
