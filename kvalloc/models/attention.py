"""See, and if wanted replace, what every attention layer of a transformers model computes.

Profiling needs a layer's queries, keys and values; the runtime needs to change a layer's mask.
Both go through one door: the table of attention functions that transformers itself offers for
adding implementations. No module is patched, nothing is registered at import, and a model is
touched only while a ``with`` is open: its config then names a wrapper of the implementation that
it had, and names the old one again afterwards. With no handler the wrapper calls the old
implementation with the very same arguments, so the result is bit-identical.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.rope import layer_frequencies
from kvalloc.models.structure import check_decoder_only, decoder_of

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "AttentionStates",
    "AttentionSwitch",
    "Compute",
    "Handler",
    "Observed",
    "base_implementation",
    "intercept_attention",
]

_PREFIX = "kvalloc_"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStates:
    """What one layer's attention sees.

    Attributes
    ----------
    layer : int
        Index of the layer in the model.
    queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
        Queries of the new tokens, with their positions applied.
    keys : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
        All keys, old and new, with their positions applied, not repeated for grouped queries.
    values : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
        All values, old and new, not repeated for grouped queries.
    scaling : float
        Factor on the logits, normally ``head_dim ** -0.5``.
    mask : Tensor or None
        The mask that transformers passed. None means causal for several new tokens and "sees
        everything" for one.
    softcap : float or None
        The logits are ``softcap * tanh(logits / softcap)`` before the mask, as in Gemma 2.
    sink_logits : Tensor or None, (n_query_heads,)
        One more logit a query head that takes part in the softmax and has no value, as in gpt-oss.
    output_projection : Tensor, (hidden_size, all query heads * head_dim), or callable, or None
        Weight of the layer's output projection, of all heads also where `first_head` is not 0; or
        what returns it, for a layer that torch has quantized. None where there is none that can
        be read.
    frequencies : Tensor, (n_rotated / 2,), or str
        RoPE inverse frequencies: the angle per position of each rotated pair (i, i + n_rotated / 2)
        of a head's dimensions, in radians. A sentence where the layer does not rotate its queries
        in this way, or where that is not known.
    observed : Observed or None
        What the scorer's `observe` left of the earlier chunks of this prompt; None for the first.
    first_head : int
        Which KV head of the layer is the first one here: not 0 where heads are shown one by one.
    gaps : bool
        Whether entries between those of the queries' own tokens are gone, so that the last keys
        are not theirs; the mask tells which keys each query sees.
    later : mapping to Observed, or None
        What scorers noted of tokens after the prompt, by their `later_key`; its columns may be
        those of all query heads.
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
    frequencies: Tensor | str = "it is not known when the model does so"
    observed: Observed | None = None
    first_head: int = 0
    gaps: bool = False
    later: Mapping[Hashable, Observed] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What a scorer has seen of the chunks of a prompt that came before, for one layer.

    It belongs to the cache, so that scorers hold nothing between calls.

    Attributes
    ----------
    n_tokens : int
        Tokens of the prompt seen so far.
    columns : Tensor or None, (batch, n_kv_heads, n_stored)
        One number an entry: follows the entry where entries are evicted or rows reordered.
    totals : dict of Tensor, each (batch, ...)
        Sums over tokens, which no eviction changes.
    """

    n_tokens: int
    columns: Tensor | None = None
    totals: dict[str, Tensor] = field(default_factory=dict)

    def kept(self, indices: Tensor) -> Observed:
        """The same after an eviction.

        Parameters
        ----------
        indices : Tensor of int64, (batch, n_kv_heads, n_kept)
            Stored entries that stay.
        """
        columns = None if self.columns is None else self.columns.gather(-1, indices)
        return replace(self, columns=columns)

    def rows(self, indices: Tensor) -> Observed:
        """The same for other rows of the batch, ``(n_rows,)``."""
        columns = None if self.columns is None else self.columns[indices.to(self.columns.device)]
        totals = {name: total[indices.to(total.device)] for name, total in self.totals.items()}
        return replace(self, columns=columns, totals=totals)


AttentionResult: TypeAlias = "tuple[Tensor, Tensor | None]"


class Compute(Protocol):
    """Runs the model's own attention of this layer with that mask.

    Over all the keys and values of the states, or over others: those of some entries, each
    (batch, n_kv_heads, n_read, head_dim).
    """

    def __call__(
        self, mask: Tensor | None, keys: Tensor | None = None, values: Tensor | None = None
    ) -> AttentionResult:
        """Return the attention output, and the weights where the implementation gives them."""


Handler: TypeAlias = Callable[[AttentionStates, Compute], AttentionResult]
"""``handler(states, compute)`` returns what the layer's attention returns."""


