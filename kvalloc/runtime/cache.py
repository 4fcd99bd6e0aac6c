"""A transformers cache that keeps a budget of entries in each layer and KV head."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import full_bytes
from kvalloc.accounting.stored import bytes_at_16_bits, layer_tensors, storages
from kvalloc.errors import (
    InputError,
    ModelMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
    one_line,
    option,
)
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, Compute, without_autocast
from kvalloc.models.structure import context_limit
from kvalloc.runtime import hooks, plan, refusals
from kvalloc.runtime.attention.backends import attend
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.checks import Checks
from kvalloc.runtime.door import Batch, Door, shown
from kvalloc.runtime.evict import Eviction, wanted_queries
from kvalloc.runtime.extension import Extension
from kvalloc.runtime.kept import WORK_BYTES
from kvalloc.runtime.notes import Notes, of_row
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.pieces import part
from kvalloc.runtime.rows import Method, Row, alike
from kvalloc.runtime.second_read import HeldPrompt, check_context, read_again
from kvalloc.runtime.store import Store
from kvalloc.runtime.tail import rows_of
from kvalloc.scorers import Scorer
from kvalloc.units import share_text

HALF_WAY = (
    "a forward with this cache failed half-way, so its layers disagree; call cache.reset() and "
    "start with the prompt again"
)
TURN_BROKEN_OFF = (
    "an answer broke off after {:,} tokens of its turn, and what was evicted meanwhile, or slid "
    "out of a window, cannot come back; call cache.reset() and start with the prompt again, or go "
    "on from a copy.deepcopy(cache) made before; to end an answer early, use stopping_criteria"
)


@dataclass(slots=True, eq=False)
class _Running:
    """The forward that runs.

    Attributes
    ----------
    batch : Batch
    every : int
        Tokens between two evictions, for which layers get room.
    planned : dict of int to list of (Eviction, ndarray)
        Evictions of each layer once it has attended.
    observing : list of Eviction
        Rows whose policies note a chunk after which a layer evicts nothing.
    noted : int
        Latest queries of each row that are kept of it; 0 for none.
    left : int
        Those of them that are left once policies have looked at a chunk of the prompt.
    """

    batch: Batch
    every: int
    planned: dict[int, list[tuple[Eviction, IntArray]]]
    observing: list[Eviction]
    noted: int
    left: int = 0


class _Read:
    """Tokens and positions of a prompt that the model is to read again.

    Attributes
    ----------
    positions : Tensor of int64, (rows, n_columns)
        On the host.
    tokens : Tensor of int64, (rows, n_columns), or (rows, n_columns, hidden_size)
        Its tokens or embeddings.
    """

    def __init__(self) -> None:
        self.positions = self.tokens = torch.empty(0, 0, dtype=torch.long, device="cpu")

    def add(self, arguments: Mapping[str, Any], batch: Batch) -> None:
        """Note a forward of the prompt; one that has failed may come again."""
        seen, end = batch.seen, batch.seen + batch.new
        read = refusals.new_tokens(arguments).detach()
        if seen and self.tokens.ndim != read.ndim:
            raise UnsupportedRequestError(
                "a scorer has the model repeat a prompt, but its chunks came as token ids and as "
                "inputs_embeds; send all in one form, or choose another scorer"
            )
        self.tokens = torch.cat([self.tokens[:, :seen], read], dim=1) if seen else read
        positions = arguments.get("position_ids")
        if not isinstance(positions, Tensor):
            positions = torch.arange(seen, end, device="cpu")[None]
        positions = positions.cpu()  # (n_axes, rows, n) where a model has several axes
        positions = positions.reshape(-1, *positions.shape[-2:]).amax(dim=0).expand(batch.rows, -1)
        before = self.positions[:, :seen]
        self.positions = torch.cat([before, positions], dim=1) if seen else positions

    def next_position(self, row: int, columns: Any) -> int:
        """Return the position of a row's next token."""
        own = self.positions[row, columns]
        return int(own.max()) + 1 if len(own) else 0


