"""Interception of every layer's attention in a transformers model.

While an `AttentionSwitch` is on, attention modules hold a view of their config. In intercepted
forwards it names a wrapper in transformers' table of attention functions. Others, such as another
thread, read the config, which is never written to. A wrapper without a handler is bit-identical to
the model's implementation.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kvalloc.models.names import (
    EXPANSION,
    IMPLEMENTATION,
    LAYER,
    attention_function,
    base_implementation,
    register_implementation,
    takes,
)
from kvalloc.models.probe import Probe, probe
from kvalloc.models.rope import UNKNOWN
from kvalloc.models.structure import check_decoder_only, decoder_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kvalloc.accounting import IntArray
    from kvalloc.models.rope import Rotation

_PREFIX = "kvalloc_"

_HEAD = "head"
"""Key of the states of one KV head in `AttentionStates.shared`."""

_BY_KV_HEAD = ("keys", "values", "absent", "counts", "positions", "repeats")
"""Attributes of `AttentionStates` with KV heads as their second axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStates:
    """Queries, keys and values of one layer's attention.

    Attributes
    ----------
    layer : int
        Index in the model.
    queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
        Rotated to their positions.
    keys, values : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
        Old and new, keys rotated to their positions; not repeated for grouped queries.
    scaling : float
        Factor on the logits, normally ``head_dim ** -0.5``.
    mask : Tensor or None
        From transformers. None is causal for several new tokens; one sees everything.
    softcap : float or None
        Logits are ``softcap * tanh(logits / softcap)`` before the mask, as in Gemma 2.
    sink_logits : Tensor or None, (n_query_heads,)
        One more logit a query head, without a value, as in gpt-oss.
    output_projection : Tensor, (hidden_size, all query heads * head_dim), or callable, or None
        Weight for all heads, for any `first_head`; or a function that returns it (torch
        quantization). None if unreadable.
    rotation : Rotation
        Pairs of dimensions that the layer rotates (RoPE).
    observed : Observed or None
        Notes of `observe` on the prompt's earlier chunks; None for the first.
    older : int
        First queries that belong to earlier chunks.
    first_head : int
        First KV head, if heads are passed separately.
    gaps : bool
        Whether entries between the queries' tokens are evicted. Then the last keys are other
        tokens', and the mask tells which keys each query sees.
    displaced : bool
        Whether queries come after the newest token: without a mask, each sees every key.
    positions : Tensor of int32, (batch, n_kv_heads, n_tokens), or None
        Of each key; None for 0, 1, 2, ...
    later : Observed or None
        Notes about a second read; its columns may be by query head.
    absent : Tensor of bool, (batch, n_kv_heads, n_tokens), or None
        True at padding, which no query sees. Scorers that observe chunks get none.
    counts : Tensor of int64, (batch, n_kv_heads), or None
        Entries of each head, on the host, with `absent`.
    widths : ChosenWidths or None
        Of kept entries; None if they are not rounded.
    layers : tuple of int
        Layers with equal numbers of heads, passed as one; empty for one.
    latents : (Tensor, Tensor) or None
        Latents and their rotary keys, (batch, 1, n_tokens, dim) each. Keys are then both, values
        the latents, for all query heads; transformed queries give the layer's logits.
    latest : int
        Entries since the latest eviction.
    biased : bool
        Whether the layer adds to its logits, beside the mask.
    repeats : Tensor of int64, (batch, n_kv_heads, n_tokens), or None
        How often the text up to each entry occurs in its prompt.
    shared : dict
        Cached results; `replace` copies none.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    mask: Tensor | None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    output_projection: Tensor | Callable[[], Tensor] | None = None
    rotation: Rotation = UNKNOWN
    observed: Observed | None = None
    older: int = 0
    first_head: int = 0
    gaps: bool = False
    displaced: bool = False
    positions: Tensor | None = None
    later: Observed | None = None
    absent: Tensor | None = None
    counts: Tensor | None = None
    widths: ChosenWidths | None = None
    layers: tuple[int, ...] = ()
    latents: tuple[Tensor, Tensor] | None = None
    biased: bool = False
    latest: int = 0
    repeats: Tensor | None = None
    shared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def kv_head(self, head: int) -> AttentionStates:
        """Return one KV head with its query heads, without notes; always the same object."""
        if (known := self.shared.get((_HEAD, head))) is not None:
            return known  # type: ignore[no-any-return]
        n_heads = int(self.keys.shape[1])
        group = self.queries.shape[1] // n_heads
        mine, its = slice(head, head + 1), slice(head * group, (head + 1) * group)
        mask, layers = self.mask, self.layers or (self.layer,)
        place, head_in_layer = divmod(head, n_heads // len(layers))
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, its]
        parts: dict[str, Any] = {
            name: one[:, mine] for name in _BY_KV_HEAD if (one := getattr(self, name)) is not None
        }
        head_states = self.shared[_HEAD, head] = replace(
            self,
            **parts,
            queries=self.queries[:, its],
            mask=mask,
            sink_logits=None if self.sink_logits is None else self.sink_logits[its],
            layer=layers[place],
            layers=(),
            first_head=self.first_head + head_in_layer,
            observed=None,
            later=None,
            widths=None,
        )
        return head_states

    @classmethod
    def joined(cls, shown: Sequence[AttentionStates]) -> AttentionStates:
        """Join layers of equal sizes, without mask, notes or evicted entries, into one."""
        import torch

        heads: dict[str, Any] = {
            name: torch.cat([getattr(one, name) for one in shown], dim=1)
            for name in ("queries", "keys", "values", "repeats")
            if getattr(shown[0], name) is not None
        }
        sinks = [one.sink_logits for one in shown if one.sink_logits is not None]
        return replace(
            shown[0],
            **heads,
            sink_logits=torch.cat(sinks) if sinks else None,
            layers=tuple(one.layer for one in shown),
        )

    def unobserved(self) -> AttentionStates:
        """Return the states without the queries that `observed` counts."""
        if self.observed is None or not self.older:
            return self
        mask = None if self.mask is None else self.mask[:, :, self.older :]
        return replace(self, queries=self.queries[:, :, self.older :], mask=mask, older=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenWidths:
    """Bits of kept entries.

    Attributes
    ----------
    counts : mapping of int to ndarray of int64, (batch, n_kv_heads)
        Number of entries by width.
    of : Tensor of int16, (batch, n_kv_heads, n_tokens), or None
        Of each entry, 0 if evicted; None if each head has one for all.
    """

    counts: Mapping[int, IntArray]
    of: Tensor | None = None

    def of_places(self, heads: slice, places: Tensor) -> ChosenWidths:
        """Return the widths of some heads and tokens, (batch, n_heads, n_places)."""
        counts = {width: number[:, heads] for width, number in self.counts.items()}
        of = None if self.of is None else self.of[:, heads].gather(2, places)
        return ChosenWidths(counts=counts, of=of)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Notes of a scorer about earlier chunks of a prompt, for one layer.

    Attributes
    ----------
    n_tokens : int
        Prompt tokens seen so far.
    columns : Tensor or None, (batch, n_kv_heads, n_stored)
        One number an entry, which follows it in evictions and reorderings.
    totals : dict of Tensor, each (batch, ...)
        Sums over tokens, which no eviction changes.
    """

    n_tokens: int
    columns: Tensor | None = None
    totals: dict[str, Tensor] = field(default_factory=dict)

    def kept(self, indices: Tensor) -> Observed:
        """Return the notes after an eviction."""
        columns = None if self.columns is None else self.columns.gather(-1, indices)
        return replace(self, columns=columns)