@dataclass(frozen=True, slots=True)
class _Active:
    """One open interception.

    Modules are told apart by identity, so that a second model that runs inside the ``with`` of
    the first is left alone.
    """

    handler: Handler
    module_ids: frozenset[int]
    rotary: nn.Module | None
    outer: _Active | None


@dataclass(slots=True)
class _Switched:
    """A config that names a wrapper at the moment, and how many interceptions want it so."""

    config: Any
    base: str
    count: int


_active: ContextVar[_Active | None] = ContextVar("kvalloc_attention", default=None)
# A count a config, not a saved name an interception: with threads or nesting, the second one
# to enter must not take the wrapper for the model's own implementation, nor may the first one
# to leave switch the second one off.
_switched: dict[int, _Switched] = {}
_lock = threading.Lock()


@contextmanager
def intercept_attention(model: nn.Module, handler: Handler) -> Iterator[None]:
    """Let `handler` see and answer every attention call of `model` while the ``with`` is open.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder-only model, with or without its language-model head.
    handler : callable
        ``handler(states, compute)``; `states` is an `AttentionStates`, ``compute(mask)`` runs
        the layer's own attention (sdpa, eager, flash, ...) and returns
        ``(output (batch, n_new_tokens, n_query_heads, head_dim), weights or None)``. Whatever
        the handler returns is what the layer goes on with, so a handler that only looks ends
        with ``return compute(states.mask)``.

    Raises
    ------
    UnsupportedModelError
        If the model's attention does not go through transformers' attention interface.

    Notes
    -----
    Nested use is safe: the innermost handler for a module answers, and leaving the inner
    ``with`` brings back the outer handler. Handlers are found through a context variable, so
    another thread that runs the same model meanwhile is not intercepted.
    """
    switch = AttentionSwitch(model)
    token = switch.enter(handler)
    try:
        yield
    finally:
        switch.leave(token)


class AttentionSwitch:
    """The reusable half of `intercept_attention`: what has to be found out once for a model.

    Entering costs a few dictionary look-ups, which matters where it happens for every generated
    token. Each `enter` must be answered by one `leave`, in reverse order.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder-only model. The switch keeps its configs and its table of angles alive, not the
        model.

    Raises
    ------
    UnsupportedModelError
        If the model's attention does not go through transformers' attention interface.
    """

    def __init__(self, model: nn.Module) -> None:
        decoder: nn.Module = decoder_of(model)
        _check_goes_through_interface(model, decoder)
        self._module_ids = frozenset(id(module) for module in decoder.modules())
        configs = {
            id(module.config): module.config
            for module in decoder.modules()
            if hasattr(getattr(module, "config", None), "_attn_implementation")
        }
        self._configs: tuple[Any, ...] = tuple(configs.values())
        self._rotary: nn.Module | None = getattr(decoder, "rotary_emb", None)

    def enter(self, handler: Handler) -> Token[_Active | None]:
        """Switch interception on; returns what `leave` needs."""
        token = _active.set(_Active(handler, self._module_ids, self._rotary, _active.get()))
        try:
            with _lock:
                for config in self._configs:
                    _switch_on(config)
        except BaseException:
            _active.reset(token)
            raise
        return token

    def leave(self, token: Token[_Active | None]) -> None:
        """Switch interception off again."""
        with _lock:
            for config in self._configs:
                _switch_off(config)
        with suppress(ValueError):
            # An interrupted notebook cell may be tidied up from another context; the one that
            # held the handler is gone then.
            _active.reset(token)


def base_implementation(config: Any) -> str:
    """Name of the attention implementation behind a possible wrapper, e.g. ``"sdpa"``.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The config that the model's attention modules hold.
    """
    name: str | None = config._attn_implementation
    return "eager" if name is None else name.removeprefix(_PREFIX)


def _check_goes_through_interface(model: nn.Module, decoder: nn.Module) -> None:
    check_decoder_only(model)
    if not getattr(decoder, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"the attention of {type(model).__name__} does not go through transformers' attention "
            "interface, so kvalloc cannot see it; use a model class that supports attention "
            "backends."
        )


def _switch_on(config: Any) -> None:
    entry = _switched.get(id(config))
    if entry is not None:
        entry.count += 1
        return
    base = base_implementation(config)
    _set_implementation(config, _register(base))
    _switched[id(config)] = _Switched(config, base, 1)


