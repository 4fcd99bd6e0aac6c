"""Forwards with reduced caches, for hooks and compiled graphs."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvalloc.errors import UnsupportedModelError, UnsupportedRequestError, option
from kvalloc.models import names
from kvalloc.models.attention import AttentionStates, AttentionSwitch, Compute, without_autocast
from kvalloc.runtime import prompt, refusals, turns
from kvalloc.runtime.attention.backends import attend
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.attention.masks import seen_among_new, shown_columns
from kvalloc.runtime.checks import Checks
from kvalloc.runtime.door import Batch
from kvalloc.runtime.evict import Running, evict
from kvalloc.runtime.notes import by_kv_head
from kvalloc.runtime.pieces import part
from kvalloc.runtime.refusals import new_tokens_shape
from kvalloc.runtime.store import Store

HALF_WAY = (
    "a forward with this cache failed half-way, so its layers disagree; call cache.reset() and "
    "start with the prompt again"
)

_counter = itertools.count()
caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class HookedCache:
    """Type by which hooks and graphs know a cache."""

    layers: list[Any]
    number: Tensor  # its own, by which the operations of a compiled forward find it

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Number each cache, and each copy."""
        cache = super().__new__(cls)
        number = next(_counter)
        cache.number = torch.full((1, 1, 1, 1), number, device="cpu")
        caches[number] = cache
        return cache


Serve: TypeAlias = Callable[
    [Mapping[str, Any], Callable[[Any], dict[str, Any]]], dict[str, Any] | None
]
"""Given arguments of a forward without a reduced cache and a function that begins one with it;
returns that function's result, or None."""


