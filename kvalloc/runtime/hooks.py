"""Hooks that let ``model.generate(cache=cache)`` work.

A new cache puts both on the decoder, since `generate` has no place for a ``with``. They do nothing
without a `HookedCache`, and go with the model's last cache.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kvalloc.errors import UnsupportedRequestError
from kvalloc.models import names
from kvalloc.models.attention import AttentionSwitch
from kvalloc.models.structure import decoder_of
from kvalloc.runtime.attention.masks import with_columns
from kvalloc.runtime.compiled import (
    ATTENTION,
    DecodedToken,
    after_token,
    attention,
    before_traced,
)
from kvalloc.runtime.forwards import (
    INSTALLED,
    HookedCache,
    Installed,
    Serve,
    hooked_cache,
    installed,
    lock,
)
from kvalloc.runtime.pieces import joined
from kvalloc.runtime.refusals import new_tokens_shape

_FORWARD = "forward"

_HOOK = -1
"""Number of each hook in torch, from 0."""


def retain(cache: Any, decoder: nn.Module) -> None:
    """Keep the hooks on `decoder` as long as `cache` lives.

    Raises
    ------
    UnsupportedModelError
        If attention does not go through transformers' attention interface.
    """
    with lock:
        entry = installed(decoder)
        if entry is None:
            entry = vars(decoder)[INSTALLED] = _install(decoder)
        entry.caches += 1
    weakref.finalize(cache, _release, weakref.ref(decoder)).atexit = False


def serve(decoder: nn.Module, method: Serve) -> None:
    """Call the latest method for the cache of each forward that would make one.

    The hooks keep neither method nor cache alive.
    """
    entry: Installed = vars(decoder)[INSTALLED]
    entry.serving.append(weakref.WeakMethod(method))
    # Graphs are reused when hooks come and go, but not when a module has a forward of its own.
    if _FORWARD not in vars(decoder):
        vars(decoder)[_FORWARD] = entry.forward = decoder.forward


def end_serving(decoder: nn.Module, method: Serve) -> None:
    """Undo `serve`."""
    entry: Installed = vars(decoder)[INSTALLED]
    entry.serving.remove(weakref.WeakMethod(method))
    if not entry.serving and entry.forward is not None:
        if vars(decoder).get(_FORWARD) is entry.forward:
            del vars(decoder)[_FORWARD]
        entry.forward = None


def watch_calls(model: nn.Module) -> RemovableHandle:
    """Note calls without a cache: some models then make one."""
    keep_from_copies(model, _without_hooks)
    return model.register_forward_pre_hook(_note_call, with_kwargs=True)


def end_watching(model: nn.Module, handle: RemovableHandle) -> None:
    """Undo `watch_calls`."""
    handle.remove()
    give_to_copies(model, _without_hooks)


def _note_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    if (entry := installed(decoder_of(module))) is not None:
        arguments, thread = named_arguments(module.forward, args, kwargs), threading.get_ident()
        entry.bare.pop(thread, None)
        if names.cache_among(arguments) is None:
            entry.bare[thread] = arguments.get("input_ids")


def _install(decoder: nn.Module) -> Installed:
    switch = AttentionSwitch.of(decoder)
    for hook in (_before, _after):
        names.start_no_graph_at(hook)
    names.register_implementation(ATTENTION, attention)
    keep_from_copies(decoder, _without_hooks)
    handles = (
        decoder.register_forward_pre_hook(_before, with_kwargs=True),
        decoder.register_forward_hook(_after, with_kwargs=True, always_call=True),
    )
    for handle in handles:  # graphs are made for the numbers of hooks
        names.renumber(decoder, handle, _HOOK)
    column = names.takes(type(decoder).forward, names.COLUMN)
    graphs = names.compile_obstacle() is None
    return Installed(switch, handles, names.cache_argument(decoder), column, graphs)


def _release(decoder: weakref.ref[nn.Module]) -> None:
    module = decoder()
    if module is None:
        return
    with lock:
        entry: Installed = vars(module)[INSTALLED]
        entry.caches -= 1
        if not names.is_tracing():  # a graph is made with the hooks: they go later
            _clear(module, entry)


def _clear(module: nn.Module, entry: Installed) -> bool:
    """Remove hooks if no cache is left; return whether they are off."""
    with lock:
        if entry.caches or installed(module) is not entry:
            return entry.caches == 0
        del vars(module)[INSTALLED]
        for handle in entry.handles:
            handle.remove()
        give_to_copies(module, _without_hooks)
    return True


class _PlainState:
    """The `__getstate__` of a hooked module."""

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
    """Let copies and pickles of a module omit lent attributes, until `give_to_copies`.

    ``change`` removes them from a copy's state; a dict within it is not the copy's.
    """
    vars(module).setdefault("__getstate__", _PlainState(module)).changes.append(change)


def give_to_copies(module: nn.Module, change: Callable[[dict[str, Any]], None]) -> None:
    """Undo `keep_from_copies`."""
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
    entry = state.pop(INSTALLED, None)
    if entry is not None and state.get(_FORWARD, entry) is entry.forward:
        del state[_FORWARD]


def _before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_dynamo_compiling():
        return before_traced(module, args, kwargs)
    # What torch.compile has left to Python is not traced piece by piece.
    callback, begun = names.set_frame_callback(None), None
    try:
        begun = _before_eager(module, args, kwargs)
    finally:
        if begun is None:
            names.set_frame_callback(callback)
        else:
            vars(module)[INSTALLED].open_forwards[threading.get_ident()].callback = callback
    return begun


def _before_eager(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    entry = installed(module)
    if entry is None or _clear(module, entry):  # its last cache has gone
        return None
    # torch skips post-hooks on KeyboardInterrupt: what such a forward left open ends here.
    entry.close(completed=False)
    cache = hooked_cache(args, kwargs)
    method = entry.serving[-1]() if entry.serving else None
    arguments = with_columns(module, named_arguments(module.forward, args, kwargs))
    ids = None
    if (thread := threading.get_ident()) in entry.bare:
        ids = entry.bare.pop(thread)
        made = names.cache_among(arguments)  # by the model itself, if it is empty
        if method is not None and made is not None and made.get_seq_length() == 0:
            arguments = names.without_cache(arguments)
    begins, other = partial(entry.begin, module, arguments=arguments), None
    if cache is None:
        other = names.cache_among(arguments)
        cache, ours = _given_above(module, other)
    if cache is not None:
        return (), begins(cache)
    if method is None or (ours and other is not None):  # such as a full cache to measure with
        return None
    changed = method(arguments, begins)
    if changed and ids is not None and ids.shape == new_tokens_shape(arguments):
        names.cache_among(changed).read_ids = ids  # ids of the embeddings
    return None if changed is None else ((), changed)


def _given_above(decoder: nn.Module, other: Any) -> tuple[Any, bool]:
    """Return a cache that a caller got and did not pass on, if any; and whether kvalloc calls.

    Module methods' frames are searched, up to the first other caller.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        owner, among = None, list[Any]()
        # to read variables of a function keeps their values alive until it returns
        if code.co_varnames[:1] == ("self",):
            args, more, keywords, values = inspect.getargvalues(frame)
            owner = values.get("self")
            among = [values.get(one) for one in (*args, more, keywords) if one]
        ours = name.startswith("kvalloc.") and name != __name__
        if ours or not isinstance(owner, nn.Module | None):
            return None, ours
        among += [two for one in among if isinstance(one, dict) for two in one.values()]
        among += [two for one in among if isinstance(one, tuple) for two in one]
        cache: Any = next((one for one in among if isinstance(one, HookedCache)), None)
        if cache is not None and cache.decoder() is decoder:
            seen, kind = cache.get_seq_length(), "none" if other is None else type(other).__name__
            if other is not None or seen:
                raise UnsupportedRequestError(
                    f"a kvalloc cache with {seen} tokens was given to {type(owner).__name__}, but "
                    f"its layers got {kind} (Phi-3 does so beyond its original context); begin a "
                    "new cache"
                )
            return cache, False
        frame = frame.f_back
    return None, False


def _after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if isinstance(token := names.cache_among(kwargs), DecodedToken):
        return after_token(module, token, output)
    if torch.compiler.is_dynamo_compiling():
        return None
    entry = installed(module)
    forward = None if entry is None else entry.open_forwards.get(threading.get_ident())
    if entry is None or forward is None:
        return None
    try:
        outputs = entry.close(completed=output is not None)
    finally:
        names.set_frame_callback(forward.callback)
    return joined([*outputs, output]) if outputs and output is not None else None


def named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by name."""
    if not args:
        return kwargs
    try:
        bound = inspect.signature(function).bind_partial(*args).arguments
    except TypeError:  # more than it takes, which it says better itself
        return kwargs
    return {**bound, **kwargs}