AttentionResult: TypeAlias = "tuple[Tensor, Tensor | None]"


class Compute(Protocol):
    """Run of the model's attention of this layer with a mask.

    Other keys and values, (batch, n_kv_heads, n_read, head_dim), may replace the states' ones,
    except in a layer of latents.
    """

    def __call__(
        self, mask: Tensor | None, keys: Tensor | None = None, values: Tensor | None = None
    ) -> AttentionResult:
        """Return the attention output, and the weights if the implementation gives them."""


Handler: TypeAlias = Callable[[AttentionStates, Compute], AttentionResult]
"""``handler(states, compute)`` returns the result of the layer's attention."""


@dataclass(frozen=True, slots=True)
class _Active:
    handler: Handler
    switch: AttentionSwitch
    outer: _Active | None
    known: bool = False  # whether the handler knows the layers' weights and rotations


class _ConfigView:
    """A view of a module's config with another implementation for intercepted forwards.

    Copies, pickles, type and attributes are the config's.
    """

    def __init__(self, module: Any) -> None:
        self.__dict__.update(_viewed=module.config, _module_id=id(module), _users=0)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._viewed)

    def _implementation(self) -> str | None:
        name: str | None = getattr(self._viewed, IMPLEMENTATION)
        if _handler_of(self._module_id) is None:
            return name
        return _wrapper_name(name or "eager")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._viewed, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.getitem, ([self._viewed], 0)