class Forward:
    """A forward with a cache.

    `outputs` are its first pieces'. A compiled one has a `mask`, (batch, n_columns), for layers
    that store every column.
    """

    def __init__(self, cache: Any, outputs: Sequence[Any] = ()) -> None:
        self.cache, self.outputs = cache, outputs
        self.running: Running | None = None
        self.token: Token[Any] | None = None
        self.attended: list[int] = []
        self.mask: Tensor | None = None
        self.callback: Any = None
        self._queries: list[Tensor] = []  # of the layers that read one's entries, so far
        self._checks = Checks()

    def begin(self, decoder: nn.Module, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check a forward, and plan its evictions; return the mask of padding if none was given."""
        cache, door, (rows, new) = self.cache, self.cache.door, new_tokens_shape(arguments)
        cache.check_owner(decoder)
        refusals.check_forward(decoder, arguments, cache.batch)
        seen = cache.get_seq_length()
        refusals.check_turn(decoder, seen, new)
        columns, ready = shown_columns(arguments)
        sees = None
        if ready and cache.reduced and columns is not None:
            sees = seen_among_new(arguments["attention_mask"], columns)
            if sees is None:
                raise UnsupportedRequestError(
                    "an attention mask that differs between new tokens in the past does not fit "
                    "layers with different entries; pass a 2-D attention_mask or none"
                )
        columns = None if ready and sees is None and door.complete else columns
        may_change = columns is not None and door.complete and not cache.reduced
        batch = door.enter((rows, new), seen, columns, may_change=may_change)
        running = Running(batch, turns.room_tokens(cache))
        running.sees = None if sees is None else batch.seen_by(sees)
        try:
            if batch.follows:
                turns.note_positions(cache, arguments)
                running.n_queries = turns.noted_queries(cache, batch)
            else:
                prompt.begin(cache, running, arguments)
        except BaseException:
            door.abandon()
            raise
        for layer in {layer for _, targets in running.planned for layer in targets}:
            cache.layers[layer].fresh = True
        self.running, cache.forward = running, self
        if (
            ready
            or not batch.hides
            or all(isinstance(layer, Store) and layer.kept is not None for layer in cache.layers)
        ):
            return {}
        return {"attention_mask": door.mask(next(iter(cache.stores.values())).device)}

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        """Answer one layer's attention, then evict."""
        self.attended.append(states.layer)
        index = self.cache.reads.get(states.layer, states.layer)
        store, running = self.cache.layers[index], self.running
        if not isinstance(store, Store):
            output = compute(states.mask)
            if index == states.layer:
                _free_slid_out(store, states)
            return output
        assert running is not None
        batch, aligned = running.batch, states
        if batch.order is not None:
            aligned = replace(states, queries=batch.aligned(states.queries))
        whole = store.kept is None
        output = compute(states.mask) if whole else self._answer(store, aligned, compute, running)
        if store.template is None:
            store.template = _without_tokens(states)
        if not batch.follows:
            _check_shown(store, states)
        if running.n_queries:
            self._queries.append(aligned.queries.detach())
        if states.layer != self.cache.last_readers.get(index, index):
            return output  # another layer reads these entries, too
        if running.n_queries:
            queries, self._queries = by_kv_head(self._queries, int(store.keys.shape[1])), []
            store.notes.queries.note(queries, batch.lengths, running.n_queries)
            store.notes.noted_until = store.seen
        if running.planned or running.observing:
            self._evict(index, store, running)
        return output

    def _answer(
        self, store: Any, states: AttentionStates, compute: Compute, running: Running
    ) -> Any:
        batch = running.batch
        if batch.new == 1:
            for one in self.cache.extensions:
                if (answer := one.answer(self.cache, store, states, compute)) is not None:
                    return answer
        call = AttentionCall(
            queries=states.queries,
            keys=states.keys,
            values=states.values,
            scaling=states.scaling,
            starts=batch.starts(store.tail.starts, states.queries.device),
            softcap=states.softcap,
            sink_logits=states.sink_logits,
            sees=running.sees,
        )
        return batch.in_columns(attend(call, store.attended())), None

    def _evict(self, layer: int, store: Store, running: Running) -> None:
        planned = running.of_layers([layer])
        with self._checks.collected():  # the host reads its checks once a forward
            evicted = [row for eviction, _ in planned for row in eviction.rows]
            for eviction in running.observing:
                with without_autocast(store.keys):
                    eviction.without(evicted).observe(layer, store)
            if planned:
                running.waiting.append(layer)
            elif running.observing:
                store.notes.queries.trim(running.n_queries_after)
            if len(running.waiting) >= running.layers_together:
                self._evict_waiting(running)

    def _evict_waiting(self, running: Running) -> None:
        layers, running.waiting = running.waiting, []
        for eviction, targets in running.of_layers(layers):
            evict(self.cache, eviction, targets)
        for layer in layers:
            self.cache.layers[layer].notes.queries.trim(running.n_queries_after)

    def end(self, *, completed: bool) -> None:
        """Clean up, also after a failure."""
        cache, running = self.cache, self.running
        if running is None or cache.forward is not self:  # `reset` has tidied up before this
            return
        batch, cache.forward = running.batch, None
        if not completed:
            self._fail(batch)
            return
        if running.waiting or self._checks.noted:
            with cache.half_way():
                self._evict_waiting(running)
                self._checks.read()
        tokens = cache.door.tokens(batch).tolist()
        cache.door.commit(batch)
        cache.rows = [replace(row, seen=n) for row, n in zip(cache.rows, tokens, strict=True)]
        if batch.completes:
            prompt.end(cache)
        elif batch.follows and not any(one.holds for one in cache.extensions):
            turns.catch_up(cache)

    def _fail(self, batch: Batch) -> None:
        cache = self.cache
        cache.door.abandon()
        for store in cache.stores.values():
            store.fresh = False
            if batch.follows and store.seen > batch.seen:
                store.take_back(store.seen - batch.seen, batch.lengths)
                if store.notes.noted_until > batch.seen:
                    store.notes.queries.undo()
                    store.notes.noted_until = batch.seen
        lengths = {one.get_seq_length() for one in cache.layers if hasattr(one, "get_seq_length")}
        if lengths != {batch.seen} or (batch.seen and cache.state_bytes):
            cache.broken = HALF_WAY
        elif not batch.seen:
            cache.rows = []
            cache.renew_own_layers()
            for store in cache.stores.values():
                store.reset()  # one with a state may hold this without any entry


def _check_shown(store: Store, states: AttentionStates) -> None:
    """Refuse layers that attend to anything but the cache's output."""
    shown = states.latents or (states.keys, states.values)
    pairs = zip(shown, (store.keys, store.values), strict=True)
    if not all(shown is stored or shown.is_set_to(stored) for shown, stored in pairs):
        raise UnsupportedModelError(
            f"layer {states.layer} attends to other keys or values than its cache returned, so "
            "nothing can be evicted or rounded; use this model with its full cache"
        )


def _without_tokens(states: AttentionStates) -> AttentionStates:
    queries, keys, values = (  # a view would keep them all alive
        tensor[:1, :, :0].detach().clone()
        for tensor in (states.queries, states.keys, states.values)
    )
    return replace(states, queries=queries, keys=keys, values=values, mask=None, latents=None)


def _free_slid_out(layer: Any, states: AttentionStates) -> None:
    """Free prompt tokens that have left a sliding window.

    A decoded token leaves one entry more: to free it would copy the window.
    """
    if states.queries.shape[2] == 1:
        return
    for name in ("keys", "values"):
        view: Tensor = getattr(layer, name)
        if view.untyped_storage().nbytes() > view.nbytes:
            setattr(layer, name, view.clone(memory_format=torch.contiguous_format))


lock = threading.RLock()
"""Reentrant lock: a cache may be collected by the thread that holds it."""


@dataclass(slots=True)
class Installed:
    """Hooks of one model, and its forwards by thread."""

    switch: AttentionSwitch
    handles: tuple[RemovableHandle, RemovableHandle]
    argument: str  # name of the cache in the forward
    column: bool  # whether the forward takes the column of a new token
    graphs: bool  # whether this torch has what a compiled model's token needs
    caches: int = 0
    open_forwards: dict[int, Forward] = field(default_factory=dict)
    serving: list[weakref.WeakMethod[Serve]] = field(default_factory=list)
    forward: Any = None  # what the module got as a forward of its own
    bare: dict[int, Any] = field(default_factory=dict)  # ids of calls without a cache, by thread

    def begin(
        self, module: nn.Module, cache: Any, arguments: Mapping[str, Any], *, decoded: bool = False
    ) -> dict[str, Any]:
        """Begin a forward; return its arguments."""
        outputs, arguments = _read_ahead(module, cache, arguments)
        running, thread = self.open_forwards, threading.get_ident()
        forward = Forward(cache, outputs)
        with lock:
            if any(one.cache is cache for one in running.values()):  # this thread's own was closed
                raise UnsupportedRequestError(
                    "another thread runs the model with this cache; give each thread its cache: "
                    "kvalloc.make_cache(model, profile), or copy.deepcopy(cache) before they "
                    "start"
                )
            running[thread] = forward
        try:
            changed = forward.begin(module, arguments)
        except BaseException:
            with lock:
                running.pop(thread, None)
            raise
        running[thread] = forward  # where budgets were decided, the model has run in between
        arguments = {**names.without_cache(arguments), self.argument: cache, **changed}
        if cache.reads and names.KEPT_LOGITS in arguments:
            arguments[names.KEPT_LOGITS] = 0  # layers that read others' entries see all tokens
        if decoded:
            forward.mask = arguments.get("attention_mask")
        else:
            known = all(store.template is not None for store in cache.stores.values())
            forward.token = self.switch.enter(forward.attend, known=known)
        return arguments

    def close(self, *, completed: bool) -> Sequence[Any]:
        """End this thread's forward; return the outputs of its first pieces."""
        with lock:  # another thread may be looking through them
            forward = self.open_forwards.pop(threading.get_ident(), None)
        if forward is None:
            return ()
        if forward.token is not None:
            self.switch.leave(forward.token)
        if forward.running is not None:
            layers, calls = forward.cache.n_attend, len(forward.attended)
            once = len({*forward.attended}) == calls == layers
            forward.end(completed=completed and once)
            if completed and not once:
                raise UnsupportedModelError(
                    f"{calls} attention calls reached kvalloc, expected {layers}, one of each "
                    "layer; load the model with attn_implementation='sdpa', and do not compile "
                    "its layers"
                )
        return forward.outputs


INSTALLED = "_kvalloc_installed"
"""The attribute of a hooked module. A table of all modules would not do: Dynamo notes places in it,
which change when a model is collected."""


def installed(module: nn.Module) -> Installed | None:
    """Return a module's hooks, or None."""
    return getattr(module, INSTALLED, None)


def _read_ahead(
    decoder: nn.Module, cache: Any, arguments: Mapping[str, Any]
) -> tuple[list[Any], Mapping[str, Any]]:
    """Run all pieces of a forward but the last; return outputs, and the last one's arguments."""
    outputs = list[Any]()
    if cache.in_pieces:
        return outputs, arguments
    for one in cache.extensions:
        arguments = one.begin(cache, arguments)
    (_, new), seen = new_tokens_shape(arguments), cache.get_seq_length()
    if new < 2:
        return outputs, arguments
    columns = {column for one in cache.extensions for column in one.cuts(cache, seen + new)}
    columns.update(turns.cuts(cache, seen, seen + new))
    if columns and shown_columns(arguments)[1]:
        raise UnsupportedRequestError(
            "a forward with its own attention mask of queries and keys cannot be read in pieces; "
            f"leave out {option('memory')}, or tokens that may be taken back"
        )
    cache.in_pieces = True
    try:
        for column in sorted(columns):
            new = column - cache.get_seq_length()
            outputs.append(decoder(**part(arguments, slice(new), column)))
            arguments = part(arguments, slice(new, None))
            cache.tell("read", cache)
            turns.catch_up(cache)
    finally:
        cache.in_pieces = False
    return outputs, arguments


def hooked_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the reduced cache among arguments, or None."""
    among = (names.cache_among(kwargs), *args)
    return next((one for one in among if isinstance(one, HookedCache)), None)
