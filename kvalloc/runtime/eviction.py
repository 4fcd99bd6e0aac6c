"""From what a layer holds to what it keeps: the policy chooses, and the choice is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.accounting.costs import packed_row_bytes, stored_bytes
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.runtime.kept import KeptEntries
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.packed import NO_COLUMN
from kvalloc.runtime.policies.base import EvictionPolicy, Limits
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.refusals import check_kept
from kvalloc.runtime.selection import flat_entries, handed_out, keep_best, kept_places
from kvalloc.runtime.unfinished import LAYER, Part, Queries, part_of


def _collected(targets: IntArray, chosen: Iterator[Choice]) -> KeptEntries:
    """What is kept of all pieces, in fresh storage; one gather each, without asking the device."""
    total, end = int(targets.sum()), 0
    store: list[Tensor] = []
    for (row, head), positions, own, kept in chosen:
        first, end = end, end + int(targets[_one(row), _one(head)].sum())
        sources = [own.keys, own.values, positions[..., None]]
        store = store or [own.new_empty(total, own.shape[-1]) for own in sources]
        if end == first:
            continue
        places = kept.nonzero_static(size=end - first, fill_value=0)
        for target, source in zip(store, sources, strict=True):
            entries, index = flat_entries(source, *places.unbind(1))
            torch.index_select(entries, 0, index, out=target[first:end])
    keys, values, positions = store
    return KeptEntries(
        keys=keys,
        values=values,
        positions=positions[:, 0],
        lengths=targets,
    )


def _one(number: int | None) -> slice:
    return slice(None) if number is None else slice(number, number + 1)


#: A piece of a layer: columns of its entries, these as they are stored where they stay, and which
#: do, (batch, n_kv_heads, n_tokens).
Choice: TypeAlias = tuple[Part, Tensor, AttentionStates, Tensor]

UNSEEN = -1e30
"""Added to the logits of a place of no entry."""


class Source:
    """What a layer chooses from: what earlier evictions kept of it, and what has come since.

    Parameters
    ----------
    layer : BudgetLayer
    states : AttentionStates
        Its attention, with keys and values of what came since the latest eviction.
    stays : ndarray of bool, (batch,)
        Rows in which all that was kept stays: heads that keep fewer than another have places of no
        entry behind theirs, which no query sees.
    """

    def __init__(self, layer: BudgetLayer, states: AttentionStates, stays: BoolArray) -> None:
        self.layer, self.states, self.stays = layer, states, stays & layer.reduced
        self.lengths = layer.kept_lengths  # of what was kept, (batch, n_kv_heads) or (1, 1)

    @property
    def apart(self) -> BoolArray:
        """Rows whose heads are looked at one by one, as they hold different entries, (batch,)."""
        entries = self.layer.entries
        even = entries is None or entries.even
        return np.asarray(~self.stays & (not even))

    @property
    def beside(self) -> IntArray:
        """Entries that stay whatever is chosen, (batch, n_kv_heads) or (batch, 1)."""
        return np.asarray(self.lengths * self.stays[:, None])

    def front(self, part: Part) -> int:
        """Places in front of a piece that stay whatever is chosen."""
        return int(self.lengths.max()) if self.stays[part[0] or 0] else 0

    def kept(self, part: Part) -> tuple[Tensor, ...]:
        """Return keys, values and columns of what was kept of a piece; nothing if nothing went.

        Each (batch, n_kv_heads, n, ...), in the model's type.
        """
        row, head = part
        if not self.layer.reduced:
            return ()
        end = int(self.lengths.max()) if head is None else int(self.lengths[row, head])
        return tuple(own[_one(row), _one(head), :end] for own in self._padded)

    @cached_property
    def _padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """What earlier evictions kept, with as many places in all rows and heads."""
        assert self.layer.entries is not None
        return self.layer.entries.padded()


@dataclass(frozen=True, kw_only=True, slots=True)
class Eviction:
    """What goes of layers at one event: while a prompt is read, after it, or of a conversation.

    A policy looks at a whole layer where it can. Rows with padding are shown to it one by one
    without their padding, so that a row keeps what it would keep alone; heads that hold different
    entries already, from earlier evictions, one by one, too.

    Attributes
    ----------
    policy : EvictionPolicy
        Who chooses.
    sinks, window : int
        First and last tokens of each row, which always stay.
    prompt_tokens : int
        Length of the prompt as far as it is known.
    visible : Tensor of bool, (batch, n_seen)
        False marks padding among all tokens seen.
    remember : bool
        Whether there will be another chunk, for which the policy has to note something.
    bits : mapping
        For layers that are rounded from now on: those of each KV head, (n_kv_heads,).
    new_from : int
        Column from which the queries are of tokens that the policy has not observed yet.
    held : bool
        Whether the prompt is held whole: its queries are noted, and none is observed.
    settles : bool
        Whether what followed chooses, and not the prompt's last tokens.
    idle : frozenset of int
        Rows of which nothing goes, and which have no queries to choose by.
    stays : ndarray of bool, (batch,), optional
        Rows in which all that earlier evictions kept stays, and targets are of what came since; in
        none by default.
    scored : dict of (int, Part) to Tensor
        Scores that `handed_out` has computed of each layer, (batch, n_kv_heads, n_tokens), until
        entries are kept by them.
    """

    policy: EvictionPolicy
    sinks: int
    window: int
    prompt_tokens: int
    visible: Tensor
    remember: bool = True
    bits: Mapping[int, IntArray] = field(default_factory=dict)
    new_from: int = 0
    held: bool = False
    settles: bool = False
    idle: frozenset[int] = frozenset()
    stays: BoolArray | None = None
    scored: dict[tuple[int, Part], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def observe(self, layer: BudgetLayer) -> None:
        """Let the policy note what it wants of a chunk after which nothing is evicted."""
        notes, source = layer.unfinished, self._source(layer)
        for part in self._pieces(source) if self.policy.observes else ():
            own, _ = self._candidates(source, part)
            _keep_note(notes.observed, part, self.policy.observe(own, sinks=self.sinks))
        notes.prompt.trim(self.wanted_rows())

    def wanted_rows(self, row: int | None = None) -> int:
        """Return how many of a row's latest queries the policy is to see."""
        n_tokens = self.prompt_tokens
        if row is not None:  # no more than the row would have alone
            n_tokens -= int((~self.visible[row, :n_tokens]).sum())
        if self.held and self.policy.observes:
            return n_tokens
        return self.policy.query_rows(n_tokens)

    def _source(self, layer: BudgetLayer) -> Source:
        """Return what a layer has to choose from."""
        assert layer.attention is not None
        stays = np.zeros(len(self.visible), bool) if self.stays is None else self.stays
        states = replace(layer.attention, keys=layer.keys, values=layer.values)
        return Source(layer, states, stays)

    def _pieces(self, source: Source) -> list[Part]:
        """Return the pieces in which a policy looks at a layer, as large as they may be."""
        noted, states = source.layer.unfinished.observed, source.states
        apart = source.apart | any(head is not None for _, head in noted)
        alike = (source.stays == source.stays[0]).all() and self._dense_visible(states).all()
        if alike and not apart.any() and not any(row is not None for row, _ in noted):
            return [LAYER]
        heads = range(int(states.keys.shape[1]))
        return [
            (row, head)
            for row, single in enumerate(apart)
            for head in (heads if single else (None,))
        ]

    # What there is to choose from

    def _candidates(
        self, source: Source, part: Part, *, new_alone: bool = False
    ) -> tuple[AttentionStates, Tensor]:
        """What one piece of a layer chooses from.

        Parameters
        ----------
        source : Source
        part : Part
        new_alone : bool
            Leave out what earlier evictions kept.

        Returns
        -------
        AttentionStates
            Of this piece alone, without padding.
        Tensor of int32, (batch, n_kv_heads, n_tokens)
            Column of each candidate.
        """
        layer, states = source.layer, source.states
        row, head = part
        columns, end = self._columns(states, row), layer.seen_tokens
        first = end - int(states.keys.shape[2])
        positions = torch.arange(first, end, dtype=torch.int32, device=states.keys.device)
        every = [own[_one(row), _one(head)] for own in (states.keys, states.values)]
        every.append(positions.expand(*every[0].shape[:2], -1))
        every, absent = [own[:, :, columns] for own in every], None
        if before := () if new_alone else source.kept(part):
            every = [torch.cat(pair, dim=2) for pair in zip(before, every, strict=True)]
            if head is None and (source.lengths != source.lengths.max()).any():
                absent = every[2] == NO_COLUMN
        keys, values, positions = every
        own, places = self._part_states(layer, states, part)
        later = layer.unfinished.later_of(part, columns, int(states.keys.shape[1]))
        own = replace(own, keys=keys, values=values, later=later, absent=absent)
        bits = self.bits.get(own.layer)
        if bits is not None and (bits != 16).any():
            own = replace(own, key_bits=bits[own.first_head : own.first_head + keys.shape[1]])
        if layer.reduced:  # the first sink stays: it tells how much padding came before it
            start = positions[..., :1] if source.front(part) or self.sinks else 0
            own = replace(own, positions=positions - start)
        mask = self._gaps(layer, own, positions, places)
        if mask is not None:
            own = replace(own, mask=mask, gaps=True)
        return own, positions

    def _gaps(
        self, layer: BudgetLayer, own: AttentionStates, positions: Tensor, places: Tensor
    ) -> Tensor | None:
        """What older queries see, where entries of their own tokens were evicted.

        Returns
        -------
        Tensor of bool, (batch, n_query_heads, n_rows, n_tokens), or None
            None where the last keys are those of the queries, so that plain causal is right.
        """
        n_rows = int(own.queries.shape[2])
        if not layer.reduced or not own.older or n_rows <= self.window:
            return None
        places = places.to(positions.device)
        last = positions[..., -n_rows:]
        if last.shape[-1] == n_rows and bool((last == places).all()):  # the host asks the device
            return None
        seen = positions[:, :, None] <= places[:, None]
        return seen.repeat_interleave(own.queries.shape[1] // positions.shape[1], dim=1)

    def _dense_visible(self, states: AttentionStates) -> Tensor:
        """What is no padding of a layer's keys that no eviction has kept yet, (batch, n)."""
        return self.visible[:, self.visible.shape[1] - states.keys.shape[2] :]

    def _columns(self, states: AttentionStates, row: int | None) -> slice | Tensor:
        """Columns of a layer's keys, of this row without its padding."""
        if row is None:
            return slice(None)
        columns = self._dense_visible(states)[row].nonzero()[:, 0]
        first, count = (int(columns[0]), int(columns.numel())) if columns.numel() else (0, 0)
        if count and int(columns[-1]) == first + count - 1:
            return slice(first, first + count)  # a view, where padding is at one end only
        return columns.to(states.keys.device)

    def _part_states(
        self, layer: BudgetLayer, states: AttentionStates, part: Part
    ) -> tuple[AttentionStates, Tensor]:
        """The states of a piece, but for keys and values, and columns of its queries' tokens."""
        row, head = part
        notes, n_kv_heads = layer.unfinished, int(states.keys.shape[1])
        queries, places = (notes.latest if self.settles else notes.prompt).of(row)
        new, wanted = int((places >= self.new_from).sum()), self.wanted_rows(row)
        first = max(len(places) - max(wanted, new if self.policy.observes else 0), 0)
        own, places = replace(states, queries=queries[:, :, first:], mask=None), places[first:]
        own = own if head is None else own.kv_head(head)
        older, observed = max(len(places) - new, 0), notes.observed_of(part, n_kv_heads)
        return replace(own, older=older, observed=observed), places

    # What is chosen

    def handed_out(
        self, layers: Sequence[BudgetLayer], granted: Sequence[IntArray], profile: BudgetProfile
    ) -> list[IntArray]:
        """Hand out as many entries of these layers in all by each row's own scores.

        Parameters
        ----------
        layers : sequence of BudgetLayer
        granted : sequence of ndarray of int64, (batch, n_kv_heads)
            Number of entries that each layer may keep.
        profile : BudgetProfile
            Whose bytes are not exceeded.

        Returns
        -------
        list of ndarray of int64, (batch, n_kv_heads)
            Number of entries that each layer is to keep.
        """
        targets = np.stack(granted, axis=1)
        beside, by_layer = np.zeros_like(targets), []
        for place, layer in enumerate(layers):
            source = self._source(layer)
            beside[:, place] = source.beside
            by_layer.append(self._evictable_scores(source))
        for row, scores in enumerate(zip(*by_layer, strict=True)):
            if scores[0].shape[-1]:  # else a row of nothing but sinks and window
                targets[row] = self._within_bytes(scores, targets[row], beside[row], profile)
        return [targets[:, place] for place in range(len(layers))]

    def _within_bytes(
        self, scores: Sequence[Tensor], granted: IntArray, beside: IntArray, profile: BudgetProfile
    ) -> IntArray:
        """Hand out by the scores of a row, in no more bytes than granted (n_layers, n_kv_heads).

        At fewer bits, heads of different length need more scales than those of one length. Behind
        entries that are kept, budgets and bytes are those of all, and sinks are among these.
        """
        protected = self.window if beside.any() else self.sinks + self.window
        width, shape = widest(profile), profile.shape
        total, most = int(granted.sum()), stored_bytes(granted + beside, width, shape).sum()
        while True:
            counts = handed_out(scores, total, protected=protected)
            over = int(stored_bytes(counts + beside, width, shape).sum() - most)
            if over <= 0:
                return counts
            total -= -(-over // sum(packed_row_bytes(width, shape.head_dim)))

    @torch.no_grad()
    def _evictable_scores(self, source: Source) -> list[Tensor]:
        """Scores of a layer's entries without sinks, window and padding.

        Returns
        -------
        list of Tensor, each (n_kv_heads, n_evictable)
            One a row; n_evictable is 0 where a row has no more than sinks and window. A head that
            has fewer than another has -inf at its end.
        """
        policy = self.policy
        assert isinstance(policy, Score)  # other profiles are not `by_prompt`
        by_row: list[list[Tensor]] = [[] for _ in source.states.keys]
        for part in self._pieces(source):
            own, _ = self._candidates(source, part)
            sinks = source.front(part) or self.sinks
            end = max(int(own.keys.shape[2]) - self.window, sinks)
            end = sinks if part[0] in self.idle else end
            scores = own.keys[..., 0]
            if end > sinks:  # else there is nothing to choose from, or only padding
                scores = policy.scores(own, sinks=sinks)
                self.scored[source.states.layer, part] = scores
            for place, evictable in enumerate(scores[..., sinks:end]):
                by_row[place if part[0] is None else part[0]] += evictable
        return [pad_sequence(row, batch_first=True, padding_value=-inf) for row in by_row]

    def _choices(
        self,
        source: Source,
        targets: IntArray,
        observed: dict[Part, Observed],
    ) -> Iterator[Choice]:
        """One piece after the other, so that only one is taken apart at a time."""
        for part in self._pieces(source):
            front = source.front(part)
            own, positions = self._candidates(source, part, new_alone=front > 0)
            n_tokens, budgets = int(own.keys.shape[2]), _part_budgets(targets, part)
            kept = torch.ones_like(own.keys[..., 0], dtype=torch.bool)
            if bool((budgets < n_tokens).any()):
                kept = self._kept(part, own, budgets + front, sinks=front or self.sinks)
                kept = kept[..., -n_tokens:]  # what is in front stays where it is stored
                check_kept(self.policy, kept, budgets)
            if front:
                yield part, positions, own, kept
                continue
            if self.remember and self.policy.observes:
                noted = self.policy.observe(own, sinks=self.sinks)
                _keep_note(observed, part, noted, kept, budgets)
            yield part, positions, self._stored(own, kept, budgets), kept

    def _kept(self, part: Part, states: AttentionStates, budgets: Tensor, *, sinks: int) -> Tensor:
        """What stays of a piece, (batch, n_kv_heads, n_tokens).

        By the scores that the entries were handed out by, where they were.
        """
        scores = self.scored.pop((states.layer, part), None)
        if scores is not None:
            return keep_best(scores, budgets, sinks=sinks, window=self.window)
        return self.policy.keep(states, budgets, sinks=sinks, window=self.window)

    def _stored(self, own: AttentionStates, kept: Tensor, budgets: Tensor) -> AttentionStates:
        """A piece with what the policy puts into the entries that stay."""
        if not bool((budgets < kept.shape[2]).any()):
            return own
        limits = Limits(sinks=self.sinks, window=self.window)
        made = self.policy.combine(own, kept, budgets, **limits)
        if made is None:
            return own
        keys, values = made
        return replace(own, keys=keys, values=values)

    # What is evicted

    @torch.no_grad()
    def evict(self, layer: BudgetLayer, targets: IntArray) -> None:
        """Keep the best of what a layer holds.

        Parameters
        ----------
        layer : BudgetLayer
        targets : ndarray of int64, (batch, n_kv_heads)
            Number of entries that it keeps.
        """
        observed = dict[Part, Observed]()
        source = self._source(layer)
        stays, bits = source.stays, self.bits.get(source.states.layer)
        entries = _collected(targets, self._choices(source, targets, observed))
        del source  # it keeps alive what goes
        layer.keep_numbers(entries, bits, stays=stays)
        notes = layer.unfinished
        notes.observed = observed
        if self.remember and not self.settles:
            notes.prompt.trim(self.wanted_rows())
        else:
            notes.prompt = Queries()


def _keep_note(
    notes: dict[Part, Observed],
    part: Part,
    observed: Observed | None,
    kept: Tensor | None = None,
    budgets: Tensor | None = None,
) -> None:
    """Write down what was observed of a piece, cut to the entries that stay."""
    notes.pop(part, None)
    if observed is None:
        return
    if kept is None or budgets is None or observed.columns is None:
        notes[part] = observed
        return
    places = _places(kept, budgets)
    if bool((budgets == budgets[0, 0]).all()):
        indices = torch.stack(places).view(*budgets.shape, -1)
        notes[part] = observed.kept(indices)
        return
    # Heads differ from here on, and so will be looked at one by one.
    for (row, head), indices in zip(np.ndindex(*budgets.shape), places, strict=True):
        own = part_of(observed, (row, head), budgets.shape[1])
        key = (row if part[0] is None else part[0], head if part[1] is None else part[1])
        notes[key] = own.kept(indices[None, None])


def _places(kept: Tensor, budgets: Tensor) -> tuple[Tensor, ...]:
    """Places of what is kept, row by row and of one head after the other, each (n_kept,)."""
    return torch.split(kept_places(kept, budgets), budgets.flatten().tolist())


def _part_budgets(targets: IntArray, part: Part) -> Tensor:
    """Entries to keep of a piece, (batch, n_kv_heads), on the host."""
    row, head = part
    return torch.from_numpy(targets)[_one(row), _one(head)]


def widest(profile: BudgetProfile) -> int:
    """Return the most bits that any entry is stored at."""
    return int(profile.widths[list(profile.shape.full_layers)].max())
