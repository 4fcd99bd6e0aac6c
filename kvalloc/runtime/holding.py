"""A prompt that is held whole until it is complete, and all layers that evict at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.errors import UnsupportedRequestError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates
from kvalloc.models.structure import context_limit
from kvalloc.runtime.arrival import Arrival, Step
from kvalloc.runtime.deciding import Decide, from_held, prompt_rows
from kvalloc.runtime.eviction import Eviction, Held
from kvalloc.runtime.later import (
    HeldPrompt,
    Wanted,
    check_context,
    check_draft,
    check_repeat,
    run_later_passes,
)
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.policies import EvictionPolicy
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.policies.weighted import Weighted
from kvalloc.runtime.refusals import HALF_WAY, check_read
from kvalloc.runtime.selection import handed_out, keep_best
from kvalloc.runtime.unfinished import Part, parts
from kvalloc.scorers import Scorer
from kvalloc.scorers.later_pass import merged_passes

__all__ = ["Holding", "HoldsPrompt", "end_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldEviction(Eviction):
    """An eviction of a prompt that was held: its last queries are those noted as it arrived.

    ``visible`` covers the new tokens while it arrives, and all of it when entries are evicted.

    Attributes
    ----------
    deciding : Scorer or None
        Looks at the prompt, too: its scores decide the budgets.
    scored : dict of (int, Part) to Tensor, (batch, n_kv_heads, n_tokens)
        Scores that `evictable_scores` has computed of each layer, until entries are kept by them.
    """

    deciding: Scorer | None = None
    scored: dict[tuple[int, Part], Tensor] = field(default_factory=dict)

    held: ClassVar[bool] = True

    @torch.no_grad()
    def hold_queries(self, layer: BudgetLayer, states: AttentionStates) -> None:
        """Note the queries that `evict` will need when the held prompt is complete."""
        layer.unfinished.grain = self._grain(layer)
        for part in parts(self._grain(layer), *self._sizes(layer, states)):
            self._note_queries(layer, layer.unfinished, part, states)

    @torch.no_grad()
    def evictable_scores(self, layer: BudgetLayer, states: AttentionStates) -> list[Tensor]:
        """Scores of a held layer's entries without sinks, window and padding.

        Parameters
        ----------
        layer : BudgetLayer
            Holds a complete prompt.
        states : AttentionStates
            With its keys and values.

        Returns
        -------
        list of Tensor, each (n_kv_heads, n_evictable)
            One a row; n_evictable is 0 where a row has no more than sinks and window.
        """
        assert isinstance(self.policy, Score | Weighted)  # `budget_fault` refuses others
        found: list[Tensor] = []
        for part in parts(self._grain(layer), *self._sizes(layer, states)):
            own = self._candidates(layer, states, part).states
            end = max(int(own.keys.shape[2]) - self.window, self.sinks)
            scores = self.policy.scores(own, sinks=self.sinks)
            self.scored[states.layer, part] = scores
            found += scores[..., self.sinks : end]
        return found

    def row_states(
        self, layer: BudgetLayer, states: AttentionStates, row: int | None
    ) -> AttentionStates:
        """What a layer saw of one row of a held prompt, without its padding."""
        return self._candidates(layer, states, (row, None)).states

    def _kept(self, part: Part, states: AttentionStates, budgets: Tensor) -> Tensor:
        """By the scores that the entries were handed out by, where they were."""
        scores = self.scored.pop((states.layer, part), None)
        if scores is None:
            return Eviction._kept(self, part, states, budgets)  # slots: super() finds no class
        return keep_best(scores, budgets, sinks=self.sinks, window=self.window)

    def _wanted_rows(self) -> int:
        """Of the prompt's last queries, all where somebody adds up what each chunk brings."""
        policy, n_tokens = self.policy, self.prompt_tokens
        sums, rows = policy.observes or policy.needs_whole_prompt, policy.query_rows(n_tokens)
        if self.deciding is not None:
            sums |= type(self.deciding).observe is not Scorer.observe
            rows = max(rows, self.deciding.query_rows(n_tokens))
        return n_tokens if sums else rows


