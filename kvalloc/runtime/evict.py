"""Eviction: a policy chooses among the entries of layers, and the choice is stored."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import packed_row_bytes, stored_bytes
from kvalloc.errors import SolverError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, Observed, without_autocast
from kvalloc.runtime.checks import ensure
from kvalloc.runtime.door import Batch, Door
from kvalloc.runtime.kept import Part
from kvalloc.runtime.notes import of_head, of_row
from kvalloc.runtime.plan import widest
from kvalloc.runtime.policies.base import EvictionPolicy, Limits
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.rows import Row
from kvalloc.runtime.selection import flat_entries, handed_out, keep_best, kept_places
from kvalloc.runtime.store import Store


@dataclass(slots=True, eq=False)
class Running:
    """The forward that runs.

    Attributes
    ----------
    batch : Batch
    every : int
        Tokens between two evictions, for which layers get room.
    noted : int
        Latest queries of each row that are kept of it; 0 for none.
    left : int
        Those of them that are left once policies have looked at a chunk of the prompt.
    planned : dict of int to list of (Eviction, ndarray)
        Evictions of each layer once it has attended.
    observing : list of Eviction
        Rows whose policies note a chunk after which a layer evicts nothing.
    """

    batch: Batch
    every: int
    noted: int = 0
    left: int = 0
    planned: dict[int, list[tuple[Eviction, IntArray]]] = field(default_factory=dict)
    observing: list[Eviction] = field(default_factory=list)


Bundle: TypeAlias = "tuple[IntArray, int | None]"
"""Rows that are looked at together, increasing, and which KV head of one row; None for all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Eviction:
    """Eviction in some rows at one event: while a prompt is read, after it, or in a conversation.

    A policy looks at as many rows at once as are alike; at the heads of a row that hold different
    numbers of entries one by one.

    Attributes
    ----------
    rows : ndarray of int64, (n_rows,)
        Which rows, increasing.
    policy : EvictionPolicy
        Chooses.
    sinks, window : int
        First and last tokens of each row, which always stay.
    tokens : ndarray of int64, (batch,)
        Tokens that each row has seen.
    prompt : ndarray of int64, (batch,)
        Tokens of each row, as far as that is known, that are to be ranked in the end.
    door : Door
        Knows the columns of a row, for layers that store every column.
    widths : mapping
        For layers that are rounded from now on: those of each KV head, (n_kv_heads,).
    unobserved : ndarray of int64, (batch,), optional
        How many of the latest tokens the policy has not observed yet; all by default.
    remember : bool
        Whether there will be another event for which the policy has to note something.
    more : bool
        Whether more of the prompt is to come.
    whole : bool
        Whether the prompt stayed whole, with nothing observed yet.
    behind : bool
        Whether entries kept by earlier evictions stay, and targets are for new entries.
    scored : dict
        Scores of `hand_out` for each layer and bundle, until entries are kept by them.
    """

    rows: IntArray
    policy: EvictionPolicy
    sinks: int
    window: int
    tokens: IntArray
    prompt: IntArray
    door: Door
    widths: Mapping[int, IntArray] = field(default_factory=dict)
    unobserved: IntArray | None = None
    remember: bool = False
    more: bool = False
    whole: bool = False
    behind: bool = False
    scored: dict[tuple[int, bytes, int | None], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, rows: IntArray, policy: EvictionPolicy, **event: Any) -> Eviction:
        """Return an eviction in rows that are kept as one of them is."""
        own = row.profile.policy
        return cls(rows=rows, policy=policy, sinks=own.sinks, window=own.window, **event)

    def by_layers(
        self, goals: Mapping[int, Mapping[int, IntArray]]
    ) -> Iterator[tuple[Eviction, dict[int, IntArray]]]:
        """Yield evictions of layers in which the same rows evict, with their targets.

        Parameters
        ----------
        goals : mapping of int to mapping
            Of each row, how many entries stay of each layer in which any has to go.
        """
        layers: dict[tuple[int, ...], dict[int, IntArray]] = {}
        rows = self.rows.tolist()
        for layer in sorted({layer for row in rows for layer in goals[row]}):
            some = tuple(row for row in rows if layer in goals[row])
            targets = np.stack([goals[row][layer] for row in some])
            layers.setdefault(some, {})[layer] = targets
        for some, targets_of in layers.items():
            yield replace(self, rows=np.array(some)), targets_of

    # What a policy looks at

    def bundles(self, store: Store) -> list[Bundle]:
        """Return the rows that are looked at together, and heads one by one where they differ."""
        notes, alike = store.notes, dict[Hashable, list[int]]()
        for row in self.rows.tolist():
            apart = not (self.behind or store.is_even(row))
            apart |= any(own == row and head is not None for own, head in notes.observed)
            key: Hashable = (
                store.alike(row, self.door.place),
                notes.queries.signature(row),
                int(self.tokens[row]),
                (row, None) in notes.observed,
            )
            alike.setdefault((row,) if apart else key, []).append(row)
        found: list[Bundle] = []
        for key, rows in alike.items():
            heads = range(int(store.keys.shape[1])) if key == (rows[0],) else (None,)
            found += [(np.array(rows), head) for head in heads]
        return found

    def look(
        self, layer: int, store: Store, bundle: Bundle, *, latest: bool = False
    ) -> tuple[AttentionStates, Tensor, int]:
        """Return the candidates of one bundle of a layer.

        Parameters
        ----------
        layer : int
        store : Store
        bundle : Bundle
        latest : bool
            Leave out entries kept by earlier evictions.

        Returns
        -------
        AttentionStates
        Tensor of int32, (n_rows, n_kv_heads, n)
            Which token of its row each candidate is.
        int
            How many of the first candidates were kept by earlier evictions.
        """
        (rows, head), template = bundle, store.template
        assert template is not None, "a layer that evicts has attended"
        tokens, n_heads = int(self.tokens[rows[0]]), int(store.keys.shape[1])
        found = store.candidates(rows, self.door.columns, tokens, head=head, latest=latest)
        new = tokens if self.unobserved is None else int(self.unobserved[rows[0]])
        wanted = wanted_queries(self.policy, int(self.prompt[rows[0]]), whole=self.whole)
        most = max(wanted, new if self.policy.observes else 0)
        queries = template.queries
        if store.notes.queries.pieces:
            queries = store.notes.queries.of(rows, most)
        own = template
        if head is not None:
            group = queries.shape[1] // n_heads
            own, queries = template.kv_head(head), queries[:, head * group : (head + 1) * group]
        own = replace(
            own,
            queries=queries,
            keys=found.keys,
            values=found.values,
            absent=found.absent,
            older=max(int(queries.shape[2]) - new, 0),
            observed=store.notes.observed_of(rows.tolist(), head, n_heads),
            later=store.notes.later_of(rows.tolist(), head, n_heads),
            positions=None if store.kept is None else found.positions,
        )
        if (bits := self.widths.get(layer)) is not None and (bits != 16).any():
            first = own.first_head
            own = replace(own, key_bits=bits[first : first + own.keys.shape[1]])
        if (mask := self._gaps(store, own, found.positions, tokens)) is not None:
            own = replace(own, mask=mask, gaps=True)
        return own, found.positions, found.front

    def _gaps(
        self, store: Store, own: AttentionStates, positions: Tensor, tokens: int
    ) -> Tensor | None:
        """Return the mask of older queries, if entries of their own tokens were evicted.

        Returns
        -------
        Tensor of bool, (n_rows, n_query_heads, n_queries, n), or None
            None where the last keys are those of the queries, so that plain causal is right.
        """
        n_queries = int(own.queries.shape[2])
        if store.kept is None or not own.older or n_queries <= self.window:
            return None
        places = torch.arange(tokens - n_queries, tokens, device=positions.device)
        last = positions[..., -n_queries:]
        if last.shape[-1] == n_queries and bool((last == places).all()):  # the host asks the device
            return None
        seen = positions[:, :, None] <= places[:, None]
        return seen.repeat_interleave(own.queries.shape[1] // positions.shape[1], dim=1)

    @torch.no_grad()
    def observe(self, layer: int, store: Store) -> None:
        """Let the policy observe a chunk after which nothing is evicted."""
        for bundle in self.bundles(store) if self.policy.observes else ():
            own, _, _ = self.look(layer, store, bundle)
            self._note(store, bundle, self.policy.observe(own, sinks=self.sinks))

    def without(self, rows: IntArray) -> Eviction:
        """Return the same of all but these rows."""
        return replace(self, rows=np.setdiff1d(self.rows, rows))

    # What is chosen

    def hand_out(
        self,
        stores: Mapping[int, Store],
        granted: Mapping[int, IntArray],
        profiles: Sequence[BudgetProfile],
    ) -> dict[int, IntArray]:
        """Return how many entries each layer keeps, handed out by each row's own scores.

        Parameters
        ----------
        stores : mapping of int to Store
        granted : mapping of int to ndarray of int64, (n_rows, n_kv_heads)
            Number of entries that each layer may keep.
        profiles : sequence of BudgetProfile
            Of each row; its bytes are not exceeded.
        """
        targets, beside = np.stack([*granted.values()], axis=1), []
        by_row: list[list[Tensor]] = [[] for _ in self.rows]
        for layer in granted:
            store = stores[layer]
            none = np.zeros_like(targets[:, 0])
            kept = store.kept is not None and self.behind
            beside.append(store.kept.lengths[self.rows] if kept and store.kept else none)
            for row, scores in zip(by_row, self._evictable_scores(layer, store), strict=True):
                row.append(scores)
        there = np.stack(beside, axis=1)
        for place, own in enumerate(by_row):
            if own[0].shape[-1]:  # else a row of nothing but sinks and window
                targets[place] = self._within_bytes(
                    own, targets[place], there[place], profiles[place]
                )
        return {layer: targets[:, place] for place, layer in enumerate(granted)}

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
    def _evictable_scores(self, layer: int, store: Store) -> list[Tensor]:
        """Return scores of a layer's entries without sinks and window, (n_kv_heads, n) a row.

        n is 0 where a row has no more than sinks and window. A head that has fewer than another has
        -inf at its end.
        """
        policy = self.policy
        assert isinstance(policy, Score)  # other profiles are not `by_prompt`
        by_row: dict[int, list[Tensor]] = {row: [] for row in self.rows.tolist()}
        for bundle in self.bundles(store):
            own, _, front = self.look(layer, store, bundle)
            sinks = front if self.behind and front else self.sinks
            end = max(int(own.keys.shape[2]) - self.window, sinks)
            scores = own.keys[..., 0]
            if end > sinks:  # else there is nothing to choose from
                scores = policy.scores(own, sinks=sinks)
                self.scored[layer, bundle[0].tobytes(), bundle[1]] = scores
            for row, evictable in zip(bundle[0].tolist(), scores[..., sinks:end], strict=True):
                by_row[row] += evictable
        return [pad_sequence(row, batch_first=True, padding_value=-inf) for row in by_row.values()]

    # What is evicted

    @torch.no_grad()
    def keep(self, layer: int, store: Store, targets: IntArray) -> None:
        """Keep the best entries of rows of a layer.

        Parameters
        ----------
        layer : int
        store : Store
        targets : ndarray of int64, (n_rows, n_kv_heads)
            Number of entries that each keeps; if `behind`, of new ones.
        """
        others = self._rest(store)
        pieces = [self._chosen(layer, store, bundle, targets) for bundle in self.bundles(store)]
        fresh = pieces[0]
        if len(pieces) > 1:
            segments, lengths = (
                np.concatenate([getattr(one, name) for one in pieces])
                for name in ("segments", "lengths")
            )
            keys, values, positions = (
                torch.cat([getattr(one, name) for one in pieces])
                for name in ("keys", "values", "positions")
            )
            fresh = Part(
                keys=keys, values=values, positions=positions, segments=segments, lengths=lengths
            ).taken(segments.argsort())
        del pieces  # they keep alive what goes
        store.replace(self.rows, fresh, self.widths.get(layer), others, behind=self.behind)
        store.notes.forget(self.rows, observed=not (self.remember and self.policy.observes))
        if not self.more:
            store.notes.queries.forget(self.rows)

    def _rest(self, store: Store) -> list[Part]:
        """Return all that other rows have, of a layer that has been whole until now."""
        if store.kept is not None:
            return []
        found = []
        for row in np.setdiff1d(np.arange(store.rows), self.rows):
            own = store.candidates(rows := np.array([row]), self.door.columns)
            found.append(_flat((rows, None), store, own.keys, own.values, own.positions))
        return found

    def _chosen(self, layer: int, store: Store, bundle: Bundle, targets: IntArray) -> Part:
        """Return the kept entries of a bundle."""
        rows, head = bundle
        heads = slice(None) if head is None else slice(head, head + 1)
        budgets = torch.from_numpy(targets[np.searchsorted(self.rows, rows)][:, heads])
        front = 0
        if self.behind and store.kept is not None:
            front = int(store.kept.lengths[rows].max())
        own, positions, _ = self.look(layer, store, bundle, latest=front > 0)
        n_tokens = int(own.keys.shape[2])
        kept = torch.ones_like(own.keys[..., 0], dtype=torch.bool)
        goes = bool((budgets < n_tokens).any())
        if goes:
            scores = self.scored.pop((layer, rows.tobytes(), head), None)
            limits = Limits(sinks=front or self.sinks, window=self.window)
            if scores is not None:
                kept = keep_best(scores, budgets + front, **limits)
            else:
                kept = self.policy.keep(own, budgets + front, **limits)
            kept = kept[..., -n_tokens:]  # what is in front stays where it is stored
            check_kept(self.policy, kept, budgets)
        keys, values = own.keys, own.values
        if not front:
            if self.remember and self.policy.observes:
                noted = self.policy.observe(own, sinks=self.sinks)
                self._note(store, bundle, noted, kept, budgets)
            if goes:
                limits = Limits(sinks=self.sinks, window=self.window)
                made = self.policy.combine(own, kept, budgets, **limits)
                keys, values = (own.keys, own.values) if made is None else made
        return _flat(bundle, store, keys, values, positions, kept, budgets.numpy())

    def _note(
        self,
        store: Store,
        bundle: Bundle,
        observed: Observed | None,
        kept: Tensor | None = None,
        budgets: Tensor | None = None,
    ) -> None:
        """Store the notes about a bundle, cut to the entries that stay."""
        (rows, head), notes = bundle, store.notes.observed
        for place, row in enumerate(rows.tolist()):
            notes.pop((row, head), None)
            if observed is None:
                continue
            own = of_row(observed, place)
            if kept is None or budgets is None or own.columns is None:
                notes[row, head] = own
                continue
            stays = kept_places(kept[place, None], budgets[place, None])
            each = torch.split(stays, budgets[place].tolist())
            if len({len(one) for one in each}) == 1:
                notes[row, head] = own.kept(torch.stack(each)[None])
                continue
            for one, indices in enumerate(each):  # heads differ from here on
                notes[row, one] = of_head(own, one, len(each)).kept(indices[None, None])


def _flat(
    bundle: Bundle,
    store: Store,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    kept: Tensor | None = None,
    counts: IntArray | None = None,
) -> Part:
    """Return the kept entries of a bundle, in fresh storage.

    One gather each, without asking the device.
    """
    rows, head = bundle
    n_heads, n = int(store.keys.shape[1]), int(keys.shape[2])
    heads = np.arange(n_heads) if head is None else np.array([head])
    sources = [keys, values, positions[..., None]]
    if kept is None or counts is None or (counts == n).all():
        counts = np.full((len(rows), len(heads)), n)
        flat = [own.reshape(-1, own.shape[-1]).clone() for own in sources]
    else:
        places = kept.nonzero_static(size=int(counts.sum()), fill_value=0).unbind(1)
        flat = []
        for own in sources:
            entries, index = flat_entries(own, *places)
            flat.append(entries.index_select(0, index))
    return Part(
        keys=flat[0],
        values=flat[1],
        positions=flat[2][:, 0],
        segments=(rows[:, None] * n_heads + heads).ravel(),
        lengths=counts.reshape(-1),
    )


def evict(cache: Any, eviction: Eviction, targets: Mapping[int, IntArray]) -> None:
    """Evict in these layers of a cache; in all together, where their heads compete."""
    stores, profiles = cache.stores, [cache.rows[row].profile for row in eviction.rows]
    with without_autocast(cache.layers[0].keys):
        if targets and profiles[0].by_prompt:
            targets = eviction.hand_out(stores, targets, profiles)
        for listener in cache.extensions:
            listener.planned(targets)
        for layer, counts in targets.items():
            eviction.keep(layer, stores[layer], counts)


def wanted_queries(policy: EvictionPolicy, tokens: int, *, whole: bool) -> int:
    """Return how many of the latest queries of a prompt a policy is to see.

    Parameters
    ----------
    policy : EvictionPolicy
    tokens : int
        Of the prompt.
    whole : bool
        Whether the prompt stayed whole, with nothing observed yet.
    """
    return tokens if whole and policy.observes else policy.query_rows(tokens)


def check_kept(policy: EvictionPolicy, kept: Tensor, budgets: Tensor) -> None:
    """Refuse a policy's choice that does not meet the budgets.

    Raises
    ------
    SolverError
        If a head keeps more or fewer entries than its budget.
    """
    found, wanted = kept.sum(dim=-1), budgets.to(kept.device)

    def fail() -> None:
        row, head = (found != wanted).nonzero()[0].tolist()
        raise SolverError(
            f"the policy {policy.name} kept {int(found[row, head])} entries in KV head {head} of "
            f"row {row}, whose budget is {int(budgets[row, head])}; a policy must meet it exactly"
        )

    ensure((found == wanted).all(), fail)