class BudgetCache(Cache, hooks.HookedCache):
    """Keeps, of a prompt, the entries that a budget profile grants each layer and KV head.

    While the prompt runs, each full-attention layer first attends to all it holds, then the
    policy ranks the entries and only the budget stays: sinks, window and, for each row and KV
    head, its own best. Evicted entries are freed before the next layer runs. Where a policy has to
    see the whole prompt, all layers evict at its end. Tokens that follow, turns and answers, any
    number at a time, are added; whenever ``decode_every`` have followed, and at the end of a turn,
    kept and new entries are ranked together, within the budgets of all tokens seen.
    Positions stay true: `get_seq_length` is the number of tokens seen. Make one with
    `kvalloc.make_cache`; budgets, entries and masks belong to this object and not to the model, so
    any number of caches can be interleaved.

    Attributes
    ----------
    rows : list of Row
        The texts of its batch; none before the first forward.
    extensions : list of Extension
        What listens to it.

    Notes
    -----
    Rows of a batch may have different lengths, padded on either side: each gets the budgets of
    its own length, and padding is neither kept nor counted. A prompt may come in chunks that are
    announced (``prompt_tokens``). `reorder_cache` (beam search), `crop` back to the end of the
    prompt, `copy.deepcopy` and `reset` work. Sliding-window layers are transformers' own.
    """

    layers: list[Any]  # each with keys: `make_layers` refuses others
    read_ids: Tensor | None = None  # the first tokens that it has seen, as far as they are known
    decision_seconds: float | None = None  # what deciding its budgets took, if they were
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
        self._spent = False  # whether its budgets were decided from a prompt that is gone
        self._forget()
        hooks.retain(self, decoder)

    def _forget(self) -> None:
        self.rows: list[Row] = []
        self._running: _Running | None = None
        self._read = _Read()
        self._broken: str | None = None
        self._in_pieces = False  # while pieces of a forward run, all but the last
        self._checks = Checks()

    def __repr__(self) -> str:
        """Return model, tokens and share; a line for each layer would fill screens."""
        stored = self.share_text if self.batch else "empty"
        state = "" if self.interrupted is None else ", interrupted"
        return (
            f"BudgetCache({self._name}, rows={self.batch}, "
            f"tokens={self.get_seq_length()}, {stored}{state})"
        )

    # Its rows

    @property
    def stores(self) -> dict[int, Store]:
        """Its layers of full attention, by their number."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, Store)}

    @property
    def profile(self) -> BudgetProfile:
        """Profile of the first row; its detail tells of all ways of keeping rows."""
        first = self.rows[0].profile if self.rows else self.methods[0].profile
        details = dict.fromkeys(method.profile.detail for method in self.methods)
        if len(details) < 2:
            return first
        return first.replace(detail=one_line("; ".join(details), 100))

    @property
    def row_profiles(self) -> tuple[BudgetProfile, ...]:
        """Profile of each row, ``(batch,)``."""
        return tuple(row.profile for row in self.rows)

    @property
    def options(self) -> CacheOptions:
        """Options by which it was made."""
        return self.methods[0].options

    @property
    def prompt_complete(self) -> bool:
        """Whether the whole prompt has been seen, so that all that comes now follows it."""
        return self.door.complete

    @property
    def interrupted(self) -> str | None:
        """Reason why only `reset` helps: a forward failed half-way; None if none did."""
        return self._broken or (None if self._running is None else HALF_WAY)

    @property
    def reduced(self) -> bool:
        """Whether any entry has been evicted, padding included."""
        return any(store.kept is not None for store in self.stores.values())

    @property
    def batch(self) -> int:
        """Rows that are stored; 0 before the first forward."""
        return next(iter(self.stores.values())).rows

    # What it stores

    @property
    def retained_bytes(self) -> int:
        """Bytes allocated now: every storage once and in full, positions too."""
        return sum(int(storage.nbytes()) for storage, _, _ in storages(self.tensors()))

    @property
    def share(self) -> float:
        """Share of a cache at 16 bits a number of all tokens seen that is stored.

        Positions of kept entries count, sliding layers do not; 0 before the first forward.
        """
        if not self.batch:
            return 0.0
        shape = self.methods[0].profile.shape
        tokens = sum(row.seen for row in self.rows)
        whole = shape.bytes_per_entry * shape.n_kv_heads * len(shape.full_layers)
        return bytes_at_16_bits(self.layers) / max(1, tokens * whole)

    @property
    def share_text(self) -> str:
        """Requested share, if it is known, and stored bytes."""
        return share_text(self.retained_bytes, self.full_bytes, self.profile.target_text)

    @property
    def full_bytes(self) -> int:
        """Bytes of a cache at 16 bits a number of all tokens seen; padding does not count.

        Of a sliding layer the last ``sliding_window - 1`` entries count, and one more where, after
        a decoded token, it is still allocated, and in `retained_bytes` as well.
        """
        if not self.batch:
            return 0
        shape = self.methods[0].profile.shape
        shape = replace(shape, dtype_bytes=self.layers[0].keys.dtype.itemsize)
        slid_out: int = sum(
            tensor.untyped_storage().nbytes() - tensor.nbytes
            for layer in self.layers
            if not isinstance(layer, Store)
            for tensor in layer_tensors(layer)
        )
        return sum(full_bytes(shape, row.seen) for row in self.rows if row.seen) + slid_out

    @property
    def kept_tokens(self) -> IntArray:
        """Entries stored now, ``(n_layers, n_kv_heads)``; where rows differ, those of the most."""
        counts: IntArray = self.kept_tokens_by_row.max(axis=0, initial=0)
        return counts

    @property
    def kept_tokens_by_row(self) -> IntArray:
        """Entries stored now, ``(batch, n_layers, n_kv_heads)``."""
        heads = self.methods[0].profile.shape.n_kv_heads
        counts: IntArray = np.zeros((self.batch, len(self.layers), heads), dtype=np.int64)
        tokens = self._tokens
        for index, layer in enumerate(self.layers if self.batch else ()):
            own = layer.counts(tokens) if isinstance(layer, Store) else layer.keys.shape[-2]
            counts[:, index] = own
        return counts

    @property
    def _tokens(self) -> IntArray:
        """Tokens that each row has seen, (rows,)."""
        return np.array([row.seen for row in self.rows], dtype=np.int64)

    def tensors(self) -> Iterator[Tensor]:
        """Return all K and V tensors."""
        return (tensor for layer in self.layers for tensor in layer_tensors(layer))

    def kept_indices(self, layer: int) -> Tensor:
        """Original positions of the prompt's entries that a layer keeps.

        While a prompt arrives in chunks, of all that has come of it; later also of the tokens that
        followed up to the latest eviction.

        Parameters
        ----------
        layer : int
            A full-attention layer.

        Returns
        -------
        Tensor of int32, (batch, n_kv_heads, n_kept)
            Columns of the input in increasing order; -1 beyond the end of a head that keeps fewer
            than another. These four bytes an entry are the cache's own book-keeping and do not
            count as K or V bytes.

        Raises
        ------
        InputError
            If the layer is a sliding one, or no prompt has been seen.
        """
        store = self.layers[layer]
        if not isinstance(store, Store):
            raise InputError(f"layer {layer} is a sliding-window layer: it keeps the last tokens")
        if not self.batch or self.door.prompt_columns is None:
            raise InputError("the cache has seen no prompt yet; run the model with it first")
        prompt = min(self.door.prompt_columns, store.seen)
        found, heads = [], int(store.keys.shape[1])
        for row, seen in enumerate(self._tokens.tolist()):
            latest = 0 if store.tail is None else seen - int(store.tail.lengths[row])
            # after the prompt, where decoding evicts as well
            end = max(self.door.count(row, prompt), latest)
            new = torch.arange(latest, end, dtype=torch.int32, device=store.keys.device)
            if store.kept is None:
                kept = [new] * heads
            else:
                _, _, positions = store.kept.padded(np.array([row]))
                lengths = store.kept.lengths[row].tolist()
                kept = [
                    torch.cat([own[:length], new])
                    for own, length in zip(positions[0], lengths, strict=True)
                ]
            found += [self.door.in_columns(row, own) for own in kept]
        padded = nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-1)
        return padded.view(len(self.rows), heads, -1).int()

    # What the hooks call

    def ahead(
        self, decoder: nn.Module, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], Mapping[str, Any]]:
        """Run the pieces of a forward, all but the last.

        It is cut where the memory does not take it whole, and where extensions ask for it.

        Returns
        -------
        list
            The decoder's outputs.
        mapping
            Arguments of the last piece.
        """
        outputs = list[Any]()
        if self._in_pieces:
            return outputs, arguments
        for one in self.extensions:
            arguments = one.begin(self, arguments)
        seen = self.get_seq_length()
        end = seen + refusals.new_tokens_shape(arguments)[1]
        columns = {column for one in self.extensions for column in one.cuts(self, end)}
        columns.update(self.cuts(seen, end))
        _, ready = shown(arguments)
        if columns and ready:
            raise UnsupportedRequestError(
                "a forward with an attention mask that is not causal, given or made by the model "
                f"around its images, cannot be read in pieces; leave out {option('memory')}, or "
                "tokens that may be taken back"
            )
        self._in_pieces = True
        try:
            for column in sorted(columns):
                new = column - self.get_seq_length()
                outputs.append(decoder(**part(arguments, slice(new), column)))
                arguments = part(arguments, slice(new, None))
                for one in self.extensions:
                    one.read(self)
                self.catch_up()
        finally:
            self._in_pieces = False
        return outputs, arguments

    def cuts(self, seen: int, end: int) -> Iterator[int]:
        """Yield the columns where a forward is cut since the memory does not take it whole."""
        if self.door.complete and (free := self._free_tokens()) is not None and end - seen > free:
            row = self.rows[0]
            start = seen - (row.seen - row.evicted_at)
            columns = plan.cuts(row, self.memory_of(row), start, end)
            yield from (column for column in columns if column > seen)

    def begin_forward(
        self, decoder: nn.Module, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Check a forward before it runs, and plan its evictions.

        Returns
        -------
        mapping or None
            Arguments to change: the mask of known padding where the caller gave none, for the
            layers that are transformers' own and may still store some.
        """
        if self.decoder() is not decoder:
            raise ModelMismatchError(
                f"this cache was made for another {self._name} object than the "
                f"{type(decoder).__name__} that it was given to; make one with "
                "kvalloc.make_cache(model, profile) for this model"
            )
        if self.interrupted is not None:
            raise UnsupportedRequestError(self.interrupted)
        refusals.check_forward(decoder, arguments, self.batch)
        seen, shape = self.get_seq_length(), refusals.new_tokens_shape(arguments)
        self._check_turn(decoder, seen, shape[1])
        columns, ready = shown(arguments)
        if ready and self.reduced:
            raise UnsupportedRequestError(
                "an attention mask that is not causal, given or made by the model around its "
                "images, does not fit layers that keep different entries; pass a 2-D "
                "attention_mask or none, and images in the first prompt alone"
            )
        columns = None if ready and self.door.complete else columns
        may_change = self.door.complete and not self.reduced
        batch = self.door.enter(shape, seen, columns, may_change=may_change)
        try:
            if not batch.follows:
                running = self._begin_prompt(batch, arguments)
            else:
                running = _Running(batch, self._every(), {}, [], self._noted(batch))
        except BaseException:
            self.door.abandon()
            raise
        for layer, store in self.stores.items():
            store.fresh = layer in running.planned
        self._running = running
        if (
            ready
            or not batch.hides
            or all(isinstance(layer, Store) and layer.kept is not None for layer in self.layers)
        ):
            return None
        assert self.door.visible is not None
        return {"attention_mask": self.door.visible.to(self.layers[0].device, torch.long)}

    def _check_turn(self, decoder: nn.Module, seen: int, new: int) -> None:
        refusals.check_goes_on(seen + new, seen)
        limit = context_limit(decoder)
        if seen and new > 1 and limit is not None and seen + new > limit:
            raise InputError(
                f"{seen} tokens in the cache and {new} that follow are beyond the {limit} tokens "
                "that the model was made for; shorten the turn or begin a new conversation"
            )

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        """Run one layer's attention over all that it holds; then evict."""
        store = self.layers[states.layer]
        if not isinstance(store, Store):
            output = compute(states.mask)
            _free_slid_out(store, states)
            return output
        running = self._running
        assert running is not None
        batch, queries = running.batch, states.queries
        if store.kept is None or store.tail is None:
            output = compute(states.mask)
            if running.noted or running.planned or running.observing:
                queries = batch.aligned(queries)
        else:
            queries = batch.aligned(queries)
            output = self._answer(store, replace(states, queries=queries), compute, batch)
        self._attended(store, states, queries.detach(), running)
        return output

    def _answer(self, store: Store, states: AttentionStates, compute: Compute, batch: Batch) -> Any:
        assert store.kept is not None
        assert store.tail is not None
        if batch.new == 1:
            for one in self.extensions:
                if (found := one.answer(self, store, states, compute)) is not None:
                    return found
        starts = batch.starts(store.tail.starts, states.queries.device)
        return batch.in_columns(attend(AttentionCall.of(states, starts), store.kept)), None

    def _attended(
        self, store: Store, states: AttentionStates, queries: Tensor, running: _Running
    ) -> None:
        """Note queries and evict, once a layer has attended to all that it holds."""
        layer, batch = states.layer, running.batch
        if store.template is None:
            store.template = _without_tokens(states)
        if not batch.follows:
            # a second look, at a model whose probe failed (`kvalloc.models.probe`)
            pairs = (states.keys, store.keys), (states.values, store.values)
            if not all(given is own or given.is_set_to(own) for given, own in pairs):
                raise UnsupportedModelError(
                    f"layer {layer} attends to other keys or values than its cache returned, so "
                    "nothing can be evicted or rounded; use this model with its full cache"
                )
        if running.noted:
            store.notes.queries.add(queries, batch.lengths, running.noted)
            store.notes.noted_until = store.seen
        with self._checks.collected():  # the host reads once a forward what it has to know
            planned = running.planned.get(layer, ())
            for eviction, targets in planned:
                self._evict(eviction, {layer: targets})
            gone = np.array([row for eviction, _ in planned for row in eviction.rows], dtype=int)
            for eviction in running.observing:
                if (rest := eviction.without(gone)) is not None:
                    with without_autocast(store.keys):
                        rest.observe(layer, store)
            if planned or running.observing:
                store.notes.queries.trim(running.left)

    def end_forward(self, *, completed: bool) -> None:
        """Clean up after a forward, also a failed one."""
        running, self._running = self._running, None
        if running is None:  # it was interrupted, and `reset` has tidied up before this
            return
        batch = running.batch
        if not completed:
            self._failed(batch)
            return
        with self._half_way():
            pass  # what was noted in its layers
        tokens = self.door.tokens(batch)
        self.door.commit(batch)
        pairs = zip(self.rows, tokens.tolist(), strict=True)
        self.rows = [replace(row, seen=seen) for row, seen in pairs]
        if batch.completes:
            self._end_prompt()
        elif batch.follows and not any(one.holds for one in self.extensions):
            self.catch_up()

    def _failed(self, batch: Batch) -> None:
        """Clean up after a forward that failed: a turn that broke off was not read."""
        self._checks = Checks()
        self.door.abandon()
        for store in self.stores.values():
            store.fresh = False
            if batch.follows and store.seen > batch.seen:
                store.take_back(store.seen - batch.seen, batch.lengths)
                if store.notes.noted_until > batch.seen:
                    store.notes.queries.undo()
                    store.notes.noted_until = batch.seen
        if {layer.get_seq_length() for layer in self.layers} != {batch.seen}:
            self._broken = HALF_WAY
        elif not batch.seen:
            self.rows = []

    @contextmanager
    def _half_way(self) -> Iterator[None]:
        """Mark the cache as broken if anything inside fails; read the collected checks."""
        self._broken = HALF_WAY
        with self._checks.collected():
            yield
        self._checks.read()
        self._broken = None

    # A prompt

    def _new_rows(self, batch: Batch) -> list[Row]:
        if self._spent:
            raise UnsupportedRequestError(
                "the budgets of this cache were decided from another prompt; make a new cache"
            )
        times, rest = divmod(batch.rows, len(self.methods))
        if rest or not times:
            raise UnsupportedRequestError(
                f"the budgets were decided for {len(self.methods)} rows, but this input has "
                f"{batch.rows}; call cache.reset() and decide for these rows"
            )
        prompts = self.door.prompt_tokens(batch)
        rows = [method for method in self.methods for _ in range(times)]
        return [
            Row(
                method=method,
                profile=method.profile,
                holds=method.holds(in_chunks=not batch.completes),
                prompt=prompt,
            )
            for method, prompt in zip(rows, prompts.tolist(), strict=True)
        ]

    def _begin_prompt(self, batch: Batch, arguments: Mapping[str, Any]) -> _Running:
        """Plan the evictions of each layer once it has read a forward of the prompt."""
        rows = self.rows if batch.seen else self._new_rows(batch)
        for row in rows if not batch.seen else ():
            _check_chunks(row, batch)
        held = np.array([row.holds for row in rows])
        now = self.door.tokens(batch)
        prompts = self.door.prompt_tokens(batch)
        rows = [replace(row, prompt=n) for row, n in zip(rows, prompts.tolist(), strict=True)]
        if any(row.holds and row.method.policy.scorer.later for row in rows):
            self._read.add(arguments, batch)
            self._check_room(rows, batch)
        latest = max(
            (wanted_queries(row.method.policy, row.prompt, whole=row.holds) for row in rows),
            default=0,
        )
        running = _Running(batch, self._every(), {}, [], noted=latest, left=latest)
        there, width = self._there(batch), batch.seen + batch.new
        for group in alike(rows, np.flatnonzero(~held)):
            first = rows[group[0]]
            method, policy = first.method, first.method.policy
            if (batch.seen or not batch.completes) and policy.combines:
                raise UnsupportedRequestError(
                    f"the policy {policy.name} merges entries, for which it has to see the whole "
                    "prompt; send it in one piece, or choose another policy"
                )
            widths = first.widths if batch.completes else method.halves()
            rounded = frozenset(widths if batch.completes else ())
            every = self._eviction(
                rows,
                group,
                policy,
                tokens=now[group],
                prompt=prompts[group],
                unobserved=batch.lengths[group],
                widths=widths,
                remember=not batch.completes or method.goes_on_observing,
                more=not batch.completes,
            )
            goes = [
                plan.prompt_targets(
                    rows[row],
                    int(prompts[row]),
                    there[row],
                    padded=int(now[row]) < width,
                    rounded=rounded,
                )
                for row in group.tolist()
            ]
            for layer in {layer for own in goes for layer in own}:
                some = np.array([layer in own for own in goes])
                one = every.without(group[~some])
                assert one is not None
                targets = np.stack([own[layer] for own in goes if layer in own])
                for listener in self.extensions:
                    listener.planned({layer: targets})
                running.planned.setdefault(layer, []).append((one, targets))
            if every.remember:
                running.observing.append(every)
            if policy.observes:
                running.noted = max(running.noted, batch.new)
        for row in (row for row in rows if row.holds and self.extensions):
            n = np.full_like(row.profile.budgets, row.prompt)
            goal = plan.prompt_targets(row, row.prompt, n, padded=False, rounded=frozenset())
            for listener in self.extensions:
                listener.planned({layer: own[None] for layer, own in goal.items()})
        self.rows = rows
        if not running.planned and not running.observing and not held.any():
            running.noted = 0
        return running

    def _there(self, batch: Batch) -> IntArray:
        """Return the entries of each row, layer and head once a forward has been read."""
        heads = self.methods[0].profile.shape.n_kv_heads
        new = np.zeros((batch.rows, len(self.layers), heads), dtype=np.int64)
        new += batch.lengths[:, None, None]
        return new + self.kept_tokens_by_row if batch.seen else new

    def _check_room(self, rows: Sequence[Row], batch: Batch) -> None:
        """Refuse a prompt that does not fit the model's limit with its second read."""
        decoder = self.decoder()
        if decoder is None or (limit := context_limit(decoder)) is None:
            return
        left = [row.prompt for row in rows] - self.door.tokens(batch)
        for number, row in enumerate(rows):
            if row.holds and (later := row.method.policy.scorer.later) is not None:
                next_position = self._read.next_position(number, self.door.columns(number))
                check_context(later, [next_position + int(left[number])], row.prompt, limit)

    def _eviction(
        self, rows: Sequence[Row], among: IntArray, policy: Any, **event: Any
    ) -> Eviction:
        own = rows[among[0]].profile.policy
        return Eviction(
            rows=among,
            policy=policy,
            sinks=own.sinks,
            window=own.window,
            door=self.door,
            **event,
        )

    def _evict(self, eviction: Eviction, targets: Mapping[int, IntArray]) -> None:
        """Evict in these layers; in all together, where their heads compete."""
        stores, profiles = self.stores, [self.rows[row].profile for row in eviction.rows]
        with without_autocast(self.layers[0].keys):
            if targets and profiles[0].by_prompt:
                targets = eviction.hand_out(stores, targets, profiles)
            for one in self.extensions:
                one.planned(targets)
            for layer, own in targets.items():
                eviction.evict(layer, stores[layer], own)

    @torch.no_grad()
    def _end_prompt(self) -> None:
        """Evict in rows that stayed whole until now, after a second read if they need one."""
        held, tokens = np.array([row.holds for row in self.rows]), self._tokens
        for group in alike(self.rows, np.flatnonzero(held)):
            method = self.rows[group[0]].method
            padded = tokens < self.get_seq_length()
            there = self.kept_tokens_by_row
            goes = {
                row: found
                for row in group.tolist()
                if (
                    found := plan.prompt_targets(
                        self.rows[row],
                        int(tokens[row]),
                        there[row],
                        padded=bool(padded[row]),
                        rounded=frozenset(self.rows[row].widths),
                    )
                )
            }
            if not goes:
                continue
            some = np.array([*goes])
            layers = sorted({layer for found in goes.values() for layer in found})
            with self._half_way():
                if method.policy.scorer.later is not None:
                    self._read_again(some, method.policy.scorer, layers)
                eviction = self._eviction(
                    self.rows,
                    some,
                    method.policy,
                    tokens=tokens[some],
                    prompt=tokens[some],
                    widths=self.rows[some[0]].widths,
                    remember=method.goes_on_observing,
                    whole=True,
                )
                targets = {
                    layer: np.stack([goes[row].get(layer, there[row, layer]) for row in goes])
                    for layer in layers
                }
                self._evict(eviction, targets)
        self._read = _Read()
        for store in self.stores.values():
            store.notes = Notes(observed=store.notes.observed)
        self.rows = [plan.evicted(row, ranked=True) for row in self.rows]

    def _read_again(self, rows: IntArray, scorer: Scorer, layers: Sequence[int]) -> None:
        """Let the model read the prompts of rows once more; the scorer notes what it sees."""
        decoder = self.decoder()
        assert decoder is not None, "it has just read the prompt"
        sinks = self.rows[rows[0]].profile.policy.sinks
        alike_rows: dict[object, list[int]] = {}
        for row in rows.tolist():
            alike_rows.setdefault(self.door.place(row), []).append(row)
        stores = self.stores
        for each in alike_rows.values():
            group = np.array(each)
            columns = self.door.columns(each[0])
            held = []
            for index, layer in enumerate(self.layers):
                if index in stores:
                    found = layer.candidates(group, self.door.columns)
                    held.append((found.keys, found.values, False))
                    continue
                slid = self.get_seq_length() - int(layer.keys.shape[2])
                every = torch.arange(self.get_seq_length(), device="cpu")[columns] - slid
                at = every[every >= 0].to(layer.keys.device)
                keys, values = (rows_of(own, group)[:, :, at] for own in (layer.keys, layer.values))
                held.append((keys, values, True))
            prompt = HeldPrompt(
                decoder=decoder,
                layers=held,
                next_positions=torch.tensor(
                    [self._read.next_position(row, columns) for row in each], device="cpu"
                ),
                read=rows_of(self._read.tokens, group)[:, columns],
            )
            assert scorer.later is not None
            noted = read_again(prompt, scorer, scorer.later, layers, sinks=sinks)
            for index, own in noted.items():
                for place, row in enumerate(each):
                    stores[index].notes.later[row] = of_row(own, place)

    # What follows a prompt

    def memory_of(self, row: Row) -> int | None:
        """Return the bytes that a row may take."""
        memory = row.method.options.memory
        return None if memory is None else memory // self._sharing(row)

    def _sharing(self, row: Row) -> int:
        """Return among how many rows a row's method divides its memory."""
        return sum(own.method is row.method for own in self.rows)

    def _free_tokens(self) -> int | None:
        """Return how many more tokens the memory has room for; None without one."""
        memory = [own for row in self.rows if (own := self.memory_of(row)) is not None]
        if not memory or len(memory) < len(self.rows):
            return None
        each = plan.token_bytes(self.methods[0].profile) * len(self.rows)
        free: int = sum(memory) - self.retained_bytes
        return free // each

    def _every(self) -> int:
        """Return the tokens between two evictions for which a layer has room, at most."""
        rows = [row for row in self.rows if row.method.goes_on]
        if not rows:
            return plan.MIN_INTERVAL
        every = min(plan.interval(row, self.memory_of(row), row.evicted_at) for row in rows)
        if (free := self._free_tokens()) is None or not self.door.complete:
            return every
        tail = next(iter(self.stores.values())).tail
        return max(min(every, (0 if tail is None else tail.tokens) + free), 1)

    def _noted(self, batch: Batch) -> int:
        """Return how many latest queries are kept of a forward that follows the prompt."""
        end, wanted = batch.seen + batch.new, 0
        for row in self.rows:
            after = row.method.after
            if not row.method.goes_on:
                continue
            back = after.observes or any(one.holds for one in self.extensions)
            wanted = max(wanted, end if back else after.query_rows(end))
        return wanted

    def catch_up(self) -> None:
        """Evict in rows in which enough tokens have followed the latest eviction."""
        if not self.door.complete:
            return
        full = self._is_full()
        self._settle(
            [
                number
                for number, row in self._followed()
                if full
                or row.seen - row.evicted_at
                >= plan.interval(row, self.memory_of(row), row.evicted_at)
            ]
        )

    def _followed(self) -> Iterator[tuple[int, Row]]:
        """Yield rows that evict after their prompt, too, and of which tokens have followed."""
        for number, row in enumerate(self.rows):
            if row.method.goes_on and row.seen > row.evicted_at:
                yield number, row

    def _is_full(self) -> bool:
        """Return whether the memory has no room for one more token."""
        tail = next(iter(self.stores.values())).tail
        if all(row.method.options.memory is None for row in self.rows):
            return False
        free = None if tail is not None and tail.has_room else self._free_tokens()
        return free is not None and free < 1

    def end_turn(self) -> None:
        """Keep no more than the budget of all tokens seen: a turn has been read and answered.

        Kept and new entries are ranked together. `kvalloc.apply` does so after each
        ``generate()``; without it, it happens every `decode_every` tokens.

        Raises
        ------
        UnsupportedRequestError
            If the cache is interrupted.
        """
        if self.interrupted is not None:
            raise UnsupportedRequestError(self.interrupted)
        if self.door.complete:
            self._settle([number for number, _ in self._followed()])

    @torch.no_grad()
    def _settle(self, rows: Sequence[int]) -> None:
        """Go back to the budgets of all tokens that these rows have seen."""
        stores = self.stores
        noted = [store.notes.queries.counts for store in stores.values()]
        queries = np.min([np.broadcast_to(own, len(self.rows)) for own in noted], axis=0)
        due = np.array(
            [
                number
                for number in rows
                if queries[number] or not self.rows[number].method.after.query_rows(1)
            ],
            dtype=np.int64,
        )
        if not len(due):  # nobody ranks
            return
        full, tokens = [*stores], self._tokens
        counts = np.stack([store.counts(tokens) for store in stores.values()], axis=1)
        latest = np.stack([store.latest(tokens) for store in stores.values()], axis=1)[:, :, None]
        goals: dict[int, tuple[Row, bool, IntArray, IntArray]] = {}
        for number in due.tolist():
            row, new, kept = self.rows[number], latest[number], (counts - latest)[number]
            left = self._left(row)
            profile = plan.grown(row, left)
            changed = profile is not row.profile
            row = replace(row, profile=profile)
            room = plan.turn_budgets(row, left)[full]
            alone = not changed and plan.new_alone(row, room, kept, new)
            there = np.broadcast_to(new, kept.shape) if alone else kept + new
            protected = profile.policy.window if alone else profile.policy.protected_tokens
            shared = profile.by_prompt
            targets = plan.turn_targets(
                room - kept if alone else room, there, protected=protected, shared=shared
            )
            padded = [store.kept is None and row.seen < store.seen for store in stores.values()]
            anew = [
                shared
                or layer in row.widths
                or changed
                or (targets[i] < there[i]).any()
                or padded[i]
                for i, layer in enumerate(full)
            ]
            goals[number] = row, alone, targets, np.array(anew)
            self.rows[number] = row
        groups = [
            np.array([number for number in group.tolist() if goals[number][1] == alone])
            for group in alike(self.rows, due)
            for alone in (False, True)
        ]
        with self._half_way():
            for group in groups:
                if len(group):
                    self._settle_alike(group, goals, full)
        for store in stores.values():
            store.notes.queries.forget(due)
        for number, (row, alone, _, _) in goals.items():
            self.rows[number] = plan.evicted(row, ranked=not alone)

    def _settle_alike(self, group: IntArray, goals: Mapping[int, Any], full: list[int]) -> None:
        """Evict in rows of one method, in all of which kept entries stay, or in none."""
        row, alone, _, _ = goals[int(group[0])]
        targets: dict[bytes, tuple[list[int], dict[int, list[IntArray]]]] = {}
        for number in group.tolist():
            _, _, own, anew = goals[number]
            numbers, by_layer = targets.setdefault(anew.tobytes(), ([], {}))
            numbers.append(number)
            for place in np.flatnonzero(anew).tolist():
                by_layer.setdefault(full[place], []).append(own[place])
        for numbers, by_layer in targets.values():
            some = np.array(numbers)
            eviction = self._eviction(
                self.rows,
                some,
                row.method.after,
                tokens=self._tokens[some],
                prompt=self._tokens[some],
                widths=row.widths,
                remember=row.method.goes_on_observing,
                behind=alone,
            )
            self._evict(eviction, {i: np.stack(own) for i, own in by_layer.items()})

    def _left(self, row: Row) -> int | None:
        """Return the bytes that the memory leaves for a row's entries.

        Beside them stand sliding layers, the tail, and lists of tiles.
        """
        if (memory := self.memory_of(row)) is None:
            return None
        slid = (layer for layer in self.layers if not isinstance(layer, Store))
        taken: int = sum(own.nbytes for layer in slid for own in layer_tensors(layer))
        taken = -(-taken // len(self.rows))
        if self.layers[0].keys.is_cuda:  # where a kernel reads by lists
            taken += WORK_BYTES * row.profile.budgets.size
        tokens = plan.interval(row, memory, row.seen)
        return memory - taken - tokens * plan.token_bytes(row.profile)

    # What transformers calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values (called by the model's attention).

        Raises
        ------
        ModelMismatchError
            If the caller is not a forward of the cache's own model.
        """
        running = self._running
        if running is None:
            raise ModelMismatchError(
                f"this cache works only inside a forward of the {self._name} object that it was "
                "made for, and not after a reset within one; make one with "
                "kvalloc.make_cache(model, profile) for the model at hand"
            )
        for one in self.extensions:
            one.appended(layer_idx, key_states, value_states)
        if isinstance(store := self.layers[layer_idx], Store):
            return store.update(key_states, value_states, running.batch, every=running.every)
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found[0], found[1]

    def reset(self) -> None:
        """Forget prompt and tokens, and free their storage; the next forward is a new prompt."""
        self.read_ids = None
        self._spent |= bool(self.rows) and any(method.once for method in self.methods)
        for layer in self.layers:
            if not isinstance(layer, Store):
                layer.keys = layer.values = None
                layer.is_initialized = False
            layer.reset()
        self.door.forget()
        for one in self.extensions:
            one.reset()
        self._forget()

    def take_back(self, seen: int) -> None:
        """Forget all tokens after the first ``seen``: a turn that broke off was not read.

        Where something was evicted meanwhile, which cannot come back, the cache is `interrupted`.
        """
        if not seen:
            self.reset()
        elif self.interrupted is None and (more := self.get_seq_length() - seen) > 0:
            try:
                self.crop(-more)
            except UnsupportedRequestError:
                self._broken = TURN_BROKEN_OFF.format(more)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end, at most back to the end of the compressed prompt.

        Parameters
        ----------
        tokens_to_remove : int
            Negative: remove that many tokens. Positive: keep that many.

        Raises
        ------
        UnsupportedRequestError
            If the cut would reach into a reduced prompt, or into tokens that a sliding layer has
            dropped.
        """
        seen = self.get_seq_length()
        end = min(tokens_to_remove if tokens_to_remove > 0 else seen + tokens_to_remove, seen)
        end = max(end, 0)
        for one in self.extensions:
            one.crop(self, end)
        seen = self.get_seq_length()
        gone = np.array([row.seen - self.door.count(i, end) for i, row in enumerate(self.rows)])
        self._check_crop(seen - end, gone)
        if seen and not end:
            return self.reset()
        if remove := seen - end:
            for layer in self.layers:
                if isinstance(layer, Store):
                    layer.take_back(remove, gone)
                    layer.notes.queries.cut(gone)
                    layer.notes.noted_until = end
                else:
                    layer.crop(-remove)  # not every layer of transformers' own knows what to keep
            self.door.crop(end)
            self.rows = [
                replace(row, seen=row.seen - n, evicted_at=min(row.evicted_at, row.seen - n))
                for row, n in zip(self.rows, gone.tolist(), strict=True)
            ]
        for one in self.extensions:
            one.cropped(self)
        if self.read_ids is not None:
            self.read_ids = self.read_ids[:, :end]

    def _check_crop(self, remove: int, gone: IntArray) -> None:
        """Refuse to take columns back if that cannot be right."""
        if self.get_seq_length() and not self.door.complete:
            raise UnsupportedRequestError(
                "cannot crop before the prompt is complete; reset the cache and start again"
            )
        if self.interrupted is not None:
            raise UnsupportedRequestError(self.interrupted)
        for layer in self.layers if remove > 0 else ():
            if isinstance(layer, Store):
                if layer.tail is not None and (gone > layer.tail.lengths).any():
                    followed = int(layer.tail.lengths.min())
                    raise UnsupportedRequestError(
                        f"cannot crop {remove} tokens: {followed} have followed the latest "
                        "eviction, and what went there cannot come back; crop a "
                        "copy.deepcopy(cache) that was made before, or read the text anew"
                    )
            elif not getattr(layer, "record_past", False) and (
                layer.get_seq_length() >= layer.sliding_window
            ):
                raise UnsupportedRequestError(
                    "cannot crop: a sliding-window layer has already dropped the tokens that "
                    "would come back into its window; make a new cache"
                )

    def activate_past_recording(self, given: int | None = None) -> None:
        """Let each forward from now on end in tokens that a `crop` may take back.

        Parameters
        ----------
        given : int, optional
            Columns that are not taken back, where the next forward holds both; by default the
            prompt that was announced, or what the cache has seen.

        Raises
        ------
        UnsupportedRequestError
            If nothing that listens to the cache can do so.
        """
        served = [one.record(self, given) for one in self.extensions]
        if not any(served):
            raise UnsupportedRequestError(
                "this cache takes nothing back; make it with kvalloc.make_cache"
            )

    def adopt(self, other: BudgetCache) -> None:
        """Hold what another cache of the same model holds, which is not used any more."""
        self.layers, self.rows, self.door = other.layers, other.rows, other.door

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue what row ``beam_idx[i]`` holds (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, at least once; see `batch_select_indices`."""
        rows = torch.arange(self.batch, device="cpu")
        self.batch_select_indices(rows.repeat_interleave(max(repeats, 0)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows; one may be kept more than once. An empty cache stays as it is.

        Raises
        ------
        InputError
            If no row is selected, or one that is not there.
        """
        if not self.batch:
            return
        rows = refusals.selected_rows(indices, self.batch)
        if (ids := self.read_ids) is not None:
            self.read_ids = ids[rows.to(ids.device)] if len(ids) == self.batch else None
        for layer in self.layers:
            layer.batch_select_indices(rows)
        self.door.select(rows)
        self.rows = [self.rows[row] for row in rows.tolist()]
        for one in self.extensions:
            one.selected(rows)

    # What it cannot do

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse, always, to be pickled, or copied by half (`copy.copy`)."""
        raise UnsupportedRequestError(
            "a reduced cache belongs to the model that filled it, which does not go into a "
            "pickle; write it with kvalloc.save_cache and read it with kvalloc.load_cache, or use "
            "copy.deepcopy for another one in memory"
        )

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse, always: evicted layers are small, and their masks are made on their device."""
        raise UnsupportedRequestError(refusals.OFFLOADED)

    def __deepcopy__(self, memo: dict[int, Any]) -> BudgetCache:
        """A cache that goes on from here on its own, e.g. one prompt for several questions."""
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
        memo[id(self._running)] = None
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        for store in clone.stores.values():
            if store.tail is not None:
                store.keys, store.values = store.tail.states
        if self._running is not None:  # no hook and no ``with`` will end it
            clone._running, clone._broken = None, HALF_WAY
        if (decoder := self.decoder()) is not None:
            hooks.retain(clone, decoder)
        return clone


def _check_chunks(row: Row, batch: Batch) -> None:
    """Refuse a prompt in chunks where the memory was decided for one in one piece."""
    if not batch.completes and row.widths and row.method.profile.fits_a_peak:
        raise UnsupportedRequestError(
            f"these budgets were decided for {option('memory')} at its peak, and of a prompt in "
            "chunks nothing is rounded before the last one; send it in one piece, or solve again "
            f"without {option('bits')}"
        )


def _without_tokens(states: AttentionStates) -> AttentionStates:
    """Return the part of a layer's attention that is the same in all forwards of a prompt."""
    queries, keys, values = (  # a view would keep them all alive
        own[:1, :, :0].detach().clone() for own in (states.queries, states.keys, states.values)
    )
    return replace(states, queries=queries, keys=keys, values=values, mask=None)


def _free_slid_out(layer: Any, states: AttentionStates) -> None:
    """Give back the storage of prompt tokens that have left a sliding window.

    transformers keeps a view of the last tokens, whose storage is the whole prompt's. After one
    decoded token it has one entry more than the view, and to free that would copy the whole window
    for each token; it goes with the next one.
    """
    if states.queries.shape[2] == 1:
        return
    for name in ("keys", "values"):
        view: Tensor = getattr(layer, name)
        if view.untyped_storage().nbytes() > view.nbytes:
            setattr(layer, name, view.clone(memory_format=torch.contiguous_format))