def end_tokens(model: Any) -> frozenset[int]:
    """What the model ends a turn with."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


class Holding:
    """What is remembered of a prompt that is held whole, beside its keys, values and queries.

    Parameters
    ----------
    wanted : mapping of int to sequence of Scorer
        For each layer, the scorers that have to see what comes after the prompt.
    model : nn.Module
        Its head is needed to draft; held weakly.
    deciding : Scorer or None
        Whose scores of the whole prompt decide the budgets.

    Raises
    ------
    UnsupportedModelError
        If a scorer drafts and the model has no head.
    """

    def __init__(self, wanted: Wanted, model: nn.Module, deciding: Scorer | None = None) -> None:
        self.wanted, self.deciding = wanted, deciding
        scorers = [scorer for each in wanted.values() for scorer in each]
        scorers += [] if deciding is None else [deciding]
        kinds = {scorer.later.kind for scorer in scorers if scorer.later}
        self.drafts, self.repeats = "draft" in kinds, "repeat" in kinds
        self._head: Callable[[], nn.Module | None] = lambda: None
        if self.drafts:
            find = getattr(model, "get_output_embeddings", None)
            head = None if find is None else find()
            check_draft(head)
            self._head = weakref.ref(head)
        self._ends = end_tokens(model)
        self._limit = context_limit(model)
        self.forget()

    def forget(self) -> None:
        """Get ready for a new prompt."""
        self._ids: Tensor | None = None
        self._last_hidden: Tensor | None = None
        self._next_positions: Tensor | None = None
        self._new: tuple[Tensor | None, Tensor | None] = (None, None)
        self.seen: dict[int, AttentionStates] = {}

    @property
    def head(self) -> nn.Module | None:
        """The model's head; None where nothing is drafted."""
        return self._head()

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Look at a forward of the prompt before it runs.

        Raises
        ------
        UnsupportedRequestError
            If it has no token ids, and the prompt is to be repeated.
        """
        ids = arguments.get("input_ids")
        if arguments.get("inputs_embeds") is not None or not isinstance(ids, Tensor):
            ids = None
        if self.repeats:
            check_repeat(ids)
        if self.deciding is not None:
            prompt_rows(arguments, None)  # refuses where there are no ids
        positions = arguments.get("position_ids")
        self._new = ids, positions if isinstance(positions, Tensor) else None

    def check_room(self, step: Step, layers: Collection[int]) -> None:
        """After `begin`: refuse a prompt behind which the passes to come have no room.

        Parameters
        ----------
        step : Step
            What the forward is.
        layers : collection of int
            Those that have to evict.

        Raises
        ------
        InputError
            If a pass would go beyond the tokens that the model was made for.
        """
        scorers = [one for layer in layers for one in self.wanted.get(layer, ())]
        scorers += [] if self.deciding is None else [self.deciding]
        passes = merged_passes(scorer.later for scorer in scorers)
        if self._limit is None or not passes:
            return
        coming = step.prompt_tokens - step.seen - step.new_tokens
        some, _, following = _rows_end(step, self._new[1])
        places = _where(some, following, self._next_positions) + coming
        tokens = torch.full((step.batch,), step.prompt_tokens)
        if step.visible is not None:
            tokens = step.visible.sum(dim=1) + coming
        for later in passes:
            check_context(later, places.tolist(), tokens.tolist(), self._limit)

    def note(self, states: AttentionStates) -> None:
        """Note what of a layer's states is the same for the whole prompt."""
        empty = states.queries[:, :, :0].clone()  # a view would keep them all alive
        nothing = states.keys[:, :, :0].clone()
        self.seen[states.layer] = replace(
            states, queries=empty, keys=nothing, values=nothing, mask=None
        )

    @torch.no_grad()
    def end(self, step: Step, output: Any) -> None:
        """A forward of the prompt went through: note where each row is."""
        ids, positions = self._new
        self._new = (None, None)
        if ids is not None:
            self._ids = ids if self._ids is None else torch.cat([self._ids, ids], dim=1)
        hidden: Tensor = output[0]
        if positions is not None:
            positions = positions.to(hidden.device)
        some, last, following = (states.to(hidden.device) for states in _rows_end(step, positions))
        self._next_positions = _where(some, following, self._next_positions)
        if self.drafts:
            rows = torch.arange(step.batch, device=hidden.device)
            self._last_hidden = _where(some, hidden[rows, last], self._last_hidden)

    def select(self, rows: Tensor) -> None:
        """Let row i go on with what is known of row ``rows[i]``."""
        for name in ("_ids", "_last_hidden", "_next_positions"):
            states: Tensor | None = getattr(self, name)
            if states is not None:
                setattr(self, name, states[rows.to(states.device)])

    def rows(self, visible: Tensor | None) -> list[IntArray]:
        """Token ids of each row of the complete prompt, without padding."""
        return prompt_rows({"input_ids": self._ids}, visible)

    def prompt(self, decoder: nn.Module, layers: Sequence[Any], arrival: Arrival) -> HeldPrompt:
        """The complete prompt, as later passes take it."""
        assert self._next_positions is not None
        head, first = self.head, None
        if head is not None and self._last_hidden is not None:
            with torch.no_grad():
                first = head(self._last_hidden).argmax(dim=-1)
        whole = {i: layer for i, layer in enumerate(layers) if isinstance(layer, BudgetLayer)}
        visible = arrival.visible
        return HeldPrompt(
            decoder=decoder,
            head=head,
            ends=self._ends,
            stored={index: (layer.keys, layer.values) for index, layer in whole.items()},
            sliding={i: layer for i, layer in enumerate(layers) if i not in whole},
            n_prompt=int(next(iter(whole.values())).keys.shape[2]),
            visible=None if visible is None or bool(visible.all()) else visible,
            next_positions=self._next_positions,
            first_tokens=first,
            ids=self._ids,
        )