def _switch_off(config: Any) -> None:
    entry = _switched.get(id(config))
    if entry is None:
        return
    entry.count -= 1
    if entry.count > 0:
        return
    del _switched[id(config)]
    # Someone who chose another implementation inside the `with` meant it: leave it alone.
    if config._attn_implementation == _PREFIX + entry.base:
        _set_implementation(config, entry.base)


def _set_implementation(config: Any, name: str) -> None:
    # The public setter would also rewrite every sub-config, which is not ours to change.
    config._attn_implementation_internal = name


def _register(base: str) -> str:
    """Make sure that a wrapper of `base` exists; returns the wrapper's name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = _PREFIX + base
    if name not in AttentionInterface._global_mapping:
        AttentionInterface.register(name, _wrapper_of(base))
        # Registered first at its first use and under the base's own mask function, so that the
        # layer gets the mask that it would get without the wrapper.
        mask_function: Any = AttentionMaskInterface._global_mapping.get(base)
        if mask_function is not None:
            AttentionMaskInterface.register(name, mask_function)
    return name


def _wrapper_of(base: str) -> Callable[..., AttentionResult]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *more: Any,  # dropout, where another package calls this one: kvpress wraps all there are
        **kwargs: Any,
    ) -> AttentionResult:
        kind: Any = type(module)
        function = _base_function(kind, base)
        active = _active.get()
        while active is not None and id(module) not in active.module_ids:
            active = active.outer
        if active is None:
            return function(module, query, key, value, attention_mask, *more, **kwargs)

        def compute(
            mask: Tensor | None, keys: Tensor | None = None, values: Tensor | None = None
        ) -> AttentionResult:
            keys = key if keys is None else keys
            values = value if values is None else values
            return function(module, query, keys, values, mask, *more, **kwargs)

        scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
        states = AttentionStates(
            layer=int(module.layer_idx),  # type: ignore[arg-type]
            queries=query,
            keys=key,
            values=value,
            scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            mask=attention_mask,
            # sdpa knows neither, and says so: what it leaves out must not be scored either
            softcap=None if softcap is None or base == "sdpa" else float(softcap),
            sink_logits=None if base == "sdpa" else _sink_logits(module, kwargs),
            output_projection=_output_projection(module, query.shape[1] * value.shape[-1]),
            frequencies=layer_frequencies(module, active.rotary),
        )
        return active.handler(states, compute)

    return attention


def _sink_logits(module: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """gpt-oss hands them over for flash attention, and its eager function takes its module's."""
    found = kwargs.get("s_aux")
    if found is None:
        found = getattr(module, "sinks", None)
    return None if found is None else found.reshape(-1)


def _output_projection(module: nn.Module, width: int) -> Tensor | Callable[[], Tensor] | None:
    """The weight, or the method that unpacks it, of a layer that torch has quantized."""
    weight: Any = getattr(getattr(module, "o_proj", None), "weight", None)
    return weight if callable(weight) or getattr(weight, "shape", ())[1:] == (width,) else None


@cache
def _base_function(kind: Any, base: str) -> Callable[..., AttentionResult]:
    """Look up what a layer of this class would have called itself.

    A modeling file may override an implementation in a table of its own, and the eager
    function is not in any table but in the modeling file; so the file of the attention class
    comes first, then those of its parents, for a user's subclass lives elsewhere.
    """
    for parent in kind.__mro__:
        modeling_file = sys.modules.get(parent.__module__)
        if base == "eager":
            eager = getattr(modeling_file, "eager_attention_forward", None)
            if eager is not None:
                return eager  # type: ignore[no-any-return]
        table = getattr(modeling_file, "ALL_ATTENTION_FUNCTIONS", None)
        if table is not None and base in table:
            function = table[base]
            return function if base in ("sdpa", "eager") else _under_own_name(function, base)
    raise UnsupportedModelError(
        f"{kind.__name__} has no {base} attention function that kvalloc can call; load "
        'the model with attn_implementation="sdpa".'
    )


def _under_own_name(
    function: Callable[..., AttentionResult], base: str
) -> Callable[..., AttentionResult]:
    """Flash attention reads its name from the config again, to pick a kernel."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> AttentionResult:
        config: Any = module.config
        name = config._attn_implementation
        _set_implementation(config, base)
        try:
            return function(module, *args, **kwargs)
        finally:
            _set_implementation(config, name)

    return call
