"""A transformers cache within a budget for each layer and KV head."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.errors import ModelMismatchError, UnsupportedRequestError
from kvalloc.models.families import WITH_FULL_CACHE
from kvalloc.runtime import hooks, prompt, refusals, turns
from kvalloc.runtime.checks import Checks
from kvalloc.runtime.door import Door
from kvalloc.runtime.extension import Extension
from kvalloc.runtime.figures import CacheFigures
from kvalloc.runtime.forwards import HALF_WAY, Forward, HookedCache
from kvalloc.runtime.rows import Method, Row
from kvalloc.runtime.store import Store

TURN_BROKEN_OFF = (
    "an answer broke off after {:,} tokens of its turn, and what was evicted meanwhile, or slid "
    "out of a window, cannot come back; call cache.reset() and start with the prompt again, or go "
    "on from a copy.deepcopy(cache) made before; to end an answer early, use stopping_criteria"
)


class BudgetCache(CacheFigures, HookedCache):
    """Cache of the entries that a budget profile grants each layer and KV head.

    In each forward of a prompt the full-attention layers attend, then evict: sinks, window and the
    policy's best of each row and KV head stay. If the policy must see the whole prompt, all layers
    evict at its end. Every ``decode_every`` later tokens, and after a turn, entries are ranked
    again, within the budgets of each row's tokens without padding.

    Rows may differ in length, padded on either side; padding is neither kept nor counted. Prompts
    may come in announced chunks (``prompt_tokens``).

    Attributes
    ----------
    rows : list of Row
        Texts of the batch; none before the first forward.
    """

    decision_seconds: float | None = None  # time to decide its budgets from the prompt
    verifier: Any = None  # what verifies its answers, if anything does

    def __init__(
        self,
        decoder: nn.Module,
        layers: list[Any],
        methods: Sequence[Method],
        announced: int | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(layers=layers)
        self.decoder, self._name = weakref.ref(decoder), type(decoder).__name__
        self.methods = tuple(methods)
        self.door = Door(announced, lengths)
        self.extensions: list[Extension] = []
        kinds = methods[0].profile.shape.layer_types
        self.n_attend = sum(kind not in ("state", "none") for kind in kinds)
        self.traceable = not {*kinds} - {"full", "sliding"}
        shapes = enumerate(methods[0].profile.shape.by_layer)
        self.reads = {index: one.reads for index, one in shapes if one.reads is not None}
        self.last_readers = {source: index for index, source in self.reads.items()}
        self._own = {
            i: copy.deepcopy(one) for i, one in enumerate(layers) if not isinstance(one, Store)
        }  # transformers' layers, without tokens
        self.spent = False  # whether its budgets were decided from a prompt that is gone
        self._forget()
        hooks.retain(self, decoder)

    def _forget(self) -> None:
        self.rows: list[Row] = []
        self.forward: Forward | None = None
        self.prompt_read = prompt.ReadTokens()
        self.broken: str | None = None
        self.in_pieces = False  # while pieces of a forward run, all but the last

    def __repr__(self) -> str:
        stored = self.share_text if self.batch else "empty"
        state = "" if self.interrupted is None else ", interrupted"
        return (
            f"BudgetCache({self._name}, rows={self.batch}, "
            f"tokens={self.get_seq_length()}, {stored}{state})"
        )

    @property
    def interrupted(self) -> str | None:
        """Reason why it cannot go on before a `reset`, or None."""
        return self.broken or (None if self.forward is None else HALF_WAY)

    def tell(self, event: str, *facts: Any) -> None:
        """Call a method of all extensions."""
        for one in self.extensions:
            getattr(one, event)(*facts)

    # What a forward asks

    def check_owner(self, decoder: nn.Module) -> None:
        """Refuse a forward of another model, or of an interrupted cache."""
        if self.decoder() is not decoder:
            raise ModelMismatchError(
                f"this cache was made for another {self._name} object than the "
                f"{type(decoder).__name__} that it was given to; make one with "
                "kvalloc.make_cache(model, profile) for this model"
            )
        self.check_intact()

    def check_intact(self) -> None:
        """Refuse an interrupted cache."""
        if self.interrupted is not None:
            raise UnsupportedRequestError(self.interrupted)

    @contextmanager
    def half_way(self) -> Iterator[None]:
        """Mark the cache as broken if anything inside fails."""
        self.broken, checks = HALF_WAY, Checks()
        with checks.collected():
            yield
        checks.read()
        self.broken = None

    def end_turn(self) -> None:
        """Evict down to the budget of all tokens seen.

        `kvalloc.apply` calls it after each ``generate()``.
        """
        self.check_intact()
        turns.end(self)

    # What transformers calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values."""
        running = None if self.forward is None else self.forward.running
        if running is None:
            raise ModelMismatchError(
                f"this cache works only inside a forward of the {self._name} object it was made "
                "for, not after a reset within one; make one: kvalloc.make_cache(model, profile)"
            )
        for one in self.extensions:
            one.appended(layer_idx, key_states, value_states)
        if isinstance(store := self.layers[layer_idx], Store):
            if not store.rows:
                self._check_sizes(layer_idx, key_states, value_states)
            return store.update(key_states, value_states, running.batch, interval=running.interval)
        updated = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated[0], updated[1]

    def _check_sizes(self, layer: int, keys: Tensor, values: Tensor) -> None:
        known, (heads, dim) = self.methods[0].profile.shape.by_layer[layer], keys.shape[1::2]
        actual = replace(known, kv_heads=heads, key_dim=dim, value_dim=int(values.shape[-1]))
        if actual != known:
            raise ModelMismatchError(
                f"layer {layer} of {self._name} stores {actual.sizes_text}, and when it was looked "
                f"at {known.sizes_text}; {WITH_FULL_CACHE}"
            )

    def renew_own_layers(self) -> None:
        """Empty transformers' own layers."""
        for index, layer in self._own.items():
            self.layers[index] = copy.deepcopy(layer)

    def reset(self) -> None:
        """Free all tokens; budgets of one prompt serve no other."""
        self.read_ids = None
        self.spent |= bool(self.rows) and any(method.once for method in self.methods)
        for store in self.stores.values():
            store.reset()
        self.renew_own_layers()
        self.door.forget()
        self.tell("reset")
        self._forget()

    def go_back(self, seen: int) -> None:
        """Forget all tokens but the first ``seen``: a turn broke off.

        If an evicted entry cannot come back, the cache is `interrupted`.
        """
        if not seen:
            self.reset()
        elif self.interrupted is None and (more := self.get_seq_length() - seen) > 0:
            try:
                self.crop(-more)
            except UnsupportedRequestError:
                self.broken = TURN_BROKEN_OFF.format(more)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove last tokens, at most back to the latest eviction.

        Parameters
        ----------
        tokens_to_remove : int
            Negative: tokens to remove. Positive: tokens to keep.

        Raises
        ------
        UnsupportedRequestError
            If the cut would reach behind an eviction, or a sliding layer's dropped tokens.
        """
        seen = self.get_seq_length()
        end = min(tokens_to_remove if tokens_to_remove > 0 else seen + tokens_to_remove, seen)
        end = max(end, 0)
        self.tell("crop", self, end)
        seen = self.get_seq_length()
        removed = np.array([row.seen - self.door.count(i, end) for i, row in enumerate(self.rows)])
        self._check_crop(seen - end, removed)
        if seen and not end:
            return self.reset()
        if remove := seen - end:
            for layer in self.layers:
                if isinstance(layer, Store):
                    layer.take_back(remove, removed)
                    layer.notes.queries.cut(removed)
                    layer.notes.noted_until = end
                else:
                    layer.crop(-remove)  # not every layer of transformers' own knows what to keep
            self.door.crop(end)
            self.rows = [
                replace(
                    row,
                    seen=row.seen - n,
                    evicted_at=min(row.evicted_at, row.seen - n),
                    repeats=None if row.repeats is None else row.repeats[: row.seen - n],
                )
                for row, n in zip(self.rows, removed.tolist(), strict=True)
            ]
        self.tell("cropped", self)
        if self.read_ids is not None:
            self.read_ids = self.read_ids[:, :end]

    def _check_crop(self, remove: int, removed: IntArray) -> None:
        if self.get_seq_length() and not self.door.complete:
            raise UnsupportedRequestError(
                "cannot crop before the prompt is complete; reset the cache and start again"
            )
        self.check_intact()
        if remove > 0 and self.state_bytes:
            raise UnsupportedRequestError(
                "cannot crop: layers of this model have a state, out of which no token can be "
                "taken again; crop nothing, and go on from a copy.deepcopy(cache) made before"
            )
        for layer in self.layers if remove > 0 else ():
            if isinstance(layer, Store):
                if layer.tail is not None and (removed > layer.tail.lengths).any():
                    followed = int(layer.tail.lengths.min())
                    raise UnsupportedRequestError(
                        f"cannot crop {remove} tokens: {followed} have followed the latest "
                        "eviction; crop a copy.deepcopy(cache) from before it, or read the text "
                        "anew"
                    )
            elif (
                hasattr(layer, "sliding_window")
                and not getattr(layer, "record_past", False)
                and (layer.get_seq_length() >= layer.sliding_window)
            ):
                raise UnsupportedRequestError(
                    "cannot crop: a sliding-window layer has already dropped the tokens that "
                    "would come back into its window; make a new cache"
                )

    def activate_past_recording(self, start: int | None = None) -> None:
        """Let later forwards end in tokens that a `crop` may take back.

        Parameters
        ----------
        start : int, optional
            First column to take back, if the next forward passes it; by default the end of the
            announced prompt, or of tokens seen.

        Raises
        ------
        UnsupportedRequestError
            If no extension can.
        """
        served = [one.record(self, start) for one in self.extensions]
        if not any(served):
            raise UnsupportedRequestError(
                "this cache takes nothing back; make it with kvalloc.make_cache"
            )

    def adopt(self, other: BudgetCache) -> None:
        """Take over the entries of another cache."""
        self.layers, self.rows, self.door = other.layers, other.rows, other.door

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue row ``beam_idx[i]`` (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        rows = torch.arange(self.batch, device="cpu")
        self.batch_select_indices(rows.repeat_interleave(max(repeats, 0)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, which may repeat. An empty cache stays as it is.

        Raises
        ------
        InputError
            If no row is selected, or a missing one.
        """
        if not self.batch:
            return
        rows = refusals.selected_rows(indices, self.batch)
        if (ids := self.read_ids) is not None:
            self.read_ids = ids[rows.to(ids.device)] if len(ids) == self.batch else None
        for layer in self.layers:
            layer.reorder_cache(rows)
        self.door.select(rows)
        self.rows = [self.rows[row] for row in rows.tolist()]

    # Refused

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UnsupportedRequestError(
            "a reduced cache cannot be pickled, it belongs to its model; write it with "
            "kvalloc.save_cache, or use copy.deepcopy"
        )

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse: masks are made on the device of the entries."""
        raise UnsupportedRequestError(refusals.OFFLOADED)

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetCache:
        """Return an independent copy, such as for several questions."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        shared = [*self.rows, *self.methods, self.decoder]
        shared += [store.template for store in self.stores.values()]  # holds weights of the model
        for one in shared:
            memo[id(one)] = one
        for tensor in self.tensors():
            if tensor.requires_grad:  # torch copies no tensor with a history
                memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo)
        for store in self.stores.values():
            if store.tail is not None:  # views of it
                memo[id(store.keys)] = memo[id(store.values)] = None
        memo[id(self.number)] = clone.number
        memo[id(self.forward)] = None
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        for store in clone.stores.values():
            if store.tail is not None:
                store.keys, store.values = store.tail.states
        if self.forward is not None:  # no hook and no ``with`` will end it
            clone.forward, clone.broken = None, HALF_WAY
        if (decoder := self.decoder()) is not None:
            hooks.retain(clone, decoder)
        return clone