# a property: Dynamo, which follows a compiled model into it, asks the class for it
setattr(_ConfigView, IMPLEMENTATION, property(_ConfigView._implementation))


_active: ContextVar[_Active | None] = ContextVar("kvalloc_attention", default=None)
# The layer that a shared module computes.
_called_layer: ContextVar[int | None] = ContextVar("kvalloc_layer", default=None)
# The latents that a layer has just expanded, with the `id` of its module.
_expanded: ContextVar[tuple[int, Tensor, Tensor] | None]
_expanded = ContextVar("kvalloc_expanded", default=None)
# Of each decoder: its attention modules, the probe of them that succeeded, and the module of each
# layer that it saw: layers, routers and others may have the index of the layer, too.
_probes: weakref.WeakKeyDictionary[
    nn.Module, tuple[object, Probe, weakref.WeakValueDictionary[int, Any]]
]
_probes = weakref.WeakKeyDictionary()
# The switch of each decoder, as long as a cache or somebody else holds it.
_switches: weakref.WeakKeyDictionary[nn.Module, weakref.ref[AttentionSwitch]]
_switches = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _lend(module: nn.Module) -> None:
    """Give a module its view of the config, or count a user."""
    attributes, kind = vars(module), type(module)
    view: Any = module.config
    if type(view) is not _ConfigView:
        view = _ConfigView(module)
        lent: dict[str, Any] = {"config": view}
        if hasattr(kind, EXPANSION):
            lent[EXPANSION] = partial(_expand, module)
        if takes(kind.forward, LAYER):
            lent["forward"] = partial(_call, module.forward)
        vars(view)["_before"] = {name: attributes.get(name) for name in lent}
        attributes.update(lent)  # a module takes long to be set anything
    vars(view)["_users"] += 1


def _take_back(module: nn.Module) -> None:
    attributes, view = vars(module), vars(module).get("config")
    if type(view) is not _ConfigView:  # somebody has set another config meanwhile
        return
    vars(view)["_users"] -= 1
    for name, before in view._before.items() if not view._users else ():
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a shared module, and note the layer that calls it."""
    token = _called_layer.set(kwargs.get(LAYER))
    try:
        return forward(*args, **kwargs)
    finally:
        _called_layer.reset(token)


def _expand(module: nn.Module, latents: Tensor, rotary: Tensor) -> Any:
    if _active.get() is not None:
        _expanded.set((id(module), latents, rotary))
    return getattr(type(module), EXPANSION)(module, latents, rotary)


def _matrices(module: Any, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return matrices from latents to keys and values, (1, n_query_heads, n, dim), and a bias."""
    import torch

    n, first = latents.shape[-1] + rotary.shape[-1], latents.shape[-1]
    basis = torch.eye(n + 1, n, dtype=latents.dtype, device=latents.device)[None, None]
    parts = (one.contiguous() for one in basis.tensor_split([first], dim=-1))
    states = getattr(module, EXPANSION)(*parts)
    keys, values = (one[:, :, :n] - one[:, :, n:] for one in states)
    return keys, values[:, :, :first], states[1][:, :, n:]


