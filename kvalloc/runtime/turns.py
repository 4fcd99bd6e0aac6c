"""Turns and answers after a prompt: when rows evict again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import MIXES
from kvalloc.accounting.stored import layer_tensors
from kvalloc.errors import warn_user
from kvalloc.runtime import plan
from kvalloc.runtime.door import Batch
from kvalloc.runtime.evict import Eviction, evict
from kvalloc.runtime.kept import WORK_BYTES
from kvalloc.runtime.rows import Row, alike, with_scattered
from kvalloc.runtime.store import Store


def memory_of(cache: Any, row: Row) -> int | None:
    """Return a row's bytes: rows of a method share its memory."""
    memory = row.method.options.memory
    return None if memory is None else memory // sum(row.method is r.method for r in cache.rows)


def interval(cache: Any, row: Row) -> int:
    """Return the tokens between a row's evictions."""
    return plan.interval(row, memory_of(cache, row), row.evicted_at)


def _free_tokens(cache: Any) -> int | None:
    memory = [memory_of(cache, row) for row in cache.rows]
    if not memory or None in memory:
        return None
    token_bytes = plan.token_bytes(cache.methods[0].profile) * len(memory)
    free: int = sum(one for one in memory if one is not None) - cache.retained_bytes
    return free // token_bytes


def cuts(cache: Any, seen: int, end: int) -> Iterator[int]:
    """Yield the columns at which a forward is cut to fit the memory."""
    if cache.door.complete and (free := _free_tokens(cache)) is not None and end - seen > free:
        row = cache.rows[0]
        memory, start = memory_of(cache, row), seen - (row.seen - row.evicted_at)
        if next(iter(cache.stores.values())).tail is None:  # no room for an interval is left free
            full = seen + max(free, 1)
            yield from (one for one in plan.cuts(row, memory, start, full) if one > seen)
            yield full
            start = full
        yield from (one for one in plan.cuts(row, memory, start, end) if one > seen)


def room_tokens(cache: Any) -> int:
    """Return how many tokens a layer may allocate for."""
    tokens = min((interval(cache, row) for row in cache.rows if row.method.goes_on), default=None)
    if tokens is None:
        return plan.MIN_INTERVAL
    if (free := _free_tokens(cache)) is None or not cache.door.complete:
        return tokens
    tail = next(iter(cache.stores.values())).tail
    return max(min(tokens, (0 if tail is None else tail.tokens) + free), 1)


def note_positions(cache: Any, arguments: Mapping[str, Any]) -> None:
    """Note scattered rows, and warn if other scores rank from now on."""
    before, cache.rows = cache.rows, with_scattered(cache.rows, arguments)
    if any(
        row.method.goes_on and row.after.rotates and now.scattered
        for row, now in zip(before, cache.rows, strict=True)
    ):
        warn_user(
            "tokens of an image in this turn have positions on several axes, so no query is put "
            "elsewhere: attention of the latest queries, in their places, ranks entries from now on"
        )


def noted_queries(cache: Any, batch: Batch) -> int:
    """Return how many latest queries of a turn to store."""
    end, count = batch.seen + batch.new, 0
    for row in cache.rows:
        after = row.after
        if row.method.goes_on:
            back = after.observes or any(one.holds for one in cache.extensions)
            count = max(count, end if back else after.query_rows(end))
    return count


def catch_up(cache: Any) -> None:
    """Evict in rows with enough new tokens."""
    if not cache.door.complete:
        return
    full = _is_full(cache)
    due = [
        number
        for number in _followed(cache)
        if full or (row := cache.rows[number]).seen - row.evicted_at >= interval(cache, row)
    ]
    if due:
        _settle(cache, due)


def end(cache: Any) -> None:
    """Evict down to the budgets of all tokens seen."""
    if cache.door.complete:
        _settle(cache, _followed(cache))


