"""The one generic hook pair that lets ``model.generate(cache=cache)`` work.

`generate` offers no place to open a ``with``, so making a cache puts one pre-hook and one
post-hook on the model's decoder. They carry no budgets, no masks and no cache: they look for a
`HookedCache` among the arguments of the forward at hand, and do nothing when there is none: so
little that ``torch.compile`` sees nothing of them. They are counted, and removed when the last
cache made for the model is gone.

Where Dynamo traces a token with a cache, they put kvalloc's operations into the graph:
one begins the forward, and one in each layer adds the token and attends. These find the cache by
its number, and what they run is what an uncompiled forward runs. For all else the graph breaks at
the decoder, which then runs as Python.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from contextvars import Token
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from kvalloc.errors import UnsupportedModelError, UnsupportedRequestError
from kvalloc.models import names
from kvalloc.models.attention import (
    AttentionStates,
    AttentionSwitch,
    Compute,
)
from kvalloc.models.structure import decoder_of
from kvalloc.runtime.attention.masks import stored_mask, with_columns
from kvalloc.runtime.pieces import joined

UNCOMPILED = (
    "with a kvalloc cache a graph holds one token that follows a complete prompt, without "
    "gradients; all else runs uncompiled: leave out fullgraph=True, or read the prompt with the "
    "model that is not compiled"
)

_counter = itertools.count()
_caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class HookedCache:
    """What hooks and graphs know a cache by; what they ask of it is `BudgetCache`'s.

    A base class and no protocol: whether an argument is one is asked while Dynamo traces, too.
    """

    layers: list[Any]
    number: Tensor  # its own, by which the operations of a compiled forward find it

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Give every cache, a copy too, a number."""
        cache = super().__new__(cls)
        number = next(_counter)
        cache.number = torch.full((1, 1, 1, 1), number, device="cpu")
        _caches[number] = cache
        return cache


Serve: TypeAlias = Callable[
    [Mapping[str, Any], Callable[[Any], dict[str, Any]]], dict[str, Any] | None
]
"""Given arguments of a forward without a reduced cache, and what begins it with one; returns what
that does, or None."""


@dataclass(slots=True)
class _OpenForward:
    """A forward that runs.

    Attributes
    ----------
    cache : BudgetCache
    outputs : list
        Of its first pieces.
    begun : bool
        Whether the cache has begun it.
    token : Token or None
        What the switch needs to be left.
    attended : int
        Layers that have attended.
    visible : Tensor of bool, (batch, n_tokens), or None
        Known padding of a compiled forward, for layers that store some.
    callback : callable or None
        What of Dynamo's is to watch Python again after it.
    """

    cache: Any
    outputs: list[Any] = field(default_factory=list)
    begun: bool = False
    token: Token[Any] | None = None
    attended: int = 0
    visible: Tensor | None = None
    callback: Any = None

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        self.attended += 1
        return self.cache.attend(states, compute)


@dataclass(slots=True)
class _Installed:
    """The hooks of one model, and the forwards that run on it now, by thread."""

    switch: AttentionSwitch
    handles: tuple[RemovableHandle, RemovableHandle]
    argument: str  # name of the cache in the forward
    column: bool  # whether the forward takes the column of a new token
    graphs: bool  # whether this torch has what a compiled model's token needs
    caches: int = 0
    open_forwards: dict[int, _OpenForward] = field(default_factory=dict)
    serving: list[weakref.WeakMethod[Serve]] = field(default_factory=list)
    forward: Any = None  # what the module got as a forward of its own
    bare: set[int] = field(default_factory=set)  # threads that call the model without a cache


_ATTENTION = "kvalloc_token"
"""Name of the attention of a compiled decoder."""

_FORWARD = "forward"

_HOOK = -1
"""Number of the hooks, which torch counts from 0."""

_INSTALLED = "_kvalloc_installed"
"""The attribute of a hooked module. No table of all modules: Dynamo, which reads what `_before`
reads, would note a place in it, which changes when another model is collected meanwhile."""