def _handler_of(module_id: int) -> _Active | None:
    active = _active.get()
    while active is not None and module_id not in active.switch.module_ids:
        active = active.outer
    return active


def intercept_attention(model: nn.Module, handler: Handler) -> AbstractContextManager[None]:
    """Let `handler` see and answer every attention call of `model` inside a ``with``.

    A module's innermost handler answers. Other threads are not intercepted.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Decoder-only, also without its head.
    handler : callable
        ``handler(states, compute)``: `states` is an `AttentionStates`, ``compute(mask)`` runs the
        layer's attention. It returns ``(output (batch, n_new_tokens, n_query_heads, head_dim),
        weights or None)``, so a handler that only reads ends with ``return compute(states.mask)``.

    Raises
    ------
    UnsupportedModelError
        As `AttentionSwitch`.
    """
    return AttentionSwitch(model).intercepting(handler)


class AttentionSwitch:
    """The reusable half of `intercept_attention`, with the facts about a model.

    Each `enter` needs one `leave`, in reverse order. The switch keeps parts of the model alive.

    Raises
    ------
    UnsupportedModelError
        If attention does not go through transformers' attention interface, or a layer attends to
        anything but its cache's output.
    """

    def __init__(self, model: nn.Module) -> None:
        decoder: nn.Module = decoder_of(model)
        check_decoder_only(model)
        modules: list[Any] = list(decoder.modules())
        self.module_ids = frozenset(map(id, modules))
        # modules that look their attention function up and pass themselves to it
        self._modules = [
            one
            for one in modules
            if LAYER in vars(one) and hasattr(getattr(one, "config", None), IMPLEMENTATION)
        ]
        self.renames = all(one.config is decoder.config for one in self._modules)
        parts = frozenset((id(one), type(one)) for one in self._modules)
        none = None, Probe(), weakref.WeakValueDictionary[int, Any]()
        known, self.probe, self.attention = _probes.get(decoder, none)
        if known != parts or not self.probe.tables <= self.module_ids:
            name = type(model).__name__
            self.probe = probe(decoder, self.attention, self.intercepting, name)
            if self.probe.final:
                _probes[decoder] = parts, self.probe, self.attention

    @classmethod
    def of(cls, model: nn.Module) -> AttentionSwitch:
        """Return a model's existing switch, or a new one."""
        decoder = decoder_of(model)
        switch = _switches.get(decoder, lambda: None)()
        if switch is None:
            switch = cls(model)
            if switch.probe.final:
                _switches[decoder] = weakref.ref(switch)
        return switch

    def answer(self, handler: Handler, layer: int, *states: Any, **kwargs: Any) -> AttentionResult:
        """Return a handler's answer for one layer, without interception.

        Other arguments, query, key, value and mask first, are an attention function's.
        """
        module = self.attention[layer]
        active = _Active(handler, self, None)
        return _answered(active, base_implementation(module.config), module, *states, **kwargs)

    def enter(self, handler: Handler, *, known: bool = False) -> Token[_Active | None]:
        """Switch interception on; return the token for `leave`.

        If `known`, states have no output projection, rotation or `biased`.
        """
        with _lock:
            for module in self._modules:
                _lend(module)
        return _active.set(_Active(handler, self, _active.get(), known))

    def leave(self, token: Token[_Active | None]) -> None:
        """Switch interception off."""
        with _lock:
            for module in self._modules:
                _take_back(module)
        with suppress(ValueError):
            # An interrupted notebook cell may be tidied up from another context; the one that
            # held the handler is gone then.
            _active.reset(token)

    @contextmanager
    def intercepting(self, handler: Handler) -> Iterator[None]:
        """Switch interception on inside a ``with``."""
        token = self.enter(handler)
        try:
            yield
        finally:
            self.leave(token)


