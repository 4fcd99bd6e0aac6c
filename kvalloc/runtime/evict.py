"""Eviction: a policy chooses among the entries of layers."""

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
from kvalloc.accounting.costs import MIXES, counts_of, entry_bytes, stored_bytes
from kvalloc.errors import SolverError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.attention import AttentionStates, ChosenWidths, Observed, without_autocast
from kvalloc.runtime.checks import ensure
from kvalloc.runtime.door import Batch, Door
from kvalloc.runtime.kept import Part, joined, packed
from kvalloc.runtime.notes import of_head, of_row, of_rows
from kvalloc.runtime.plan import widest
from kvalloc.runtime.policies.base import FEW_ENTRIES, EvictionPolicy, Limits
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.rows import Row, repeats_of
from kvalloc.runtime.selection import (
    chosen_widths,
    evictable,
    flat_entries,
    handed_out,
    keep_best,
    kept_places,
)
from kvalloc.runtime.store import Store


@dataclass(slots=True, eq=False)
class Running:
    """Plans of a running forward.

    `planned` are evictions after a layer's attention, with targets; in `observing` policies only
    observe a chunk. Layers in `waiting` evict once they are `layers_together`. `sees` is
    `AttentionCall.sees` of `aligned` tokens.

    Attributes
    ----------
    interval : int
        Tokens to the next eviction, for which layers allocate.
    n_queries, n_queries_after : int
        Latest queries to store, and to keep after a chunk's observation.
    """

    batch: Batch
    interval: int
    n_queries: int = 0
    n_queries_after: int = 0
    planned: list[tuple[Eviction, dict[int, IntArray]]] = field(default_factory=list)
    observing: list[Eviction] = field(default_factory=list)
    layers_together: int = 1
    waiting: list[int] = field(default_factory=list)
    sees: Tensor | None = None

    def of_layers(self, layers: Sequence[int]) -> list[tuple[Eviction, dict[int, IntArray]]]:
        """Return the planned evictions of some layers."""
        result = []
        for eviction, targets in self.planned:
            if due := {layer: targets[layer] for layer in layers if layer in targets}:
                result.append((eviction, due))
        return result