# Caches may be collected while the lock is held, by the very thread that holds it.
_lock = threading.RLock()


def _installed(module: nn.Module) -> _Installed | None:
    """Return what a module carries of kvalloc; None where it carries nothing."""
    return getattr(module, _INSTALLED, None)


def retain(cache: Any, decoder: nn.Module) -> None:
    """Keep the hooks on `decoder` as long as `cache` lives.

    Parameters
    ----------
    cache : BudgetCache
        Not kept alive by this.
    decoder : nn.Module
        The model without its language-model head: every forward passes through it once.

    Raises
    ------
    UnsupportedModelError
        If the model's attention does not go through transformers' attention interface.
    """
    with _lock:
        entry = _installed(decoder)
        if entry is None:
            entry = vars(decoder)[_INSTALLED] = _install(decoder)
        entry.caches += 1
    weakref.finalize(cache, _release, weakref.ref(decoder)).atexit = False


def serve(decoder: nn.Module, method: Serve) -> None:
    """Ask a bound method for the cache of each forward that would make one; the latest is asked.

    Parameters
    ----------
    decoder : nn.Module
        It carries the hooks, and as long as that: something else keeps a cache alive.
    method : callable
        Not kept alive by this.
    """
    entry: _Installed = vars(decoder)[_INSTALLED]
    entry.serving.append(weakref.WeakMethod(method))
    # Graphs are reused when hooks come and go, but not when a module has a forward of its own.
    if _FORWARD not in vars(decoder):
        vars(decoder)[_FORWARD] = entry.forward = decoder.forward


def end_serving(decoder: nn.Module, method: Serve) -> None:
    """Undo one `serve`."""
    entry: _Installed = vars(decoder)[_INSTALLED]
    entry.serving.remove(weakref.WeakMethod(method))
    if not entry.serving and entry.forward is not None:
        if vars(decoder).get(_FORWARD) is entry.forward:
            del vars(decoder)[_FORWARD]
        entry.forward = None


def watch_calls(model: nn.Module) -> RemovableHandle:
    """Note which calls of a model bring no cache: some models then make one for their decoder."""
    keep_from_copies(model, _without_hooks)
    return model.register_forward_pre_hook(_note_call, with_kwargs=True)


def end_watching(model: nn.Module, handle: RemovableHandle) -> None:
    """Undo one `watch_calls`."""
    handle.remove()
    give_to_copies(model, _without_hooks)


def _note_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    if (entry := _installed(decoder_of(module))) is not None:
        brings = names.cache_among(named_arguments(module.forward, args, kwargs)) is not None
        (entry.bare.discard if brings else entry.bare.add)(threading.get_ident())


def _install(decoder: nn.Module) -> _Installed:
    switch = AttentionSwitch(decoder)
    for hook in (_before, _after):
        names.start_no_graph_at(hook)
    names.register_implementation(_ATTENTION, _attention)
    keep_from_copies(decoder, _without_hooks)
    handles = (
        decoder.register_forward_pre_hook(_before, with_kwargs=True),
        decoder.register_forward_hook(_after, with_kwargs=True, always_call=True),
    )
    for handle in handles:  # graphs are made for the numbers of hooks
        names.renumber(decoder, handle, _HOOK)
    column, graphs = names.takes_column(type(decoder).forward), names.compile_obstacle() is None
    return _Installed(switch, handles, names.cache_argument(decoder), column, graphs)


def _release(decoder: weakref.ref[nn.Module]) -> None:
    module = decoder()
    if module is None:
        return
    with _lock:
        entry: _Installed = vars(module)[_INSTALLED]
        entry.caches -= 1
        if entry.caches == 0:
            del vars(module)[_INSTALLED]
            for handle in entry.handles:
                handle.remove()
            give_to_copies(module, _without_hooks)


