"""Assisted generation: forwards with drafts after known tokens.

Entries are evicted and rounded as if the accepted tokens had come one at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kvalloc.errors import UnsupportedRequestError
from kvalloc.models.names import can_take_back, has_state, record_past
from kvalloc.runtime import plan, turns
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.extension import Extension
from kvalloc.runtime.pieces import part
from kvalloc.runtime.refusals import setting
from kvalloc.runtime.rows import Row


def check_assisted(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse a model's own drafts.

    Raises
    ------
    UnsupportedRequestError
    """
    if any(setting(model, arguments, name) for name in ("use_mtp", "speculation_type")):
        raise UnsupportedRequestError(
            "use_mtp and speculation_type draft by what only a full cache holds; leave them out, "
            "or take prompt_lookup_num_tokens or assistant_model"
        )


def is_assisted(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call tries drafts."""
    names = ("prompt_lookup_num_tokens", "assistant_early_exit")
    among = [arguments.get("assistant_model"), *(setting(model, arguments, n) for n in names)]
    return any(one is not None for one in among)


def check_takes_back(layers: Iterable[Any]) -> None:
    """Refuse layers that cannot remove drafts.

    Raises
    ------
    UnsupportedRequestError
    """
    layers = list(layers)
    if any(map(has_state, layers)):
        raise UnsupportedRequestError(
            "drafts are taken back, and layers of this model have a state, out of which no token "
            "can be taken again; call generate() without assistance, or lossless"
        )
    if not all(map(can_take_back, layers)):
        raise UnsupportedRequestError(
            "this version of transformers takes back no drafts from sliding-window layers; install "
            "a newer one, or call generate() without assistance"
        )


class Drafts(Extension):
    """Start of drafts, and snapshots before evictions among them.

    After `given` columns drafts may begin; None without any.
    """

    def __init__(self) -> None:
        self.given: int | None = None
        self._before: list[Any] = []
        self._open = False

    @classmethod
    def of(cls, cache: BudgetCache) -> Drafts:
        """Return a cache's drafts, added if missing."""
        drafts = next((one for one in cache.extensions if isinstance(one, cls)), None)
        if drafts is None:
            cache.extensions.append(drafts := cls())
        return drafts

    def record(self, cache: Any, start: int | None) -> bool:
        """Let later forwards end in drafts; see `BudgetCache.activate_past_recording`.

        Raises
        ------
        UnsupportedRequestError
            If no prompt was read or announced, or layers cannot remove tokens.
        """
        columns = start or max(self.given or 0, cache.door.announced or 0, cache.get_seq_length())
        if not columns:
            raise UnsupportedRequestError(
                "assisted generation sends prompt and drafts in one forward; say how long the "
                "prompt is: make_cache(model, profile, prompt_tokens=...), or use kvalloc.apply"
            )
        check_takes_back(cache.layers)
        cache.tell("refuse_taking_back", cache)
        self.given = columns
        return True

    def begin(self, cache: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave out stored tokens; earlier ones can no longer be rejected."""
        if self.given is None or self._open:
            return arguments
        arguments = _unread(arguments, cache.get_seq_length())
        self._take(cache)
        return arguments

    def _take(self, cache: Any) -> None:
        self._before = []
        turns.catch_up(cache)
        for layer in cache.layers:
            if getattr(layer, "record_past", False):
                layer.crop(0)
        if cache.prompt_complete:
            record_past(cache.layers)

    def cuts(self, cache: Any, end: int) -> Iterator[int]:
        """Yield the columns where drafts begin and rows evict."""
        if self.given is None or self._open:
            return
        seen, columns = cache.get_seq_length(), {self.given}
        at, rows = seen, cache.rows
        if not cache.prompt_complete:  # it will be evicted from at its end
            at = self.given
            rows = [
                Row(method=method, profile=method.profile, seen=at, evicted_at=at)
                for method in cache.methods
            ]
        for row in rows:
            if row.method.goes_on:
                memory = turns.memory_of(cache, row) if cache.rows else row.method.options.memory
                start = at - (row.seen - row.evicted_at)
                if self.given - start >= plan.interval(row, memory, row.evicted_at):
                    start = self.given
                columns.update(plan.cuts(row, memory, start, end))
        yield from (one for one in columns if max(seen + 1, self.given) <= one < end)

    def read(self, cache: Any) -> None:
        """Take a snapshot before drafts make an eviction due."""
        if self.given is not None and cache.prompt_complete:
            record_past(cache.layers)
        if self.given is not None and not self._open and cache.get_seq_length() > self.given:
            shared = {id(tensor): tensor for tensor in cache.tensors()}
            self._before.append(copy.deepcopy(cache, {**shared, id(self._before): []}))

    @property
    def holds(self) -> bool:
        """See `Extension.holds`."""
        return self.given is not None

    def crop(self, cache: Any, end: int) -> None:
        """Restore the snapshot before an eviction among drafts."""
        if before := next((one for one in self._before if one.get_seq_length() > end), None):
            cache.adopt(before)
            self._before = []

    def cropped(self, cache: Any) -> None:
        """Free snapshots."""
        if self.given is not None:
            self._take(cache)

    def reset(self) -> None:
        """Expect none."""
        self.given, self._before, self._open = None, [], False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Treat all tokens inside as drafts, with no eviction before a `crop`."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def room(self, cache: Any, longest: int) -> int:
        """Return the drafts, at least 1, before the next eviction."""
        for row in cache.rows:
            if row.method.goes_on:
                due = row.evicted_at + turns.interval(cache, row)
                longest = min(longest, due - row.seen)
        return max(1, longest)


def _unread(arguments: Mapping[str, Any], seen: int) -> Mapping[str, Any]:
    """Return arguments without stored tokens, which transformers (5.23) passes again."""
    positions = arguments.get("position_ids")
    if (
        not isinstance(positions, Tensor)
        or not 0 < seen < positions.shape[-1]
        or int(positions.min())
    ):
        return arguments
    return part(arguments, slice(seen, None))