Bundle: TypeAlias = "tuple[IntArray, int | None]"
"""Increasing rows that a policy scores in one call, and the KV head of one row; None for all heads.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Eviction:
    """Eviction in rows: while a prompt is read, after it, or in a turn.

    Attributes
    ----------
    rows : ndarray of int64, (n_rows,)
        Increasing.
    prompt : ndarray of int64, (batch,)
        Tokens to rank in the end, if known.
    widths : mapping of int to ndarray, (n_kv_heads,)
        Bits, or a mix of `MIXES`, of each layer rounded from now on.
    unobserved : ndarray of int64, (batch,), optional
        Latest unobserved tokens; all by default.
    remember : bool
        Whether notes stay for the next call.
    more, whole : bool
        Whether more of the prompt comes, and whether it stayed whole and unobserved.
    by_prompt : bool
        Whether heads share budgets.
    new_only : bool
        Whether kept entries stay and targets are for new ones.
    repeats : mapping of int to Tensor, (n_tokens,)
        Of rows' prompts.
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
    by_prompt: bool = False
    evicted_before: bool = False
    new_only: bool = False
    repeats: Mapping[int, Tensor] = field(default_factory=dict)
    scored: dict[tuple[int, bytes, int | None], Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, cache: Any, row: Row, rows: Sequence[int], policy: EvictionPolicy, **event: Any
    ) -> Eviction:
        """Return an eviction in rows with equal methods."""
        profile, tokens = row.profile, cache.tokens
        known: dict[str, Any] = {
            "tokens": tokens,
            "prompt": tokens,
            "widths": row.widths,
            "remember": row.goes_on_observing,
            "sinks": profile.policy.sinks,
            "window": profile.policy.window,
            "by_prompt": profile.by_prompt,
            "evicted_before": row.evicted_at > 0,
        }
        if "repeats" not in event:
            known["repeats"] = repeats_of(cache.rows, rows)
        row_indices = np.array(rows, dtype=np.int64)
        return cls(rows=row_indices, policy=policy, door=cache.door, **{**known, **event})

    def by_layers(
        self, goals: Mapping[int, Mapping[int, IntArray]]
    ) -> Iterator[tuple[Eviction, dict[int, IntArray]]]:
        """Yield evictions of the same rows in layers, with their targets."""
        layers: dict[tuple[int, ...], dict[int, IntArray]] = {}
        rows = self.rows.tolist()
        for layer in sorted({layer for row in rows for layer in goals[row]}):
            due = tuple(row for row in rows if layer in goals[row])
            targets = np.stack([goals[row][layer] for row in due])
            layers.setdefault(due, {})[layer] = targets
        for due, targets_of in layers.items():
            yield replace(self, rows=np.array(due)), targets_of

    # What a policy looks at

    @property
    def _at_once(self) -> bool:
        policy = self.policy
        single = policy.across_layers and not (policy.observes or policy.combines)
        return single and not self.by_prompt

    def bundles(self, store: Store) -> list[Bundle]:
        """Return rows of equal shape, or single heads where these differ."""
        notes, alike = store.notes, dict[Hashable, list[int]]()
        for row in self.rows.tolist():
            apart = not (self.new_only or self._at_once or store.is_even(row))
            apart |= any(
                noted_row == row and head is not None for noted_row, head in notes.observed
            )
            key: Hashable = (
                store.alike(row, self.door.place),
                notes.queries.signature(row),
                int(self.tokens[row]),
                (row, None) in notes.observed,
            )
            alike.setdefault((row,) if apart else key, []).append(row)
        bundles: list[Bundle] = []
        for key, rows in alike.items():
            heads = range(int(store.keys.shape[1])) if key == (rows[0],) else (None,)
            bundles += [(np.array(rows), head) for head in heads]
        return bundles

    def look(
        self, stores: Mapping[int, Store], bundle: Bundle, *, latest: bool = False
    ) -> tuple[AttentionStates, Tensor]:
        """Return a bundle's candidates in a group of layers, and the row's token of each."""
        looks = [self._look(*one, bundle, latest=latest) for one in stores.items()]
        states, positions = looks[0]
        if len(looks) > 1:  # nothing has gone of these: all have the same positions
            states = AttentionStates.joined([one for one, _ in looks])
            positions = positions[:, :1].expand(states.keys.shape[:3])
        return states, positions

    def _look(
        self, layer: int, store: Store, bundle: Bundle, *, latest: bool
    ) -> tuple[AttentionStates, Tensor]:
        (rows, head), template = bundle, store.template
        assert template is not None, "a layer that evicts has attended"
        tokens, n_heads = int(self.tokens[rows[0]]), int(store.keys.shape[1])
        candidates = store.candidates(rows, self.door.columns, tokens, head=head, latest=latest)
        new = tokens if self.unobserved is None else int(self.unobserved[rows[0]])
        n_queries = wanted_queries(self.policy, int(self.prompt[rows[0]]), whole=self.whole)
        n_queries = max(n_queries, new if self.policy.observes else 0)
        queries = template.queries
        if store.notes.queries.tokens:
            (queries,) = store.notes.queries.of(rows, n_queries)
        states = template
        if head is not None:
            group = queries.shape[1] // n_heads
            states, queries = template.kv_head(head), queries[:, head * group : (head + 1) * group]
        keys, values = store.seen_as(candidates.keys, candidates.values)
        states = replace(
            states,
            queries=queries,
            keys=keys,
            values=values,
            absent=candidates.absent,
            counts=candidates.counts,
            older=max(int(queries.shape[2]) - new, 0),
            observed=of_rows(store.notes.observed, rows, head, n_heads),
            later=of_rows(store.notes.later, rows, head, n_heads),
            positions=None if store.kept is None else candidates.positions,
            repeats=self._repeats(rows, candidates.positions),
            latest=int(store.tail.lengths[rows[0]]) if self.evicted_before and store.tail else 0,
        )
        if (mask := self._gaps(store, states, candidates.positions, tokens)) is not None:
            states = replace(states, mask=mask, gaps=True)
        return states, candidates.positions

    def _repeats(self, rows: IntArray, positions: Tensor) -> Tensor | None:
        if not self.repeats:
            return None
        counts = torch.ones(len(rows), int(self.tokens[rows[0]]), dtype=torch.long, device="cpu")
        for place, row in enumerate(rows.tolist()):
            if (known := self.repeats.get(row)) is not None:  # later tokens count once
                known = known[: counts.shape[1]]
                counts[place, : len(known)] = known
        counts = counts.to(positions.device)[:, None].expand(-1, positions.shape[1], -1)
        return counts.gather(2, positions.long().clamp_(max=counts.shape[2] - 1))

    def _gaps(
        self, store: Store, states: AttentionStates, positions: Tensor, tokens: int
    ) -> Tensor | None:
        """Return the mask of older queries if entries between were evicted."""
        n_queries = int(states.queries.shape[2])
        if store.kept is None or not states.older or n_queries <= self.window:
            return None
        places = torch.arange(tokens - n_queries, tokens, device=positions.device)
        last = positions[..., -n_queries:]
        if last.shape[-1] == n_queries and bool((last == places).all()):  # the host asks the device
            return None
        seen = positions[:, :, None] <= places[:, None]
        return seen.repeat_interleave(states.queries.shape[1] // positions.shape[1], dim=1)

    @torch.no_grad()
    def observe(self, layer: int, store: Store) -> None:
        """Let the policy observe a chunk."""
        for bundle in self.bundles(store) if self.policy.observes else ():
            states, _ = self.look({layer: store}, bundle)
            self._note(store, bundle, self.policy.observe(states, sinks=self.sinks))

    def without(self, rows: Sequence[int]) -> Eviction:
        """Return the eviction without these rows."""
        return replace(self, rows=np.setdiff1d(self.rows, rows))

    # Choosing

    def _kept_before(self, store: Store, bundle: Bundle) -> int:
        """Return the number of kept entries."""
        return int(store.kept_counts[bundle[0]].max()) if self.new_only else 0

    def hand_out(self, cache: Any, granted: Mapping[int, IntArray]) -> dict[int, IntArray]:
        """Return each layer's budgets, (n_rows, n_kv_heads), in the bytes of ``granted`` ones."""
        stores: dict[int, Store] = cache.stores
        targets = np.stack([*granted.values()], axis=1)
        kept = np.stack([stores[layer].kept_counts[self.rows] for layer in granted], axis=1)
        kept *= self.new_only
        by_layer = [self._evictable_scores(layer, stores[layer]) for layer in granted]
        for place, scores in enumerate(zip(*by_layer, strict=True)):
            if scores[0].shape[-1]:  # else a row of nothing but sinks and window
                profile = cache.rows[self.rows[place]].profile
                targets[place] = self._within_bytes(scores, targets[place], kept[place], profile)
        return {layer: targets[:, place] for place, layer in enumerate(granted)}

    def _within_bytes(
        self,
        scores: Sequence[Tensor],
        granted: IntArray,
        kept_counts: IntArray,
        profile: BudgetProfile,
    ) -> IntArray:
        """Hand out by a row's scores, within granted bytes.

        Heads of different lengths need more scales. If kept entries stay, sinks are among them, and
        their bytes count.
        """
        protected = self.window if kept_counts.any() else self.sinks + self.window
        width, shape = widest(profile), profile.shape
        granted_bytes = stored_bytes(granted + kept_counts, width, shape).sum()
        total = int(granted.sum())
        while True:
            counts = handed_out(scores, total, protected=protected)
            over = int(stored_bytes(counts + kept_counts, width, shape).sum() - granted_bytes)
            if over <= 0:
                return counts
            total -= -(-over // entry_bytes(width, shape))

    @torch.no_grad()
    def _evictable_scores(self, layer: int, store: Store) -> list[Tensor]:
        """Return scores without sinks and window, (n_kv_heads, n) a row, -inf where absent."""
        policy = self.policy
        assert isinstance(policy, Score)  # other profiles are not `by_prompt`
        by_row: dict[int, list[Tensor]] = {row: [] for row in self.rows.tolist()}
        for bundle in self.bundles(store):
            states, _ = self.look({layer: store}, bundle)
            sinks = self._kept_before(store, bundle) or self.sinks
            end = max(int(states.keys.shape[2]) - self.window, sinks)
            scores = states.keys[..., 0]
            if end > sinks:  # else there is nothing to choose from
                scores = policy.scores(states, sinks=sinks)
                self.scored[layer, bundle[0].tobytes(), bundle[1]] = scores
            for row, added in zip(bundle[0].tolist(), scores[..., sinks:end], strict=True):
                by_row[row] += added
        return [pad_sequence(row, batch_first=True, padding_value=-inf) for row in by_row.values()]

    # Evicting

    def layer_groups(
        self, stores: Mapping[int, Store], targets: Mapping[int, IntArray]
    ) -> Iterator[dict[int, Store]]:
        """Yield groups of layers that a policy sees as one."""
        policy = self.policy
        before: tuple[object, ...] = ()
        single = self.new_only or policy.observes or not policy.across_layers or bool(self.scored)
        group: dict[int, Store] = {}
        for layer in targets:
            store = stores[layer]
            apart = single or store.kept is not None or bool(store.notes.later)
            few = (len(group) + 1) * store.keys[..., 0].numel() <= FEW_ENTRIES
            kind = apart, layer in self.widths, *_kind(store)
            if group and (apart or not few or kind != before):
                yield group
                group = {}
            group[layer], before = store, kind
        yield group

    @torch.no_grad()
    def keep(self, stores: Mapping[int, Store], targets: Mapping[int, IntArray]) -> None:
        """Keep the best entries of rows of a group of layers.

        ``targets``, (n_rows, n_kv_heads) by layer, count new entries only if `new_only`.
        """
        layers = [*stores]
        whole_rows = [self._rest(store) for store in stores.values()]
        budgets = np.concatenate([targets[layer] for layer in layers], axis=1)
        bundles = self.bundles(stores[layers[0]])
        pieces = [self._chosen(stores, bundle, budgets) for bundle in bundles]
        (staying,) = joined(pieces)  # all of the model's types
        del pieces  # they keep evicted entries alive
        stored = self._as_stored(stores, staying)
        del staying
        for store, parts, rest in zip(stores.values(), stored, whole_rows, strict=True):
            store.replace(self.rows, parts, rest)
            store.notes.forget(self.rows, observed=not (self.remember and self.policy.observes))
            if not self.more:
                store.notes.queries.forget(self.rows)

    def _as_stored(self, stores: Mapping[int, Store], fresh: Part) -> list[list[Part]]:
        sizes = len(stores), int(next(iter(stores.values())).keys.shape[1])
        widths_of = [self.widths[layer] for layer in stores if layer in self.widths]
        parts = [fresh]
        if widths_of and len(stores) > 1:
            widths = np.concatenate(widths_of)
            parts = packed(fresh, counts_of(fresh.lengths, widths[fresh.segments % len(widths)]))
        if len(stores) > 1 and not any(part.has_wide_scales(fresh) for part in parts):
            by_layer: list[list[Part]] = [[] for _ in stores]
            for part in parts:
                for place, one in part.by_layer(*sizes):
                    by_layer[place].append(one)
            return by_layer
        result = []  # one part a layer
        for (layer, store), (_, one) in zip(stores.items(), fresh.by_layer(*sizes), strict=True):
            counts = before = None
            if self.new_only and store.kept is not None:
                before = store.kept_counts.ravel()[one.segments]
            if layer in self.widths:
                bits = self.widths[layer][one.segments % sizes[1]]
                counts = counts_of(one.lengths, bits, before)
            result.append(store.as_stored(one, self.rows, counts, beside_kept=self.new_only))
        return result

    def _rest(self, store: Store) -> list[Part]:
        if store.kept is not None:
            return []
        parts, heads = [], int(store.keys.shape[1])
        for row in np.setdiff1d(np.arange(store.rows), self.rows):
            candidates = store.candidates(rows := np.array([row]), self.door.columns)
            parts.append(
                _flat((rows, None), heads, candidates.keys, candidates.values, candidates.positions)
            )
        return parts

    def _chosen(self, stores: Mapping[int, Store], bundle: Bundle, targets: IntArray) -> Part:
        (rows, head), (layer, store) = bundle, next(iter(stores.items()))
        heads = slice(None) if head is None else slice(head, head + 1)
        budgets = torch.from_numpy(targets[np.searchsorted(self.rows, rows)][:, heads])
        front = self._kept_before(store, bundle)
        states, positions = self.look(stores, bundle, latest=front > 0)
        n_tokens = int(states.keys.shape[2])
        kept = torch.ones_like(states.keys[..., 0], dtype=torch.bool)
        if states.absent is not None and not front:
            kept = ~states.absent
        goes = bool((budgets < n_tokens).any())
        bits = self._bits(stores)
        mixed = bits is not None and bool(np.isin(bits, [*MIXES]).any())
        scores = self.scored.pop((layer, rows.tobytes(), head), None)
        limits = Limits(sinks=front or self.sinks, window=self.window)
        if scores is None and mixed:
            all_heads = torch.ones_like(budgets, dtype=torch.bool)
            scores = self._by_score.scores_of(states, all_heads, sinks=self.sinks)
        if goes:
            if scores is not None:
                places = {"absent": states.absent, "counts": states.counts}
                kept = keep_best(scores, budgets + front, **limits, **({} if front else places))
            else:
                kept = self.policy.keep(states, budgets + front, **limits)
            kept = kept[..., -n_tokens:]  # kept entries in front stay as stored
            check_kept(self.policy, kept, budgets, states)
        if bits is not None:
            ranked = scores if mixed else None
            before = store.kept_counts[rows][:, heads] if front else None
            counts = counts_of(budgets.numpy(), bits[heads], before)
            states = self._with_widths(states, kept, counts, ranked, is_behind=bool(front))
        keys, values = states.keys, states.values
        if not front:
            if self.remember and self.policy.observes:
                observed = self.policy.observe(states, sinks=self.sinks)
                self._note(store, bundle, observed, kept, budgets)
            if goes or bits is not None:
                limits = Limits(sinks=self.sinks, window=self.window)
                made = self.policy.combine(states, kept, budgets, **limits)
                keys, values = (states.keys, states.values) if made is None else made
        keys, values = store.stored_as(keys, values)
        width_of = None if states.widths is None else states.widths.of
        return _flat(
            bundle, targets.shape[1], keys, values, positions, kept, budgets.numpy(), width_of
        )

    def _bits(self, stores: Mapping[int, Store]) -> IntArray | None:
        bits = [self.widths[layer] for layer in stores if layer in self.widths]
        return np.concatenate(bits) if bits else None

    @property
    def _by_score(self) -> Score:
        assert isinstance(self.policy, Score)
        return self.policy

    def _with_widths(
        self,
        states: AttentionStates,
        kept: Tensor,
        counts: Mapping[int, IntArray],
        scores: Tensor | None,
        *,
        is_behind: bool,
    ) -> AttentionStates:
        of = None
        if scores is not None:
            present = {} if is_behind else {"absent": states.absent, "counts": states.counts}
            sinks = 0 if is_behind else self.sinks
            free = evictable(kept, sinks=sinks, window=self.window, **present)
            of = chosen_widths(scores[..., -kept.shape[-1] :], kept, counts, free)
        return replace(states, widths=ChosenWidths(counts=counts, of=of))

    def _note(
        self,
        store: Store,
        bundle: Bundle,
        observed: Observed | None,
        kept: Tensor | None = None,
        budgets: Tensor | None = None,
    ) -> None:
        (rows, head), notes = bundle, store.notes.observed
        for place, row in enumerate(rows.tolist()):
            notes.pop((row, head), None)
            if observed is None:
                continue
            note = of_row(observed, place)
            if kept is None or budgets is None or note.columns is None:
                notes[row, head] = note
                continue
            stays = kept_places(kept[place, None], budgets[place, None])
            each = torch.split(stays, budgets[place].tolist())
            if len({len(one) for one in each}) == 1:
                notes[row, head] = note.kept(torch.stack(each)[None])
                continue
            for one, indices in enumerate(each):  # heads differ from here on
                notes[row, one] = of_head(note, one, len(each)).kept(indices[None, None])


def _kind(store: Store) -> tuple[object, ...]:
    states = store.template
    assert states is not None, "a layer that evicts has attended"
    sizes = store.keys.shape, store.values.shape, store.readers
    return *sizes, states.scaling, states.softcap, states.rotation, states.sink_logits is None


def _flat(
    bundle: Bundle,
    n_heads: int,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    kept: Tensor | None = None,
    counts: IntArray | None = None,
    width_of: Tensor | None = None,
) -> Part:
    rows, head = bundle
    n = int(keys.shape[2])
    heads = np.arange(n_heads) if head is None else np.array([head])
    sources = [keys, values, positions[..., None]]
    sources += [] if width_of is None else [width_of[..., None]]
    if kept is None or counts is None or (counts == n).all():
        counts = np.full((len(rows), len(heads)), n)
        flat = [source.reshape(-1, source.shape[-1]).clone() for source in sources]
    else:
        places = kept.nonzero_static(size=int(counts.sum()), fill_value=0).unbind(1)
        flat = []
        for source in sources:
            entries, index = flat_entries(source, *places)
            flat.append(entries.index_select(0, index))
    return Part(
        keys=flat[0],
        values=flat[1],
        tokens=flat[2][:, 0],
        width_of=None if width_of is None else flat[3][:, 0],
        segments=(rows[:, None] * n_heads + heads).ravel(),
        lengths=counts.reshape(-1),
    )


def evict(cache: Any, eviction: Eviction, targets: Mapping[int, IntArray]) -> None:
    """Evict in these layers of a cache."""
    stores = cache.stores
    with without_autocast(next(iter(stores.values())).keys):
        if targets and eviction.by_prompt:
            targets = eviction.hand_out(cache, targets)
        cache.tell("planned", targets)
        for group in eviction.layer_groups(stores, targets):
            eviction.keep(group, targets)


def wanted_queries(policy: EvictionPolicy, tokens: int, *, whole: bool) -> int:
    """Return how many of a prompt's latest queries a policy needs."""
    return tokens if whole and policy.observes else policy.query_rows(tokens)


def check_kept(
    policy: EvictionPolicy, kept: Tensor, budgets: Tensor, states: AttentionStates
) -> None:
    """Refuse a choice that does not meet the budgets.

    Raises
    ------
    SolverError
    """
    counts, expected = kept.sum(dim=-1), budgets.to(kept.device)
    layers, first_head = states.layers or (states.layer,), states.first_head

    def fail() -> None:
        row, head = (counts != expected).nonzero()[0].tolist()
        place, number = divmod(head, counts.shape[1] // len(layers))
        raise SolverError(
            f"the policy {policy.name} kept {int(counts[row, head])} entries in KV head "
            f"{first_head + number} of layer {layers[place]}, row {row}, whose budget is "
            f"{int(budgets[row, head])}; a policy must meet it exactly"
        )

    ensure((counts == expected).all(), fail)