class _PlainState:
    """The `__getstate__` of a module that carries hooks of kvalloc: all but these.

    Python asks the instance for it at each copy and pickle of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.changes: list[Callable[[dict[str, Any]], None]] = []

    def __call__(self) -> dict[str, Any]:
        module = self._module()
        assert module is not None
        kind: Any = type(module)
        state = {**kind.__getstate__(module)}
        del state["__getstate__"]
        for change in self.changes:
            change(state)
        return state


def keep_from_copies(module: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
    """Leave lent attributes out of copies and pickles of a module, until `give_to_copies`.

    Parameters
    ----------
    module : nn.Module
        Holds one attribute more meanwhile, which copies have not.
    change : callable
        Removes lent attributes from the state that a copy gets; a dict within it is not the copy's.
    """
    vars(module).setdefault("__getstate__", _PlainState(module)).changes.append(change)


def give_to_copies(module: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
    """Undo one `keep_from_copies`."""
    state: _PlainState = vars(module)["__getstate__"]
    state.changes.remove(change)
    if not state.changes:
        del vars(module)["__getstate__"]


def _without_hooks(state: dict[str, Any]) -> None:
    hooks = dict(names.forward_hooks(state))
    set_here = (_before, _after, _note_call)
    ours = {k for each in hooks.values() for k, hook in each.items() if hook in set_here}
    for name, each in hooks.items():
        state[name] = type(each)((k, value) for k, value in each.items() if k not in ours)
    entry = state.pop(_INSTALLED, None)
    if entry is not None and state.get(_FORWARD, entry) is entry.forward:
        del state[_FORWARD]


def _before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_dynamo_compiling():
        return _before_traced(module, args, kwargs)
    # What torch.compile has left to Python is not traced piece by piece.
    callback, begun = names.set_frame_callback(None), None
    try:
        begun = _before_eager(module, args, kwargs)
    finally:
        if begun is None:
            names.set_frame_callback(callback)
        else:
            vars(module)[_INSTALLED].open_forwards[threading.get_ident()].callback = callback
    return begun


def _before_eager(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    entry = _installed(module)
    if entry is None:  # its last cache has just gone
        return None
    # torch skips post-hooks on KeyboardInterrupt: what such a forward left open ends here.
    _close(entry, completed=False)
    cache = _hooked_cache(args, kwargs)
    method = entry.serving[-1]() if entry.serving else None
    arguments = with_columns(named_arguments(module.forward, args, kwargs))
    if (thread := threading.get_ident()) in entry.bare:
        entry.bare.discard(thread)
        made = names.cache_among(arguments)  # by the model itself, if it is empty
        if method is not None and made is not None and made.get_seq_length() == 0:
            arguments = names.without_cache(arguments)
    begin, other = partial(_begin, module, entry, arguments=arguments), None
    if cache is None:
        other = names.cache_among(arguments)
        cache, ours = _given_above(module, other)
    if cache is not None:
        return (), begin(cache)
    if method is None or (ours and other is not None):  # such as a full cache to measure with
        return None
    changed = method(arguments, begin)
    return None if changed is None else ((), changed)


def _given_above(decoder: nn.Module, other: Any) -> tuple[Any, bool]:
    """Return a cache that a model was given and did not pass on to its decoder, and who called.

    Methods of modules are asked for their arguments, from the decoder up to the first caller that
    is none: guidance, for one, runs a model beside another with a cache of its own. The cache is
    None if there is none; the second part is whether kvalloc is the caller.

    Raises
    ------
    UnsupportedRequestError
        If the cache has seen tokens, or another one is there in its place.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        # to read variables of a function keeps their values alive until it returns
        names_above = frame.f_locals if code.co_varnames[:1] == ("self",) else {}
        owner = names_above.get("self")
        ours = name.startswith("kvalloc.") and name != __name__
        if ours or not isinstance(owner, nn.Module | None):
            return None, ours
        flags = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
        n_named = code.co_argcount + code.co_kwonlyargcount
        n_named += sum(bool(code.co_flags & flag) for flag in flags)
        among = (
            [names_above.get(one) for one in code.co_varnames[:n_named]]
            if owner is not None
            else []
        )
        among += [two for one in among if isinstance(one, dict) for two in one.values()]
        among += [two for one in among if isinstance(one, tuple) for two in one]
        cache: Any = next((one for one in among if isinstance(one, HookedCache)), None)
        if cache is not None and cache.decoder() is decoder:
            seen, kind = cache.get_seq_length(), "none" if other is None else type(other).__name__
            if other is not None or seen:
                raise UnsupportedRequestError(
                    f"a kvalloc cache with {seen} tokens was given to {type(owner).__name__}, but "
                    f"its layers got {kind}: the model, a wrapper or transformers gave it up, as "
                    "Phi-3 does where a text passes its original context; begin a new cache for a "
                    "text of that length"
                )
            return cache, False
        frame = frame.f_back
    return None, False


