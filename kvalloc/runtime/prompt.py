"""The prompt of a cache: what has arrived of it, what is to stay, and when the rest goes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.accounting.costs import packed_row_bytes, stored_bytes
from kvalloc.accounting.stored import layer_tensors
from kvalloc.errors import UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.runtime import refusals
from kvalloc.runtime.arrival import Arrival, Step, row_tokens
from kvalloc.runtime.attention.backends import attend
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.attention.masks import MaskFunction, stored_mask
from kvalloc.runtime.checks import Checks
from kvalloc.runtime.deciding import prompt_rows, row_decisions
from kvalloc.runtime.eviction import Eviction, Member
from kvalloc.runtime.following import COMPETE_AGAIN, Followed, Settling
from kvalloc.runtime.layer import SPARE, BudgetLayer
from kvalloc.runtime.plan import Plan
from kvalloc.runtime.policies import EvictionPolicy
from kvalloc.runtime.repetition import (
    HeldPrompt,
    check_context,
    repeat_prompt,
    repeated_tokens,
)
from kvalloc.runtime.selection import gathered, handed_out
from kvalloc.runtime.unfinished import Queries, Unfinished
from kvalloc.scorers.base import awaited_tokens, repetitions
from kvalloc.scorers.later_pass import Later

__all__ = ["Prompt", "State"]


class State(Enum):
    """How far a prompt has come."""

    ARRIVING = "arriving"
    """Nothing of it is there, or some of its chunks."""

    HELD = "held"
    """It is complete and whole: tokens that follow are awaited."""

    EVICTED = "evicted"
    """What is not to stay has gone, and nothing has followed yet."""

    FOLLOWING = "following"
    """Tokens have followed it."""

    INTERRUPTED = "interrupted"
    """Something failed half-way, and only a reset helps."""


class Prompt:
    """Follows one prompt of a cache after the other, and evicts from the cache's layers.

    Without a policy that looks beyond it, entries go while the prompt arrives, layer by layer.
    Otherwise it is held whole until it is complete and, where the policy looks at what follows,
    until so many tokens have followed; then all layers evict at once. What follows, turns and
    answers, is settled every so many tokens and at the end of a turn: it competes with what is
    kept for the budgets of all tokens seen.

    Parameters
    ----------
    plan : Plan
    layers : list
        The cache's own, a `BudgetLayer` for each layer that can be reduced.
    arrival : Arrival
        Of a cache that has seen nothing.

    Attributes
    ----------
    profile : BudgetProfile
        Whose budgets hold: decided ones, where all rows have the same.
    decision_seconds : float or None
        What deciding took; None where nothing was decided.
    step : Step or None
        The forward that runs now.
    reader : Reader or None
        Chooses what decoded tokens read.
    """

    def __init__(self, plan: Plan, layers: list[Any], arrival: Arrival) -> None:
        self.plan, self.arrival, self.layers = plan, arrival, layers
        policy = plan.profile.policy
        self.reader = plan.policy.reader(sinks=policy.sinks, window=policy.window)
        self._prefilling = False
        self.forget()

    def forget(self) -> None:
        """Get ready for a new prompt."""
        if self.reader is not None:
            self.reader.forget()
        self.arrival = self.arrival.afresh()
        self.arrival.open = self._prefilling
        self.profile = self.plan.profile
        self.decision_seconds: float | None = None
        self.step: Step | None = None
        self._broken: str | None = None
        self._targets: dict[int, IntArray] = {}
        self._masks: dict[tuple[int, int, torch.device], Any] = {}
        self.checks = Checks()  # of the forward or the eviction that runs now
        self._waits = False  # for tokens that follow a held prompt
        self.given: int | None = None  # columns behind which drafts may stand; None without any
        self._holds = self.plan.holds_chunks  # unless the first forward is the whole prompt
        self.attention: dict[int, AttentionStates] = {}  # of each layer, without its tokens
        self._forget_held()

    def _forget_held(self) -> None:
        self._ids = self._positions = torch.empty(0, 0, dtype=torch.long)  # of a held prompt

    def forked(self) -> None:
        """Go on as the prompt of a copy of the cache, which no hook and no ``with`` will end."""
        self._prefilling = False
        if self.step is not None:
            self._broken = refusals.HALF_WAY

    # How far it has come

    @property
    def interrupted(self) -> str | None:
        """Why only a reset helps; None where it goes on."""
        return self._broken or (None if self.step is None else refusals.HALF_WAY)

    @property
    def state(self) -> State:
        """How far it has come."""
        if self.interrupted is not None:
            return State.INTERRUPTED
        if not self.arrival.complete:
            return State.ARRIVING
        if self._waits:
            return State.HELD
        return State.FOLLOWING if self._n_following else State.EVICTED

    @property
    def awaited_tokens(self) -> int:
        """Tokens that still have to follow before anything is evicted; 0 where none is awaited."""
        return max(self.plan.awaited - self._n_voting, 1) if self._waits else 0

    @property
    def _n_voting(self) -> int:
        """Tokens that have followed the prompt in every row, padding left out."""
        return int(row_tokens(self.arrival.visible[:, self.arrival.prompt_tokens :]).min())

    @property
    def reduced(self) -> bool:
        """Whether any entry has been evicted, padding included."""
        return any(layer.reduced for layer in self._budget_layers)

    @property
    def batch(self) -> int:
        """Rows that are stored; 0 before the first forward."""
        return self._budget_layers[0].batch

    @property
    def row_profiles(self) -> tuple[BudgetProfile, ...]:
        """Whose budgets each row keeps, (batch,)."""
        decided = self.arrival.row_profiles
        return (self.profile,) * self.batch if decided is None else decided

    @property
    def _budget_layers(self) -> list[BudgetLayer]:
        return [layer for layer in self.layers if isinstance(layer, BudgetLayer)]

    @property
    def _n_seen(self) -> int:
        return int(self.layers[0].get_seq_length())

    @property
    def _n_following(self) -> int:
        return self._n_seen - (self.arrival.prompt_tokens or 0)

    def stored_counts(self) -> IntArray:
        """Entries stored now, (batch, n_layers, n_kv_heads)."""
        shape = (self.batch, len(self.layers), self.profile.shape.n_kv_heads)
        counts: IntArray = np.zeros(shape, dtype=np.int64)
        for index, layer in enumerate(self.layers if self.batch else ()):
            budgeted = isinstance(layer, BudgetLayer)
            counts[:, index] = layer.stored_counts() if budgeted else layer.keys.shape[-2]
        return counts

    def kept_indices(self, index: int) -> Tensor:
        """Columns of the entries that a layer keeps, see `BudgetCache.kept_indices`."""
        layer, n_prompt = self.layers[index], self.arrival.prompt_tokens
        refusals.refuse(kept_by_sliding=not isinstance(layer, BudgetLayer) and (index,))
        refusals.refuse(kept_of_nothing=not layer.stored or n_prompt is None)
        positions: Tensor = layer.kept_positions(n_prompt)
        return positions

    # What the cache is told

    def reset(self) -> None:
        """Forget prompt and tokens, and free their storage."""
        for layer in self.layers:
            if not isinstance(layer, BudgetLayer):
                layer.keys = layer.values = None
                layer.is_initialized = False
            layer.reset()
        self.forget()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """All forwards inside are of the prompt; see `BudgetCache.prefill`."""
        refusals.refuse(prompt_begun=self._n_seen or self.arrival.announced is not None)
        self._prefilling = self.arrival.open = True
        try:
            yield
        except BaseException:
            if (tokens := self.arrival.prompt_tokens) is not None:
                self._broken = self._broken or refusals.BROKEN_OFF.format(tokens)
            raise
        finally:
            self._prefilling = self.arrival.open = False
        if self.arrival.prompt_tokens is None:
            return
        self.arrival.complete = True
        self._complete()
        for index, bits in self.plan.bits.items() if not self._waits else ():
            self.layers[index].pack(bits)

    def decide(self, inputs: Mapping[str, Any]) -> None:
        """Decide the budgets of a prompt before it arrives; see `BudgetCache.decide`."""
        refusals.refuse(decided_after=self._n_seen)
        batch, tokens = refusals.new_tokens_shape(inputs)
        visible = self.arrival.visible_after(0, batch, tokens, inputs.get("attention_mask"))
        if self.plan.decide is not None:
            self._decide_rows(prompt_rows(inputs, visible))
        self.arrival.shown_rows = row_tokens(visible)

    def select(self, rows: Tensor) -> None:
        """Let row i go on with what row ``rows[i]`` holds, and what is known of it."""
        for layer in self.layers:
            layer.batch_select_indices(rows)
        self.arrival.select(rows)
        if len(self._positions):
            self._positions = self._positions[rows.cpu()]
        if len(self._ids):
            self._ids = self._ids[rows.to(self._ids.device)]
        if self.reader is not None:
            self.reader.forget()

    def check_crop(self, remove: int) -> None:
        """Refuse to take so many tokens back where that cannot be right."""
        arriving = bool(self._n_seen) and not self.arrival.complete
        into = self._waits and remove > self._n_following
        refusals.refuse(
            crop_amid_prompt=arriving,
            crop_into_held=into and self.arrival.prompt_tokens,
        )
        if self.interrupted is not None:
            raise UnsupportedRequestError(self.interrupted)
        for layer in self.layers if remove > 0 else ():
            if isinstance(layer, BudgetLayer):
                layer.crop_count(-remove)
            elif not getattr(layer, "record_past", False):
                refusals.refuse(crop_slid_out=layer.get_seq_length() >= layer.sliding_window)

    def cuts(self, end: int) -> list[int]:
        """Columns at which a forward up to `end` is cut, in order.

        Where what is not given may be taken back: behind what is given, and wherever something is
        then evicted, so that each token sees what it would see if it had come alone. Else where
        what followed competes, if the memory does not take the forward whole.
        """
        if (given := self.given) is None:
            return self._cuts_for_memory(end)
        prompt = self.arrival.prompt_tokens if self.arrival.complete else given
        assert prompt is not None
        columns = {given, prompt + self.plan.awaited}
        settled = self.arrival.settled if self.arrival.complete else given
        if given - settled >= self.plan.every_from(settled, self._token_bytes):
            settled = given
        columns.update(self.plan.due(settled, end, self._token_bytes))
        return sorted(one for one in columns if max(self._n_seen + 1, given) <= one < end)

    def room_for_drafts(self, longest: int) -> int:
        """Return the number of drafts, at least 1, before what followed has to compete."""
        if not self.plan.reduces:
            return longest
        settled = self.arrival.settled
        due = settled + self.plan.every_from(settled, self._token_bytes)
        return max(1, min(longest, due - self._n_seen))

    def crop(self, remove: int) -> None:
        """Take so many tokens back."""
        for layer in self.layers:
            layer.crop(-remove)  # not every layer of transformers' own knows a number to keep
        end = self._n_seen
        self.arrival.crop(end)
        for layer in self._budget_layers:
            layer.unfinished.latest.crop(end)

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
            for layer in self.layers:
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
        if self.arrival.complete and not self.reduced and getattr(mask, "ndim", 2) != 2:
            mask = None  # nothing was evicted, so any mask of transformers' own fits
        self._decide_on_arrival(batch, arguments, mask)
        step = self.arrival.step(self._n_seen, batch, new_tokens, mask)
        self._targets = {}
        if not step.seen:
            self._holds = self.plan.holds if step.completes else self.plan.holds_chunks
            late = not step.completes and self.plan.bits
            refusals.refuse(rounded_beyond_memory=late and self.plan.profile.fits_a_peak)
        if not step.follows and self._holds:
            self._begin_held(arguments, step)
        elif not step.follows:
            self._targets = self._targets_while_read(step)
        self._check_read(self._targets)
        # one token is attended to without a copy of what is kept in front of what followed
        alone = step.new_tokens == 1 and step.follows
        for layer in self._budget_layers:
            layer.joins = self.reader is not None or not alone
        for index in self._targets:
            self.layers[index].evicts_next = True
        self.step = step
        self._masks, self._mask_function = {}, masks
        reduced = all(getattr(layer, "reduced", False) for layer in self.layers)
        return mask is None and not reduced and not bool(step.visible.all())

    def _targets_while_read(self, step: Step) -> dict[int, IntArray]:
        """Entries that each layer is to keep once it has read a forward, where any has to go."""
        policy, some = self.plan.policy, step.seen or not step.completes
        refusals.refuse(
            merges_chunks=some and policy.combines and policy.name,
            adds_up_chunks=not step.completes and policy.needs_whole_prompt,
        )
        new = row_tokens(step.new_visible)[:, None]
        found: dict[int, IntArray] = {}
        for index in self.plan.profile.shape.full_layers:
            assert step.budgets is not None
            budgets, before = step.budgets[:, index], self.layers[index].stored_counts()
            there = new + (np.zeros_like(budgets) if before is None else before)
            fits = there <= budgets
            if self.plan.by_layer:  # the heads share what is still to be handed out
                fits = there.sum(axis=1, keepdims=True) <= budgets.sum(axis=1, keepdims=True)
            padded = not bool(step.new_visible.all())
            if padded or not fits.all() or (step.completes and self.plan.rounds(index)):
                found[index] = np.where(fits, there, budgets)
        return found

    @contextmanager
    def _half_way(self) -> Iterator[None]:
        """What fails inside leaves layers that disagree; what was noted to be checked is read."""
        self._broken = refusals.HALF_WAY
        with self.checks.noted():
            yield
        self.checks.read()
        self._broken = None

    def attend(self, states: AttentionStates, compute: Compute) -> Any:
        """Run one layer's attention with the mask that fits it; evict what is not to stay."""
        layer = self.layers[states.layer]
        if not isinstance(layer, BudgetLayer):
            output = compute(states.mask)
            _free_slid_out(layer, states)
            return output
        with self.checks.noted():  # the host reads once a forward what it has to know
            output = self._attention(layer, states, compute)
            self._attended(layer, states)
        return output

    def _attention(self, layer: BudgetLayer, states: AttentionStates, compute: Compute) -> Any:
        """Attention over what the layer stores, the new tokens included."""
        if not layer.reduced:
            return compute(states.mask)
        step, entries = self.step, layer.entries
        assert step is not None
        assert entries is not None
        n_stored, n_kept = int(states.keys.shape[2]), layer.in_front
        visible = step.following_visible(n_stored - n_kept, states.keys.device)
        if not n_kept or entries.parts[0].bias is not None:
            call = AttentionCall.of(states, visible, first=n_kept)
            return attend(call, entries.parts), None
        if self.reader is not None and states.queries.shape[2] == 1 and visible is None:
            place = self.profile.shape.full_layers.index(states.layer)
            indices = self.reader.read(states, place=place, positions=entries.columns[0])
            if indices is None:
                return compute(None)
            return compute(None, gathered(states.keys, indices), gathered(states.values, indices))
        return compute(self.stored_mask(states, n_kept))

    def stored_mask(self, states: AttentionStates, n_kept: int = 0) -> Any:
        """Return the mask of what a layer stores, of which so many entries stand in front.

        It is made once a forward for all layers that store as much.
        """
        step, n_stored = self.step, int(states.keys.shape[2])
        key = (n_stored, n_kept, states.keys.device)
        if key not in self._masks:
            assert step is not None
            self._masks[key] = stored_mask(
                self._mask_function,
                int(states.queries.shape[2]),
                n_stored,
                dtype=states.queries.dtype,
                device=states.keys.device,
                batch=int(states.queries.shape[0]),
                visible=step.following_visible(n_stored - n_kept, states.keys.device),
            )
        return self._masks[key]

    def _attended(self, layer: BudgetLayer, states: AttentionStates) -> None:
        """A layer has attended to all that it holds: note what is needed, evict what has to go."""
        step, index = self.step, states.layer
        assert step is not None
        if index not in self.attention:
            self.attention[index] = _without_tokens(states)
        if step.follows:
            self._note_following(layer, states, step)
            return
        remember = not step.completes or self._goes_on_observing
        if not (self._holds or index in self._targets or remember):
            return
        eviction = self._eviction(
            self.plan.policy,
            prompt_tokens=step.prompt_tokens,
            visible=step.visible,
            remember=remember,
            bits=self.plan.bits if step.completes else self.plan.halves,
            new_from=step.seen,
            held=self._holds,
        )
        eviction.note(layer, states, step.columns)
        if self._holds:
            return
        if index not in self._targets:
            eviction.observe(layer, self._layer_states(index, eviction))
            return
        group = self.plan.groups.get(index, (index,))
        if index == group[-1]:
            self._evict_layers(eviction, {one: self._targets[one] for one in group})

    def _eviction(self, policy: EvictionPolicy, **event: Any) -> Eviction:
        """Return an eviction of what has been seen by a policy; see `Eviction` for the rest."""
        seen = {
            "visible": self.arrival.visible,
            "remember": self._goes_on_observing,
            "bits": self.plan.bits,
        }
        own = self.profile.policy
        return Eviction(policy=policy, sinks=own.sinks, window=own.window, **{**seen, **event})

    def end(self, *, completed: bool) -> None:
        """Clean up after a forward; after a failed one, find out what it left."""
        step, self.step, self._masks = self.step, None, {}
        if step is None:  # it was interrupted, and `reset` has tidied up before this
            return
        if completed:
            with self._half_way():
                pass  # what was noted in its layers
            self.arrival.commit(step)
            if step.completes:
                self._complete()
            if self.given is None:
                self.catch_up()
            return
        self.checks = Checks()
        for layer in self._budget_layers:
            layer.evicts_next = False
            more = layer.get_seq_length() - step.seen
            # a turn that broke off was not read
            if step.follows and more > 0:
                layer.crop(-more)
                layer.unfinished.latest.crop(step.seen)
        if {layer.get_seq_length() for layer in self.layers} != {step.seen}:
            self._broken = refusals.HALF_WAY

    # A prompt that is held

    def _begin_held(self, arguments: Mapping[str, Any], step: Step) -> None:
        seen, end = step.seen, step.seen + step.new_tokens
        if repetitions(self.plan.scorers):
            ids = repeated_tokens(arguments)
            self._ids = torch.cat([self._ids[:, :seen], ids], dim=1) if seen else ids
        positions = arguments.get("position_ids")
        if not isinstance(positions, Tensor):
            positions = torch.arange(seen, end)[None]
        positions = positions.cpu().expand(step.batch, -1)
        before = self._positions[:, :seen]
        self._positions = torch.cat([before, positions], dim=1) if seen else positions
        # any chunk may be the last one inside `prefill`
        more = step.prompt_tokens - int(step.visible.shape[1])
        layers = self._final_targets(nn.functional.pad(step.visible, (0, more), value=True))
        self._check_read(layers)
        self._check_room(step, layers)

    def _check_room(self, step: Step, layers: Collection[int]) -> None:
        """Refuse a prompt that does not fit the model's limit with what scorers want after it."""
        scorers = [one for layer in layers for one in self.plan.wanted.get(layer, ())]
        passes = repetitions(scorers)
        if awaited := awaited_tokens(scorers):
            passes.append(Later(kind="following", tokens=awaited))
        if self.plan.limit is None or not passes:
            return
        tokens = self.arrival.row_tokens(step.visible, step.prompt_tokens)
        coming = tokens - row_tokens(step.visible)
        places = self._next_positions(step.visible) + torch.from_numpy(coming)
        for later in passes:
            check_context(later, places.tolist(), tokens.tolist(), self.plan.limit)

    def _check_read(self, targets: Mapping[int, IntArray]) -> None:
        if self.reader is not None:
            uneven = any((counts != counts[0, 0]).any() for counts in targets.values())
            refusals.refuse(reads_unevenly=uneven and self.plan.policy.name)

    def _next_positions(self, visible: Tensor) -> Tensor:
        """Position of what follows each row of a held prompt, (batch,), on the host."""
        return self._positions.masked_fill(~visible, -1).amax(dim=1) + 1

    def _complete(self) -> None:
        """The prompt is complete; a held one is repeated, and evicted or waits for what follows."""
        targets = self._final_targets() if self._holds else {}
        if not targets:
            self._settle()
            return
        looks = {layer: each for layer, each in self.plan.wanted.items() if layer in targets}
        scorers = [scorer for each in looks.values() for scorer in each]
        if repetitions(scorers):
            with self._half_way():
                notes = repeat_prompt(self._held(), looks, sinks=self.profile.policy.sinks)
            for index, noted in notes.items():
                self.layers[index].unfinished.later |= noted
        self._waits = True
        if not awaited_tokens(scorers):
            self.evict()

    def catch_up(self) -> None:
        """Evict late, or settle what followed, where enough has followed."""
        if self._waits and self._n_voting >= max(self.plan.awaited, 1):
            self.evict()
        if not self.plan.reduces:
            return
        settled = self.arrival.settled
        if self._n_seen - settled >= self.plan.every_from(settled, self._token_bytes):
            self.settle_following()

    def _held(self) -> HeldPrompt:
        """The complete prompt, as the model can read on from it."""
        decoder = self.plan.decoder()
        assert decoder is not None, "it has just read the prompt"
        layers = dict(enumerate(self.layers))
        whole = {i: layer for i, layer in layers.items() if isinstance(layer, BudgetLayer)}
        return HeldPrompt(
            decoder=decoder,
            stored={index: (layer.keys, layer.values) for index, layer in whole.items()},
            sliding={i: layer for i, layer in layers.items() if i not in whole},
            visible=self.arrival.visible,
            next_positions=self._next_positions(self.arrival.visible),
            ids=self._ids,
        )

    @torch.no_grad()
    def evict(self) -> None:
        """Let all layers of a held prompt evict now; the tokens that have followed vote.

        Whatever fails here leaves some layers whole and others reduced, so the cache then refuses
        to go on.
        """
        if not self._waits:
            return
        columns = self.arrival.prompt_tokens
        assert columns is not None
        eviction = self._eviction(
            self.plan.policy,
            prompt_tokens=columns,
            new_from=columns,
            held=True,
            scorers=self.plan.wanted,
            following=self._n_following,
        )
        with self._half_way():
            self._evict_layers(eviction, self._final_targets())
        self._settle()

    def _evict_layers(self, eviction: Eviction, targets: dict[int, IntArray]) -> None:
        """Evict in these layers; in all together, where heads of all compete.

        Parameters
        ----------
        eviction : Eviction
        targets : dict of int to ndarray of int64, (batch, n_kv_heads)
            Entries that stay of each layer.
        """
        self._check_read(targets)
        if self.profile.by_prompt:
            states = {index: self._layer_states(index, eviction) for index in targets}
            targets = self._by_prompt(eviction, targets, states)
            del states  # they keep alive what goes of all layers
        for index in targets:
            group = self.plan.groups.get(index, (index,))
            if index != group[-1]:
                continue
            members: list[Member] = []
            for one in group:
                layer: BudgetLayer = self.layers[one]
                members.append((layer, self._layer_states(one, eviction), targets[one]))
            eviction.evict(members)
        if self.reader is not None:
            self.reader.forget()

    @property
    def _goes_on_observing(self) -> bool:
        """Whether what the policy notes of a prompt is added to by what follows."""
        return self.plan.reduces and self.plan.after.observes

    def _settle(self) -> None:
        """Nothing more of the prompt alone goes."""
        for layer in self._budget_layers:
            own = layer.unfinished
            layer.unfinished = Unfinished(latest=own.latest)
            if self._goes_on_observing:
                layer.unfinished.observed = own.observed
        self.arrival.settled = columns = self.arrival.prompt_tokens or 0
        self.arrival.competed = row_tokens(self.arrival.visible[:, :columns])
        self._waits = False
        self._forget_held()

    # What follows a prompt

    @property
    def _token_bytes(self) -> int:
        """Bytes of a token of each row, as the model makes it."""
        shape = self.profile.shape
        entry = shape.n_kv_heads * shape.plain_bytes_per_entry
        return max(self.batch, 1) * len(shape.full_layers) * entry

    def _cuts_for_memory(self, end: int) -> list[int]:
        """Columns at which a forward up to `end` is cut so that the memory takes it."""
        if self.plan.memory is None or not self.arrival.complete:
            return []
        tensors = (own for layer in self.layers for own in layer_tensors(layer))
        taken = sum(own.nbytes for own in tensors) + (end - self._n_seen) * self._token_bytes
        if taken <= self.plan.memory:
            return []
        due = self.plan.due(self.arrival.settled, end, self._token_bytes)
        return [column for column in due if column > self._n_seen]

    def _within_memory(self, budgets: IntArray, tokens: IntArray) -> IntArray:
        """Return budgets that leave room for what follows before the next time.

        Of rows of so many tokens, see `Plan.within_memory`.
        """
        if self.plan.memory is None:
            return budgets
        slid = [layer for layer in self.layers if not isinstance(layer, BudgetLayer)]
        taken = sum(own.nbytes for layer in slid for own in layer_tensors(layer))
        every = self.plan.every_from(self._n_seen, self._token_bytes)
        taken += (every + every // SPARE) * self._token_bytes
        return self.plan.within_memory(self.profile, budgets, tokens, taken)

    def _note_following(self, layer: BudgetLayer, states: AttentionStates, step: Step) -> None:
        """Note the latest queries, and whatever settling needs of a layer."""
        if not self.plan.reduces:
            return
        who, end = self.plan.after, step.seen + step.new_tokens
        every = who.observes or self.given is not None  # drafts may be taken back
        rows = max(who.query_rows(end), self.plan.awaited if self._waits else 0)
        latest = layer.unfinished.latest
        latest.add(states.queries.detach(), step.columns, end if every else rows)

    @torch.no_grad()
    def settle_following(self) -> None:
        """Go back to the budgets of all tokens seen: what followed competes with what is kept."""
        if not self.plan.reduces or self._waits or not self.arrival.complete:
            return
        seen, policy = self._n_seen, self.profile.policy
        noted = all(layer.unfinished.latest.pieces for layer in self._budget_layers)
        if seen == self.arrival.settled or not noted:
            return
        tokens = row_tokens(self.arrival.visible)
        budgets = np.maximum(self.arrival.budgets(tokens), policy.protected_tokens)
        budgets = self._within_memory(budgets, tokens)
        followed = {
            index: self._followed(self.layers[index], budgets[:, index], tokens)
            for index in self.profile.shape.full_layers
        }
        who, competed = self.plan.after, self.arrival.competed
        always = who.observes or who.combines or bool(self.plan.groups)
        settling = Settling.of(
            followed,
            shared=self.profile.by_prompt,
            all_compete=np.full(self.batch, True)
            if always
            else (tokens >= COMPETE_AGAIN * competed) | ~self._fits_behind(followed.values()),
            window=policy.window,
            protected=policy.protected_tokens,
        )
        with self._half_way():
            self._settle_rows(followed, settling)
        for layer in self._budget_layers:
            layer.unfinished.latest = Queries()
        self.arrival.settled = seen
        self.arrival.competed = np.where(settling.new_alone, competed, tokens)

    def _settle_rows(self, followed: Mapping[int, Followed], settling: Settling) -> None:
        """Settle rows of which all competes, and those of which only what is new does."""
        alone, idle = settling.new_alone, next(iter(followed.values())).idle
        goes = {
            index: own
            for index, own in settling.targets.items()
            if self.profile.by_prompt
            or self.plan.rounds(index)
            or (own < np.where(alone[:, None], 0, followed[index].there)).any()
            or (alone.any() and self.layers[index].reduced)
            or (followed[index].new < self.layers[index].dense_tokens).any()  # padding goes
        }
        eviction = self._eviction(
            self.plan.after,
            prompt_tokens=self._n_seen,
            settles=True,
            idle=frozenset(np.flatnonzero(idle).tolist()),
            stays=alone,
        )
        self._evict_layers(eviction, goes)

    def _fits_behind(self, layers: Iterable[Followed]) -> BoolArray:
        """Whether a row's newest tokens fit behind what is kept, (batch,); scales included."""
        width, shape, window = self._width, self.profile.shape, self.profile.policy.window
        room: IntArray | int = 0
        for own in layers:
            least = own.kept + np.minimum(own.new, window)[:, None]
            taken = stored_bytes(least, width, shape).sum(axis=1)
            room = room + stored_bytes(own.budgets, width, shape).sum(axis=1) - taken
        return np.asarray(room) >= 0

    @property
    def _width(self) -> int:
        """The most bits that any entry is stored at."""
        shape, bits = self.profile.shape, self.profile.bits
        return 16 if bits is None else int(bits[list(shape.full_layers)].max())

    def _followed(self, layer: BudgetLayer, budgets: IntArray, tokens: IntArray) -> Followed:
        """What is known of a layer whose latest tokens have followed."""
        visible = self.arrival.visible
        new = row_tokens(visible[:, self._n_seen - layer.dense_tokens :])
        idle = row_tokens(visible[:, self.arrival.settled :]) == 0
        kept = np.zeros_like(budgets) if layer.entries is None else layer.entries.lengths
        return Followed(budgets=budgets, kept=kept, new=new, idle=idle, tokens=tokens)

    def _final_targets(self, visible: Tensor | None = None) -> dict[int, IntArray]:
        """Entries that each layer is to keep of the complete prompt, where any has to go.

        Defaults to the current prompt.
        """
        if visible is None:
            visible = self.arrival.visible[:, : self.arrival.prompt_tokens]
        tokens, columns = row_tokens(visible), int(visible.shape[1])
        budgets = self.arrival.budgets(tokens)
        targets: dict[int, IntArray] = {}
        for index in self.profile.shape.full_layers:
            own: IntArray = np.minimum(budgets[:, index], tokens[:, None])
            always = self.profile.by_prompt or self.plan.rounds(index)
            if always or bool((own < columns).any()):
                targets[index] = own
        whole = all((own == columns).all() for own in targets.values())
        if self.profile.by_prompt and whole and not self.plan.bits:
            return {}
        return targets

    def _by_prompt(
        self,
        eviction: Eviction,
        targets: dict[int, IntArray],
        states: Mapping[int, AttentionStates],
    ) -> dict[int, IntArray]:
        """Hand out as many entries of these layers in all by each row's own scores."""
        layers = [self.layers[index] for index in targets]
        pairs = zip(layers, states.values(), strict=True)
        by_row = [eviction.evictable_scores(layer, own) for layer, own in pairs]
        stay = [eviction.kept_of(layer).beside for layer in layers]
        result = {index: own.copy() for index, own in targets.items()}
        for row, scores in enumerate(zip(*by_row, strict=True)):
            if not scores[0].shape[-1]:
                continue  # a row of nothing but sinks and window
            granted = np.stack([own[row] for own in targets.values()])
            beside = np.stack([np.broadcast_to(own[row], granted.shape[1:]) for own in stay])
            budgets = self._handed_out(scores, granted, beside)
            for index, own in zip(result, budgets, strict=True):
                result[index][row] = own
        return result

    def _handed_out(
        self, scores: Sequence[Tensor], granted: IntArray, beside: IntArray
    ) -> IntArray:
        """By the scores of a row, in no more bytes than budgets (n_layers, n_kv_heads) of it take.

        At fewer bits, heads of different length need more scales than those of one length. Behind
        entries that are kept, budgets and bytes are those of all, and sinks are among these.
        """
        policy = self.profile.policy
        protected = policy.window if beside.any() else policy.protected_tokens
        width, shape = self._width, self.profile.shape
        total, most = int(granted.sum()), stored_bytes(granted + beside, width, shape).sum()
        while True:
            counts = handed_out(scores, total, protected=protected)
            over = int(stored_bytes(counts + beside, width, shape).sum() - most)
            if over <= 0:
                return counts
            total -= -(-over // sum(packed_row_bytes(width, shape.head_dim)))

    def _layer_states(self, index: int, eviction: Eviction) -> AttentionStates:
        """What a layer has to choose from beside what is kept already."""
        keys, values = self.layers[index].all_but(eviction.following)
        return replace(self.attention[index], keys=keys, values=values)

    # Budgets that are decided from the prompt

    def _decide_rows(self, rows: Sequence[IntArray]) -> None:
        """Decide the budgets of rows without padding."""
        decoder = self.plan.decoder()
        if self.plan.decide is None or decoder is None:
            return
        begun = time.perf_counter()
        decided = row_decisions(self.plan.decide, decoder, rows, self.plan.profile)
        self.arrival.row_profiles = tuple(decided)
        if all(one is decided[0] for one in decided):
            self.profile = decided[0]
        self.decision_seconds = time.perf_counter() - begun

    def _decide_on_arrival(self, batch: int, arguments: Mapping[str, Any], mask: object) -> None:
        """Decide the budgets in the first forward, unless that was done before."""
        ahead = self.arrival.shown_rows is not None
        if self.plan.decide is None or self._n_seen or ahead:
            return
        _, tokens = refusals.new_tokens_shape(arguments)
        chunk = self.arrival.open or self.arrival.announced not in (None, tokens)
        refusals.refuse(decides_from_chunk=chunk)
        self.arrival.row_profiles = None  # of an attempt that failed
        visible = self.arrival.visible_after(0, batch, tokens, mask)
        self._decide_rows(prompt_rows(arguments, visible))


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