def probe_of(model: nn.Module) -> Probe:
    """Return the probe of a model.

    Raises
    ------
    UnsupportedModelError
        As `AttentionSwitch`.
    """
    return AttentionSwitch.of(model).probe


def latent_states(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents and rotary keys as keys and values of `AttentionStates`."""
    import torch

    return torch.cat([latents, rotary], dim=-1), latents


@cache
def _wrapper_name(base: str) -> str:
    def attention(module: Any, *states: Any, **kwargs: Any) -> AttentionResult:
        if (active := _handler_of(id(module))) is not None:
            return _answered(active, base, module, *states, **kwargs)
        kind: Any = type(module)
        return attention_function(kind, base)(module, *states, **kwargs)

    register_implementation(_PREFIX + base, attention)
    return _PREFIX + base


def _answered(
    active: _Active,
    base: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *more: Any,  # dropout, if another package calls this one: kvpress wraps all implementations
    **kwargs: Any,
) -> AttentionResult:
    kind: Any = type(module)
    function = attention_function(kind, base)
    tensors = query, key, value, attention_mask
    states, to_values = _states(active, base, module, tensors, kwargs)
    computed: AttentionResult | None = None

    def compute(
        mask: Tensor | None, keys: Tensor | None = None, values: Tensor | None = None
    ) -> AttentionResult:
        nonlocal computed
        keys = key if keys is None else keys
        values = value if values is None else values
        # Flash attention reads its own name from the config again, to pick a kernel.
        token = _active.set(None)
        try:
            computed = function(module, query, keys, values, mask, *more, **kwargs)
        finally:
            _active.reset(token)
        return computed

    output, weights = active.handler(states, compute)
    if to_values is not None and (computed is None or output is not computed[0]):
        matrix, bias = to_values
        output = (output.transpose(1, 2) @ matrix + bias).transpose(1, 2).contiguous()
    return output, weights


def _states(
    active: _Active,
    base: str,
    module: Any,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    kwargs: dict[str, Any],
) -> tuple[AttentionStates, tuple[Tensor, Tensor] | None]:
    query, key, value, mask = tensors
    scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer = _called_layer.get()
    layer = int(module.layer_idx) if layer is None else layer
    details: dict[str, Any] = {}
    to_values: tuple[Tensor, Tensor] | None = None
    if not active.known:
        active.switch.attention[layer] = module
        details = {
            "output_projection": _output_projection(module, query.shape[1] * value.shape[-1]),
            "rotation": active.switch.probe.rotations.get(layer, UNKNOWN),
            "biased": any(getattr(one, "ndim", 0) == 4 for one in kwargs.values()),
        }
    if (expanded := _expanded.get()) is not None and expanded[0] == id(module):
        latents = expanded[1:]
        to_keys, matrix, bias = _matrices(module, *latents)
        to_values = matrix, bias
        _expanded.set(None)
        query, (key, value) = query @ to_keys.mT, latent_states(*latents)
        details |= {"latents": latents, "output_projection": None}
    states = AttentionStates(
        layer=layer,
        queries=query,
        keys=key,
        values=value,
        scaling=scaling,
        mask=mask,
        # sdpa knows neither, and says so: scores leave them out as well
        softcap=None if softcap is None or base == "sdpa" else float(softcap),
        sink_logits=None if base == "sdpa" else _sink_logits(module, kwargs),
        **details,
    )
    return states, to_values


def _sink_logits(module: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    logits = kwargs.get("s_aux")
    if logits is None:
        logits = getattr(module, "sinks", None)
    return None if logits is None else logits.reshape(-1)


def _output_projection(module: nn.Module, width: int) -> Tensor | Callable[[], Tensor] | None:
    weight: Any = getattr(getattr(module, "o_proj", None), "weight", None)
    return weight if callable(weight) or getattr(weight, "shape", ())[1:] == (width,) else None


def without_autocast(states: Tensor) -> AbstractContextManager[Any]:
    """Return a context on the device of `states` without rounded products."""
    import torch

    return torch.autocast(states.device.type, enabled=False)
