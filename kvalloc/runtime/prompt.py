"""The prompt of a cache: what has arrived of it, what is to stay, and when the rest goes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.accounting.stored import layer_tensors, storages
from kvalloc.errors import UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.models.names import MaskFunction, record_past
from kvalloc.runtime import refusals
from kvalloc.runtime.arrival import Arrival, Step, row_tokens
from kvalloc.runtime.checks import Checks
from kvalloc.runtime.deciding import prompt_rows, row_decisions
from kvalloc.runtime.eviction import Eviction
from kvalloc.runtime.forward import Forward
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.plan import Plan
from kvalloc.runtime.policies.base import EvictionPolicy
from kvalloc.runtime.repetition import WholePrompt, repeat_prompt
from kvalloc.runtime.tail import BLOCK_TOKENS
from kvalloc.runtime.unfinished import Unfinished

REFIT = 0.8
"""Where the memory leaves so much less than the share that the budgets were decided for, others are
decided: fewer entries at fewer bits lose less than the same bits of still fewer entries."""


class Prompt:
    """Follows one prompt of a cache after the other, of rows that are kept in one way.

    A prompt in one forward, of which layers keep fixed budgets:

    1. `begin` checks the forward and asks `_targets_of` how many entries each layer keeps.
    2. In each layer, `attend` lets `Forward.answer` attend to all that is there. `_attended` then
       notes the queries and makes an `Eviction`, whose policy chooses the entries, and
       `BudgetLayer.keep` stores these alone, before the next layer runs.
    3. `end` notes what has come, and `_complete` that the budgets of the prompt are kept.

    Where the schedule says that the prompt stays whole, nothing goes in `attend`, and `_complete`
    lets all layers evict at once. What follows, turns and answers, is settled in
    `kvalloc.runtime.conversation`.

    Parameters
    ----------
    plan : Plan
    layers : list
        The cache's own, a `BudgetLayer` for each layer that can be reduced.
    announced : int or None
        Columns of the prompt, if they were announced.

    Attributes
    ----------
    budget_layers : list of BudgetLayer
        Those that can be reduced.
    arrival : Arrival
        What has come.
    schedule : Schedule
        When entries go of it and of what follows.
    profile : BudgetProfile
        Whose budgets hold: decided ones, where all rows have the same.
    bits : mapping
        Widths of each layer's KV heads by which entries are rounded; see `Plan`.
    decision_seconds : float or None
        What deciding took; None where nothing was decided.
    forward : Forward or None
        That which runs now.
    reader : Reader or None
        Chooses what decoded tokens read.
    whole : WholePrompt or None
        What is known of a prompt that is whole until it is complete; None of one whose layers evict
        while they read it, and once it is complete.
    given : int or None
        Columns behind which drafts may stand; None without any.
    """

    def __init__(self, plan: Plan, layers: list[Any], announced: int | None) -> None:
        self.plan, self.layers = plan, layers
        self.budget_layers = [layer for layer in layers if isinstance(layer, BudgetLayer)]
        self.arrival = Arrival(plan.profile, announced)
        policy = plan.profile.policy
        self.reader = plan.policy.reader(sinks=policy.sinks, window=policy.window)
        self.forget()

    def forget(self) -> None:
        """Get ready for a new prompt."""
        self.arrival.forget()
        self.profile = self.arrival.profile = self.plan.profile
        self.bits = self.plan.bits
        self.schedule = self.plan.schedule(in_chunks=False)
        self.decision_seconds: float | None = None
        self.forward: Forward | None = None
        self.whole: WholePrompt | None = None
        self.given: int | None = None
        self.checks = Checks()  # of the forward or the eviction that runs now
        self._broken: str | None = None

    def forked(self) -> None:
        """Go on as the prompt of a copy of the cache, which no hook and no ``with`` will end."""
        if self.forward is not None:
            self._broken = refusals.HALF_WAY

    # How far it has come

    def grown(self, tokens: int, left: int | None) -> bool:
        """Go by the budgets of a longer text from now on, if those that hold do not suit it.

        Parameters
        ----------
        tokens : int
            Tokens seen, of the shortest row.
        left : int or None
            Bytes that the memory leaves for them in all rows; None without one.
        """
        own, longer = self.profile, self.plan.longer
        if left is None:  # the share of a short text holds a little later
            if (
                longer is None
                or longer is own
                or longer.share_at(tokens) > (longer.target_share or 0)
            ):
                return False
        else:
            within, shape = self.plan.within, own.shape
            wider = shape.plain_bytes_per_entry / shape.bytes_per_entry
            share = left * wider / max(self.token_bytes * tokens, 1)
            if within is None or share > (REFIT * (own.target_share or 0) if self.bits else wider):
                return False
            longer = within(max(min(share, 0.999), 1e-6), tokens)
        self.profile = self.arrival.profile = longer
        self.bits = {index: longer.widths[index] for index in own.shape.full_layers}
        return True

    @property
    def interrupted(self) -> str | None:
        """Why only a reset helps; None where it goes on."""
        return self._broken or (None if self.forward is None else refusals.HALF_WAY)

    @property
    def reduced(self) -> bool:
        """Whether any entry has been evicted, padding included."""
        return any(layer.reduced for layer in self.budget_layers)

    @property
    def batch(self) -> int:
        """Rows that are stored; 0 before the first forward."""
        return self.budget_layers[0].batch

    @property
    def row_profiles(self) -> tuple[BudgetProfile, ...]:
        """Whose budgets each row keeps, (batch,)."""
        decided = self.arrival.row_profiles
        return (self.profile,) * self.batch if decided is None else decided

    @property
    def n_seen(self) -> int:
        """Columns seen."""
        return int(self.layers[0].get_seq_length())

    @property
    def token_bytes(self) -> int:
        """Bytes of a token of each row, as the model makes it."""
        shape = self.profile.shape
        entry = shape.n_kv_heads * shape.plain_bytes_per_entry
        return max(self.batch, 1) * len(shape.full_layers) * entry

    def free_tokens(self, memory: int) -> int:
        """Return how many more tokens so many bytes have room for, beside all that is stored."""
        tensors = (own for layer in self.layers for own in layer_tensors(layer))
        stored = sum(int(storage.nbytes()) for storage, _, _ in storages(tensors))
        return (memory - stored) // self.token_bytes

    def stored_counts(self) -> IntArray:
        """Entries stored now, (batch, n_layers, n_kv_heads)."""
        shape = (self.batch, len(self.layers), self.profile.shape.n_kv_heads)
        counts: IntArray = np.zeros(shape, dtype=np.int64)
        for index, layer in enumerate(self.layers if self.batch else ()):
            counts[:, index] = layer.keys.shape[-2]
            if isinstance(layer, BudgetLayer):
                counts[:, index] += layer.kept_lengths
        return counts

    # One forward

    def begin(self, arguments: Mapping[str, Any], masks: MaskFunction) -> bool:
        """Check a forward before anything of it runs, and prepare the layers for it.

        Returns
        -------
        bool
            Whether layers that are transformers' own have to be told of padding.
        """
        batch, new_tokens = refusals.new_tokens_shape(arguments)
        mask = arguments.get("attention_mask")
        if self.given is not None and self.arrival.complete:
            record_past(self.layers)
        self._decide_on_arrival(arguments)
        whole = self.arrival.complete and not self.reduced
        step = self.arrival.step(self.n_seen, batch, new_tokens, mask, whole=whole)
        targets = {} if step.follows else self._begin_reading(arguments, step)
        interval = self.interval(follows=step.follows)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, BudgetLayer):
                layer.evicts_next, layer.every = index in targets, interval
        self.forward = Forward(
            step=step,
            targets=targets,
            mask_function=masks,
            reader=self.reader,
            full_layers=self.profile.shape.full_layers,
            noted=self.wanted_following(step.seen + step.new_tokens)
            if step.follows and self.schedule.every
            else None,
        )
        reduced = all(getattr(layer, "reduced", False) for layer in self.layers)
        return mask is None and not reduced and not bool(step.visible.all())

    def interval(self, *, follows: bool = True) -> int:
        """Return the tokens between two evictions for which a layer has room, at most."""
        every = self.schedule.every
        if every is None:
            return BLOCK_TOKENS
        interval = every.interval(self.arrival.settled, self.token_bytes)
        if every.memory is None or not follows:
            return interval
        there = self.budget_layers[0].dense_tokens
        return max(min(interval, there + self.free_tokens(every.memory)), 1)

    def _begin_reading(self, arguments: Mapping[str, Any], step: Step) -> dict[int, IntArray]:
        """Return how many entries each layer keeps once it has read a forward of the prompt.

        Only where any has to go then.
        """
        plan, policy = self.plan, self.plan.policy
        if not step.seen:
            self.schedule = plan.schedule(in_chunks=not step.completes)
            self.whole = WholePrompt() if self.schedule.holds else None
            in_pieces = not step.completes and bool(plan.bits)
            refusals.refuse(rounded_beyond_memory=in_pieces and plan.profile.fits_a_peak)
        tokens = self.arrival.row_tokens(step.visible, step.prompt_tokens)
        if self.whole is not None:
            later = policy.scorer.later
            self.whole.add(arguments, step, repeats=later is not None)
            more = step.prompt_tokens - int(step.visible.shape[1])
            visible = nn.functional.pad(step.visible, (0, more), value=True)
            if self._targets_of(visible, row_tokens(visible)) and later is not None:
                self.whole.check_room(step.visible, tokens, later, plan.limit)
            return {}
        in_chunks = step.seen > 0 or not step.completes
        refusals.refuse(merges_chunks=in_chunks and policy.combines and policy.name)
        stored = self.stored_counts() if self.batch else 0
        return self._targets_of(step.new_visible, tokens, stored, rounds=step.completes)

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        """Run one layer's attention with the mask that fits it; evict what is not to stay."""
        layer = self.layers[states.layer]
        if not isinstance(layer, BudgetLayer):
            output = compute(states.mask)
            _free_slid_out(layer, states)
            return output
        assert self.forward is not None
        output = self.forward.answer(layer, states, compute)
        self._attended(self.forward, layer, states)
        return output

    def _attended(self, forward: Forward, layer: BudgetLayer, states: AttentionStates) -> None:
        """A layer has attended to all that it holds: note what is needed, evict what has to go."""
        step, targets, index = forward.step, forward.targets, states.layer
        if layer.attention is None:
            layer.attention = _without_tokens(states)
        queries, notes = states.queries.detach(), layer.unfinished
        if step.follows:
            if forward.noted is not None:
                notes.latest.add(queries, step.columns, forward.noted, padded=step.padded)
            return
        # a second look, at a model whose probe failed (`kvalloc.models.probe`)
        pairs = (states.keys, layer.keys), (states.values, layer.values)
        same = all(given is own or given.is_set_to(own) for given, own in pairs)
        refusals.refuse(attends_to_others=not same and (index,))
        evicts, remember = index in targets, not step.completes or self.goes_on_observing
        if not (self.whole or evicts or remember):
            return
        eviction = self.eviction(
            self.plan.policy,
            prompt_tokens=step.prompt_tokens,
            visible=step.visible,
            remember=remember,
            bits=self.plan.bits if step.completes else self.plan.halves,
            new_from=step.seen,
            held=self.whole is not None,
        )
        every = self.plan.policy.observes and not self.whole
        wanted = eviction.wanted_rows()
        most = max(wanted, step.new_tokens if every else 0)
        notes.prompt.add(queries, step.columns, most, padded=step.padded)
        with self.checks.noted():  # the host reads once a forward what it has to know
            if evicts:
                self.evict_layers(eviction, {index: targets[index]})
            elif not self.whole:
                eviction.observe(layer)

    def wanted_following(self, end: int) -> int:
        """Return how many of the latest queries of each row may be asked for at a column."""
        who = self.plan.after
        if who.observes or self.given is not None:  # drafts may be taken back
            return end
        return who.query_rows(end)

    def end(self, *, completed: bool) -> None:
        """Clean up after a forward; after a failed one, find out what it left."""
        forward, self.forward = self.forward, None
        if forward is None:  # it was interrupted, and `reset` has tidied up before this
            return
        step = forward.step
        if completed:
            with self.half_way():
                pass  # what was noted in its layers
            self.arrival.commit(step)
            if step.completes:
                self._complete()
            return
        self.checks = Checks()
        for layer in self.budget_layers:
            layer.evicts_next = False
            more = layer.get_seq_length() - step.seen
            # a turn that broke off was not read
            if step.follows and more > 0:
                layer.crop(-more)
                layer.unfinished.latest.crop(step.seen)
        if {layer.get_seq_length() for layer in self.layers} != {step.seen}:
            self._broken = refusals.HALF_WAY

    @contextmanager
    def half_way(self) -> Iterator[None]:
        """What fails inside leaves layers that disagree; what was noted to be checked is read."""
        self._broken = refusals.HALF_WAY
        with self.checks.noted():
            yield
        self.checks.read()
        self._broken = None

    # What goes

    def _targets_of(
        self, new: Tensor, tokens: IntArray, stored: IntArray | int = 0, *, rounds: bool = True
    ) -> dict[int, IntArray]:
        """Return how many entries each layer is to keep, (batch, n_kv_heads), where any has to go.

        Parameters
        ----------
        new : Tensor of bool, (batch, n_new)
            False marks padding of what comes: the whole prompt, where it is held.
        tokens : ndarray of int64, (batch,)
            Number of tokens of each row of the prompt, of whose budgets it is.
        stored : ndarray of int64, (batch, n_layers, n_kv_heads), or 0
            Number of entries that are stored already.
        rounds : bool
            Whether layers that are stored at fewer bits are rounded.
        """
        budgets, padded = self.arrival.budgets(tokens), not bool(new.all())
        shared, full = self.profile.by_prompt, self.profile.shape.full_layers
        there = np.zeros_like(budgets) + row_tokens(new)[:, None, None] + stored
        fits = there <= budgets
        if shared and not self.schedule.holds:  # heads of a layer compete, and share its budget
            fits = there.sum(axis=2, keepdims=True) <= budgets.sum(axis=2, keepdims=True)
        rounded = self.plan.bits if rounds else ()
        goes = [i for i in full if padded or not fits[:, i].all() or i in rounded]
        if goes and shared and self.schedule.holds:  # heads of all layers compete
            goes = [*full]
        counts = np.where(fits, there, budgets)
        targets = {index: counts[:, index] for index in goes}
        self._check_read(targets)
        return targets

    def _check_read(self, targets: Mapping[int, IntArray]) -> None:
        uneven = any((own != own[0, 0]).any() for own in targets.values())
        refusals.refuse(reads_unevenly=self.reader is not None and uneven and self.plan.policy.name)

    @property
    def goes_on_observing(self) -> bool:
        """Whether what the policy notes of a prompt is added to by what follows."""
        return self.schedule.every is not None and self.plan.after.observes

    def eviction(self, policy: EvictionPolicy, **event: Any) -> Eviction:
        """Return an eviction of what has been seen by a policy; see `Eviction` for the rest."""
        seen = {
            "visible": self.arrival.visible,
            "remember": self.goes_on_observing,
            "bits": self.bits,
        }
        own = self.profile.policy
        return Eviction(policy=policy, sinks=own.sinks, window=own.window, **{**seen, **event})

    def evict_layers(self, eviction: Eviction, targets: dict[int, IntArray]) -> None:
        """Evict in these layers; in all together, where their heads compete.

        Parameters
        ----------
        eviction : Eviction
        targets : dict of int to ndarray of int64, (batch, n_kv_heads)
            Entries that stay of each layer.
        """
        self._check_read(targets)
        # under autocast sums would be rounded, and numbers of several types would not go together
        with torch.autocast(self.layers[0].keys.device.type, enabled=False):
            if targets and self.profile.by_prompt:
                layers = [self.layers[index] for index in targets]
                handed_out = eviction.handed_out(layers, [*targets.values()], self.profile)
                targets = dict(zip(targets, handed_out, strict=True))
            for index, own in targets.items():
                eviction.evict(self.layers[index], own)

    # A prompt that is complete

    def _complete(self) -> None:
        """Let all layers of a whole prompt evict at once, now that it is complete."""
        visible, whole = self.arrival.visible, self.whole
        tokens = row_tokens(visible)
        if whole is not None and (targets := self._targets_of(visible, tokens)):
            self._read_again(whole, targets)
            n_seen = self.n_seen
            eviction = self.eviction(
                self.plan.policy, prompt_tokens=n_seen, new_from=n_seen, held=True
            )
            with self.half_way():
                self.evict_layers(eviction, targets)
        for layer in self.budget_layers:
            observed = layer.unfinished.observed if self.goes_on_observing else {}
            layer.unfinished = Unfinished(observed=observed)
        self.arrival.settled, self.arrival.competed = self.n_seen, tokens
        self.whole = None

    def _read_again(self, whole: WholePrompt, layers: Collection[int]) -> None:
        """Let the model read the prompt again for a scorer that wants it; it sees these layers."""
        scorer, decoder = self.plan.policy.scorer, self.plan.decoder()
        if scorer.later is None:
            return
        assert decoder is not None, "it has just read the prompt"
        held = whole.held(decoder, self.layers, self.arrival.visible)
        with self.half_way():
            noted = repeat_prompt(
                held, scorer, scorer.later, layers, sinks=self.profile.policy.sinks
            )
            for index, own in noted.items():
                self.layers[index].unfinished.later = own

    # What the cache is told

    def reset(self) -> None:
        """Forget prompt and tokens, and free their storage."""
        for layer in self.layers:
            if not isinstance(layer, BudgetLayer):
                layer.keys = layer.values = None
                layer.is_initialized = False
            layer.reset()
        self.forget()

    def select(self, rows: Tensor) -> None:
        """Let row i go on with what row ``rows[i]`` holds, and what is known of it."""
        for layer in self.layers:
            layer.batch_select_indices(rows)
        self.arrival.select(rows)
        if self.whole is not None:
            self.whole.select(rows)

    def broke_off(self, tokens: int) -> None:
        """Refuse to go on: so many tokens were read that should not have been."""
        self._broken = refusals.TURN_BROKEN_OFF.format(tokens)

    def check_crop(self, remove: int) -> None:
        """Refuse to take so many tokens back where that cannot be right."""
        arriving = bool(self.n_seen) and not self.arrival.complete
        refusals.refuse(crop_amid_prompt=arriving)
        if self.interrupted is not None:
            raise UnsupportedRequestError(self.interrupted)
        for layer in self.layers if remove > 0 else ():
            if isinstance(layer, BudgetLayer):
                if layer.reduced and remove > layer.dense_tokens:
                    raise UnsupportedRequestError(
                        f"cannot crop {remove} tokens: {layer.dense_tokens} have followed the "
                        "latest eviction, and what went there cannot come back; crop a "
                        "copy.deepcopy(cache) that was made before, or read the text anew"
                    )
            elif not getattr(layer, "record_past", False):
                refusals.refuse(crop_slid_out=layer.get_seq_length() >= layer.sliding_window)

    def crop(self, remove: int) -> None:
        """Take so many tokens back."""
        for layer in self.layers:
            layer.crop(-remove)  # not every layer of transformers' own knows a number to keep
        end = self.n_seen
        self.arrival.crop(end)
        for layer in self.budget_layers:
            layer.unfinished.latest.crop(end)

    # Budgets that are decided from the prompt

    def decide(self, inputs: Mapping[str, Any]) -> None:
        """Decide the budgets of a prompt before it arrives; see `BudgetCache.decide`."""
        refusals.refuse(prompt_begun=self.n_seen > 0 and "decide()")
        batch, tokens = refusals.new_tokens_shape(inputs)
        visible = self.arrival.visible_after(0, batch, tokens, inputs.get("attention_mask"))
        decoder = self.plan.decoder()
        if self.plan.decide is not None and decoder is not None:
            rows, begun = prompt_rows(inputs, visible), time.perf_counter()
            decided = row_decisions(self.plan.decide, decoder, rows, self.plan.profile)
            self.arrival.row_profiles = tuple(decided)
            if all(one is decided[0] for one in decided):
                self.profile = decided[0]
            self.decision_seconds = time.perf_counter() - begun
        self.arrival.shown_rows = row_tokens(visible)

    def _decide_on_arrival(self, arguments: Mapping[str, Any]) -> None:
        """Decide the budgets in the first forward, unless that was done before."""
        ahead = self.arrival.shown_rows is not None
        if self.plan.decide is None or self.n_seen or ahead:
            return
        _, tokens = refusals.new_tokens_shape(arguments)
        refusals.refuse(decides_from_chunk=self.arrival.announced not in (None, tokens))
        self.arrival.row_profiles = None  # of an attempt that failed
        self.decide(arguments)
        self.arrival.shown_rows = None  # should this one fail, another prompt may come


def _without_tokens(states: AttentionStates) -> AttentionStates:
    """Return what of a layer's attention is the same in all forwards of a prompt."""
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