def _begin(
    module: nn.Module,
    entry: _Installed,
    cache: Any,
    arguments: Mapping[str, Any],
    *,
    decoded: bool = False,
) -> dict[str, Any]:
    """Begin a forward with a cache, also a compiled one of one token; returns its arguments."""
    outputs, arguments = cache.ahead(module, arguments)
    running, thread = entry.open_forwards, threading.get_ident()
    forward = _OpenForward(cache, outputs)
    with _lock:
        if any(one.cache is cache for one in running.values()):  # this thread's own was closed
            raise UnsupportedRequestError(
                "another thread runs the model with this cache; give each thread a cache of its "
                "own: kvalloc.make_cache(model, profile), or copy.deepcopy(cache) before they start"
            )
        running[thread] = forward
    try:
        changed = cache.begin_forward(module, arguments)
    except BaseException:
        with _lock:
            running.pop(thread, None)
        raise
    running[thread] = forward  # where budgets were decided, the model has run in between
    forward.begun = True
    arguments = {**names.without_cache(arguments), entry.argument: cache, **(changed or {})}
    if decoded:
        forward.visible = arguments.get("attention_mask")
    else:
        forward.token = entry.switch.enter(forward.attend)
    return arguments


def _after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if isinstance(token := names.cache_among(kwargs), _Decoding):
        return _after_token(module, token, output)
    if torch.compiler.is_dynamo_compiling():
        return None
    entry = _installed(module)
    forward = None if entry is None else entry.open_forwards.get(threading.get_ident())
    if entry is None or forward is None:
        return None
    try:
        outputs = _close(entry, completed=output is not None)
    finally:
        names.set_frame_callback(forward.callback)
    return joined([*outputs, output]) if outputs and output is not None else None


def _close(entry: _Installed, *, completed: bool) -> list[Any]:
    """End this thread's forward, if one is open; return the outputs of its first pieces."""
    with _lock:  # another thread may be looking through them
        forward = entry.open_forwards.pop(threading.get_ident(), None)
    if forward is not None and forward.begun:
        if forward.token is not None:
            entry.switch.leave(forward.token)
        layers, calls = len(forward.cache.layers), forward.attended
        if completed and calls != layers:
            forward.cache.end_forward(completed=False)
            raise UnsupportedModelError(
                f"{calls} attention calls went through transformers' attention interface in a "
                f"forward of {layers} layers, expected one of each; load the model with "
                'attn_implementation="sdpa", and do not compile its layers'
            )
        forward.cache.end_forward(completed=completed)
    return [] if forward is None else forward.outputs


def _hooked_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    among = (names.cache_among(kwargs), *args)
    return next((one for one in among if isinstance(one, HookedCache)), None)