def _rows_end(step: Step, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rows of a forward end.

    Parameters
    ----------
    step : Step
    positions : Tensor of int64, (batch or 1, n_new_tokens), or None
        As the model got them; None where it counts columns.

    Returns
    -------
    some : Tensor of bool, (batch,)
        Rows that have any token in it that is no padding.
    last : Tensor of int64, (batch,)
        Place of their last one.
    following : Tensor of int64, (batch,)
        Position of what follows it, whatever padding comes behind.
    """
    if positions is None:
        positions = torch.arange(step.seen, step.seen + step.new_tokens)[None]
    device = positions.device
    positions = positions.expand(step.batch, -1)
    last = torch.full((step.batch,), step.new_tokens - 1, device=device)
    some = torch.ones(step.batch, dtype=torch.bool, device=device)
    if step.new_visible is not None:
        shown = step.new_visible.to(device)
        some = shown.any(dim=1)
        last = (shown * torch.arange(step.new_tokens, device=device)).amax(dim=1)
    rows = torch.arange(step.batch, device=device)
    return some, last, positions[rows, last] + 1


def _where(some: Tensor, new: Tensor, old: Tensor | None) -> Tensor:
    """New values of some rows; a row of padding so far has new ones, too, until it begins."""
    if old is None:
        return new.clone()
    shape = (-1, *(1,) * (new.ndim - 1))
    return torch.where(some.view(shape), new, old.to(new.device))


class HoldsPrompt:
    """The part of a cache that holds a prompt whole, if its policy needs that."""

    profile: BudgetProfile
    arrival: Arrival
    layers: list[Any]
    decoder: Callable[[], nn.Module | None]
    _decide: Decide | None
    _decide_rows: Callable[..., None]
    _is_packed: Callable[[int], bool]
    get_seq_length: Callable[[], int]
    _policy: EvictionPolicy
    _holding: Holding | None
    _bits: dict[int, IntArray]
    _groups: dict[int, tuple[int, ...]]
    _reader: Any
    _interrupted: str | None

    def _make_holding(self, model: nn.Module) -> Holding | None:
        wanted = {
            layer: self._policy.later_scorers(layer) for layer in self.profile.shape.full_layers
        }
        wanted = {layer: each for layer, each in wanted.items() if each}
        decide = from_held(self._decide)
        deciding = None if decide is None else decide.scorer
        whole = self._policy.holds or self.profile.by_prompt
        if not wanted and deciding is None and not whole:
            return None
        if self.arrival.decode_every is not None:
            why, instead = (
                "each prompt hands out these budgets once, when it is complete",
                "choose another profile",
            )
            if wanted:
                why = "a scorer of this profile looks at what comes right after the prompt"
                why, instead = (
                    f"{why}, which says nothing of what is decoded later",
                    "choose another scorer",
                )
            elif deciding is not None:
                why = f"{option('hold')} decides once, when the prompt is complete"
                instead = "do not hold"
            without = option("decode_every")
            raise UnsupportedRequestError(f"{why}; leave out {without}, or {instead}")
        return Holding(wanted, model, deciding)

    def _holds(self, step: Step) -> bool:
        """Whether this forward is of a prompt that is held."""
        return self._holding is not None and not step.follows

    def _begin_held(self, arguments: Mapping[str, Any], step: Step) -> None:
        assert self._holding is not None
        self._holding.begin(arguments)
        # any chunk may be the last one inside `prefill`; budgets still to be decided are not known
        layers: Collection[int] = self._holding.wanted
        if self._holding.deciding is None:
            visible = step.visible
            if visible is not None and visible.shape[1] < step.prompt_tokens:
                more = step.prompt_tokens - int(visible.shape[1])
                visible = nn.functional.pad(visible, (0, more), value=True)
            targets = self._held_targets(step.batch, step.prompt_tokens, visible)
            layers = targets
            if self._reader is not None:
                check_read(self._policy, targets.values())
        self._holding.check_room(step, layers)

    def _note_held(self, layer: BudgetLayer, states: AttentionStates, step: Step) -> None:
        assert self._holding is not None
        self._holding.note(states)
        eviction = self._held_eviction(step.prompt_tokens, step.new_visible)
        eviction.hold_queries(layer, states)

    def _end_held(self, step: Step, output: Any) -> None:
        assert self._holding is not None
        self._holding.end(step, output)
        if step.completes:
            self._finish_held()

    def _held_eviction(self, prompt_tokens: int, visible: Tensor | None) -> HeldEviction:
        policy, holding = self.profile.policy, self._holding
        return HeldEviction(
            policy=self._policy,
            sinks=policy.sinks,
            window=policy.window,
            prompt_tokens=prompt_tokens,
            visible=visible,
            remember=False,
            bits=self._bits,
            deciding=None if holding is None else holding.deciding,
        )

    def _held_targets(
        self, batch: int, columns: int, visible: Tensor | None
    ) -> dict[int, IntArray]:
        """Entries that each layer is to keep of a complete prompt, where any has to go."""
        budgets, tokens = self.arrival.final_budgets(columns, batch, visible)
        found: dict[int, IntArray] = {}
        for index in self.profile.shape.full_layers:
            own: IntArray = np.minimum(budgets[:, index], tokens[:, None])
            if self.profile.by_prompt or self._is_packed(index) or bool((own < columns).any()):
                found[index] = own
        if self.profile.by_prompt and all((own == columns).all() for own in found.values()):
            return {}
        return found

    def _by_prompt(
        self, eviction: HeldEviction, targets: dict[int, IntArray]
    ) -> dict[int, IntArray]:
        """As many entries in all, handed out by each row's own scores."""
        by_row: list[list[Tensor]] = []
        for index in targets:
            states = self._layer_states(index)
            by_row.append(eviction.evictable_scores(self.layers[index], states))
        totals = sum(own.sum(axis=1) for own in targets.values())
        found = {index: own.copy() for index, own in targets.items()}
        for row, scores in enumerate(zip(*by_row, strict=True)):
            if not scores[0].shape[-1]:
                continue  # a row of nothing but sinks and window
            protected = self.profile.policy.protected_tokens
            budgets = handed_out(scores, int(totals[row]), protected=protected)
            for index, own in zip(found, budgets, strict=True):
                found[index][row] = own
        return found

    @torch.no_grad()
    def _finish_held(self) -> None:
        """The prompt is complete: make the passes, and let every layer evict.

        Whatever fails here leaves some layers whole and others reduced, so the cache then refuses
        to go on.
        """
        decoder, holding = self.decoder(), self._holding
        assert holding is not None
        if decoder is None:  # the model is gone, and nobody can ask the cache any more
            return
        self._interrupted = HALF_WAY
        columns, batch = self.get_seq_length(), self.layers[0].keys.shape[0]
        visible = self.arrival.visible
        full = self.profile.shape.full_layers
        if holding.deciding is not None:
            self._look_later(decoder, dict.fromkeys(full, (holding.deciding,)))
            self._decide_rows(holding.rows(visible), self._row_states)
        targets = self._held_targets(batch, columns, visible)
        if self._reader is not None:
            check_read(self._policy, targets.values())
        self._look_later(decoder, {i: each for i, each in holding.wanted.items() if i in targets})
        eviction, held = self._held_eviction(columns, visible), list[Held]()
        if self.profile.by_prompt:
            targets = self._by_prompt(eviction, targets)
        for index, own in targets.items():
            layer = self.layers[index]
            group = self._groups.get(index)
            eviction.evict_in_group(layer, self._layer_states(index), own, group, held)
        for index in self.profile.shape.full_layers:
            self.layers[index].unfinished.clear()
        holding.forget()
        if self._reader is not None:
            self._reader.forget()
        self._interrupted = None

    def _layer_states(self, index: int) -> AttentionStates:
        """What a layer saw of the held prompt, but for its queries."""
        assert self._holding is not None
        layer = self.layers[index]
        return replace(self._holding.seen[index], keys=layer.keys, values=layer.values)

    def _row_states(self, row: int) -> dict[int, AttentionStates]:
        """What each layer saw of one row, without padding."""
        eviction = self._held_eviction(self.get_seq_length(), self.arrival.visible)
        return {
            index: eviction.row_states(self.layers[index], self._layer_states(index), row)
            for index in self.profile.shape.full_layers
        }

    def _look_later(self, decoder: nn.Module, wanted: Mapping[int, Sequence[Scorer]]) -> None:
        """Make the passes that are still to be made, and note what scorers see of them."""
        assert self._holding is not None
        missing: dict[int, list[Scorer]] = {}
        for index, scorers in wanted.items():
            noted = self.layers[index].unfinished.later
            new = [one for one in scorers if one.later and one.later_key not in noted]
            if new:
                missing[index] = new
        if not missing:
            return
        prompt = self._holding.prompt(decoder, self.layers, self.arrival)
        notes = run_later_passes(prompt, missing, sinks=self.profile.policy.sinks)
        for index, found in notes.items():
            self.layers[index].unfinished.later |= found