def _followed(cache: Any) -> list[int]:
    return [
        number
        for number, row in enumerate(cache.rows)
        if row.method.goes_on and row.seen > row.evicted_at
    ]


def _is_full(cache: Any) -> bool:
    if all(row.method.options.memory is None for row in cache.rows):
        return False
    tail = next(iter(cache.stores.values())).tail
    free = None if tail is not None and tail.has_room else _free_tokens(cache)
    return free is not None and free < 1


@torch.no_grad()
def _settle(cache: Any, rows: Sequence[int]) -> None:
    stores: dict[int, Store] = cache.stores
    query_counts = [store.notes.queries.lengths for store in stores.values()]
    queries = np.min([np.broadcast_to(counts, len(cache.rows)) for counts in query_counts], axis=0)
    due = [n for n in rows if queries[n] or not cache.rows[n].after.query_rows(1)]
    if not due:
        return
    tokens, goals, new_only = cache.tokens, dict[int, dict[int, IntArray]](), dict[int, bool]()
    kept = np.stack([store.kept_counts for store in stores.values()], axis=1)
    latest = np.stack([store.latest(tokens) for store in stores.values()], axis=1)[:, :, None]
    for number in due:
        of_row = _goal(cache, number, kept[number], latest[number])
        cache.rows[number], new_only[number], goals[number] = of_row
    with cache.half_way():
        for group in alike(cache.rows, due):
            for keeps in (False, True):
                row, evicting = cache.rows[group[0]], [n for n in group if new_only[n] is keeps]
                eviction_of_all = Eviction.of(cache, row, evicting, row.after, new_only=keeps)
                for eviction, targets in eviction_of_all.by_layers(goals):
                    evict(cache, eviction, targets)
    for store in stores.values():
        store.notes.queries.forget(np.array(due))
    for number in due:
        cache.rows[number] = plan.evicted(cache.rows[number], ranked=not new_only[number])


def _goal(
    cache: Any, number: int, kept: IntArray, new: IntArray
) -> tuple[Row, bool, dict[int, IntArray]]:
    """Return the row, whether only new entries are ranked, and how many stay."""
    before: Row = cache.rows[number]
    left = _left(cache, before)
    profile = plan.grown(before, left)
    changed, row = profile is not before.profile, replace(before, profile=profile)
    room = plan.turn_budgets(row, left)[list(profile.shape.full_layers)]
    new_only = not changed and plan.new_alone(row, room, kept, new)
    candidates = np.broadcast_to(new, kept.shape) if new_only else kept + new
    targets = plan.turn_targets(
        room - kept if new_only else room,
        candidates,
        protected=profile.policy.window if new_only else profile.policy.protected_tokens,
        shared=profile.by_prompt,
    )
    goal = {
        layer: target
        for (layer, store), target, entries in zip(
            cache.stores.items(), targets, candidates, strict=True
        )
        if profile.by_prompt
        or changed
        or row.goes_on_observing  # it looks at new tokens even where all of them stay
        or layer in row.widths
        or (target < entries).any()
        or (store.kept is None and row.seen < store.seen)  # other columns are stored, too
    }
    return row, new_only, goal


def _left(cache: Any, row: Row) -> int | None:
    """Return the bytes for a row's entries, without other layers, tail, and lists of tiles."""
    if (memory := memory_of(cache, row)) is None:
        return None
    plain_layers = (layer for layer in cache.layers if not isinstance(layer, Store))
    taken: int = sum(tensor.nbytes for layer in plain_layers for tensor in layer_tensors(layer))
    taken = -(-(taken + cache.state_bytes) // len(cache.rows))
    if next(iter(cache.stores.values())).keys.is_cuda:  # where a kernel reads by lists
        n_pieces = max(map(len, MIXES.values())) if row.widths else 1
        taken += WORK_BYTES * n_pieces * row.profile.budgets.size
    tokens = plan.interval(row, memory, row.seen)
    return memory - taken - tokens * plan.token_bytes(row.profile)
