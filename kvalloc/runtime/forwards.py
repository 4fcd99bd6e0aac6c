"""Forwards with reduced caches that run on a model: what hooks and compiled graphs share."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvalloc.errors import UnsupportedModelError, UnsupportedRequestError
from kvalloc.models import names
from kvalloc.models.attention import AttentionStates, AttentionSwitch, Compute

_counter = itertools.count()
caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


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
        caches[number] = cache
        return cache


Serve: TypeAlias = Callable[
    [Mapping[str, Any], Callable[[Any], dict[str, Any]]], dict[str, Any] | None
]
"""Given arguments of a forward without a reduced cache, and what begins it with one; returns what
that does, or None."""


@dataclass(slots=True)
class OpenForward:
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
    mask : Tensor, (batch, n_columns), or None
        2-D mask of a compiled forward, for layers that store every column.
    callback : callable or None
        What of Dynamo's is to watch Python again after it.
    """

    cache: Any
    outputs: list[Any] = field(default_factory=list)
    begun: bool = False
    token: Token[Any] | None = None
    attended: int = 0
    mask: Tensor | None = None
    callback: Any = None

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        """Answer one layer's attention."""
        self.attended += 1
        return self.cache.attend(states, compute)


@dataclass(slots=True)
class Installed:
    """The hooks of one model, and the forwards that run on it now, by thread."""

    switch: AttentionSwitch
    handles: tuple[RemovableHandle, RemovableHandle]
    argument: str  # name of the cache in the forward
    column: bool  # whether the forward takes the column of a new token
    graphs: bool  # whether this torch has what a compiled model's token needs
    caches: int = 0
    open_forwards: dict[int, OpenForward] = field(default_factory=dict)
    serving: list[weakref.WeakMethod[Serve]] = field(default_factory=list)
    forward: Any = None  # what the module got as a forward of its own
    bare: set[int] = field(default_factory=set)  # threads that call the model without a cache


INSTALLED = "_kvalloc_installed"
"""The attribute of a hooked module. No table of all modules: Dynamo, which reads what `_before`
reads, would note a place in it, which changes when another model is collected meanwhile."""

lock = threading.RLock()
"""Reentrant: caches may be collected while it is held, by the very thread that holds it."""


def installed(module: nn.Module) -> Installed | None:
    """Return what a module carries of kvalloc; None where it carries nothing."""
    return getattr(module, INSTALLED, None)


def begin(
    module: nn.Module,
    entry: Installed,
    cache: Any,
    arguments: Mapping[str, Any],
    *,
    decoded: bool = False,
) -> dict[str, Any]:
    """Begin a forward with a cache, also a compiled one of one token; returns its arguments."""
    outputs, arguments = cache.ahead(module, arguments)
    running, thread = entry.open_forwards, threading.get_ident()
    forward = OpenForward(cache, outputs)
    with lock:
        if any(one.cache is cache for one in running.values()):  # this thread's own was closed
            raise UnsupportedRequestError(
                "another thread runs the model with this cache; give each thread a cache of its "
                "own: kvalloc.make_cache(model, profile), or copy.deepcopy(cache) before they start"
            )
        running[thread] = forward
    try:
        changed = cache.begin_forward(module, arguments)
    except BaseException:
        with lock:
            running.pop(thread, None)
        raise
    running[thread] = forward  # where budgets were decided, the model has run in between
    forward.begun = True
    arguments = {**names.without_cache(arguments), entry.argument: cache, **(changed or {})}
    if decoded:
        forward.mask = arguments.get("attention_mask")
    else:
        forward.token = entry.switch.enter(forward.attend)
    return arguments


def close(entry: Installed, *, completed: bool) -> list[Any]:
    """End this thread's forward, if one is open; return the outputs of its first pieces."""
    with lock:  # another thread may be looking through them
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


def hooked_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the reduced cache among a decoder's arguments; None if there is none."""
    among = (names.cache_among(kwargs), *args)
    return next((one for one in among if isinstance(one, HookedCache)), None)