def named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, also of positional ones."""
    if not args:
        return kwargs
    try:
        bound = inspect.signature(function).bind_partial(*args).arguments
    except TypeError:  # more than it takes, which it says better itself
        return kwargs
    return {**bound, **kwargs}


# In a model that torch.compile has taken

_UNSEEN = (torch.Tag.cudagraph_unsafe,)
"""What an operation changes stands in a cache, and not in its arguments: no graph repeats it."""


@torch.library.custom_op("kvalloc::begin", mutates_args=(), tags=_UNSEEN)
def _begin_token(number: Tensor, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Begin a forward of one token; returns it, so that all comes after, and the tokens seen."""
    cache, decoder = _cache_of(number)
    seen = cache.layers[0].get_seq_length()
    name = "inputs_embeds" if tokens.ndim > 2 else "input_ids"
    entry: _Installed = vars(decoder)[_INSTALLED]
    _close(entry, completed=False)
    arguments = {name: tokens, "attention_mask": mask}
    _begin(decoder, entry, cache, arguments, decoded=True)
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
    """Add a token to a layer and attend."""
    cache, decoder = _cache_of(number)
    entry: _Installed = vars(decoder)[_INSTALLED]
    forward = entry.open_forwards[threading.get_ident()]
    options = {"scaling": scaling, "softcap": softcap, "sliding_window": sliding_window}
    named = {name: one for name, one in options.items() if one is not None}
    query = query.clone()  # a cache may note it, and a compiler gives its storage to others
    try:
        keys, values = cache.update(key, value, layer)
        mask = _token_mask(decoder, query, keys, forward.visible)
        output, _ = entry.switch.answer(forward.attend, layer, query, keys, values, mask, **named)
    except BaseException:
        _close(entry, completed=False)
        raise
    return output.to(query.dtype).contiguous()


@_attend_token.register_fake
def _(number: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


@torch.library.custom_op("kvalloc::end", mutates_args=(), tags=_UNSEEN)
def _end_token(number: Tensor, hidden: Tensor) -> Tensor:
    """End a forward of one token, whose last states are given and returned: entries may go."""
    _, decoder = _cache_of(number)
    _close(vars(decoder)[_INSTALLED], completed=True)
    return hidden.clone()


@_end_token.register_fake
def _(number: Tensor, hidden: Tensor) -> Tensor:
    return torch.empty_like(hidden)


def _cache_of(number: Tensor) -> tuple[Any, nn.Module]:
    """Return a cache and its model, which are alive while a forward with them runs."""
    cache = _caches[int(number)]
    return cache, cache.decoder()


def _token_mask(decoder: nn.Module, query: Tensor, keys: Tensor, visible: Tensor | None) -> Any:
    """Return the mask of one new token over what a layer stores, where padding may be stored."""
    if visible is None:
        return None
    function = names.mask_function(names.base_implementation(decoder.config))
    assert function is not None
    stored = int(keys.shape[2])
    return stored_mask(
        function,
        1,
        stored,
        dtype=query.dtype,
        device=query.device,
        batch=int(query.shape[0]),
        visible=visible[:, -stored:].bool(),
    )


class _Decoding(Cache):
    """What a compiled decoder sees of a cache: new keys and values, and how many tokens came."""

    def __init__(self, cache: Any, seen: Tensor, implementation: str, argument: str) -> None:
        self.cache, self.seen = cache, seen
        self.implementation, self.argument = implementation, argument
        self.layers = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.seen


def _attention(
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
    """Answer a layer of a compiled decoder; a cache's number is where its mask is."""
    output = torch.ops.kvalloc.attend(
        attention_mask, query, key, value, module.layer_idx, scaling, softcap, sliding_window
    )
    return output, None


def _before_traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let one token that follows a prompt be decoded in the graph, all else outside of it."""
    cache = _hooked_cache(args, kwargs)
    entry = _installed(module)
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
    implementation = names.base_implementation(module.config)
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
        or isinstance(kwargs.get("attention_mask"), dict)
    ):
        names.break_graph(UNCOMPILED)
    tokens, seen = torch.ops.kvalloc.begin(cache.number, tokens, kwargs.get("attention_mask"))
    names.set_implementation(module.config, _ATTENTION)
    changed = {
        "input_ids" if tokens.ndim == 2 else "inputs_embeds": tokens,
        "attention_mask": cache.number,
        entry.argument: _Decoding(cache, seen, implementation, entry.argument),
    }
    if entry.column and kwargs.get(names.COLUMN) is None:  # Dynamo cannot count up to a tensor
        changed[names.COLUMN] = seen[None]
    return (), {**names.without_cache(kwargs), **changed}


def _after_token(module: nn.Module, token: _Decoding, output: Any) -> Any:
    """Give the config its implementation back, and the output its cache."""
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
