"""From what a layer holds to what it keeps: show it to the policy, and let its choice be stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.policies import EvictionPolicy
from kvalloc.runtime.refusals import check_kept
from kvalloc.runtime.storing import Choice, store_choices
from kvalloc.runtime.unfinished import Part, Unfinished, part_of, parts

__all__ = ["Candidates", "Eviction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """What one piece of a layer chooses from.

    Attributes
    ----------
    states : AttentionStates
        Of this piece alone, without padding.
    positions : Tensor of int32, (batch, n_kv_heads, n_tokens)
        Column of each candidate.
    bias : Tensor of float32, (batch, n_kv_heads, n_tokens), or None
        Logit bias they have already.
    """

    states: AttentionStates
    positions: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Eviction:
    """How one forward of a prompt ends in each layer.

    A policy looks at a whole layer where it can. Rows with padding are shown to it one by one
    without their padding, so that a row keeps what it would keep alone; heads that hold different
    entries already, from earlier chunks, one by one, too.

    Attributes
    ----------
    policy : EvictionPolicy
        Who chooses.
    sinks, window : int
        First and last tokens of each row, which always stay.
    prompt_tokens : int
        Length of the prompt as far as it is known.
    visible : Tensor of bool, (batch, n_new_tokens), or None
        False marks padding among the new tokens.
    remember : bool
        Whether there will be another chunk, for which the policy has to note something.
    bits : mapping
        For layers that are stored at fewer bits from now on: those of each KV head, (n_kv_heads,).
    """

    policy: EvictionPolicy
    sinks: int
    window: int
    prompt_tokens: int
    visible: Tensor | None
    remember: bool = True
    bits: Mapping[int, IntArray] = field(default_factory=dict)

    held: ClassVar[bool] = False
    """Whether the whole prompt is held until it is complete."""

    @torch.no_grad()
    def observe(self, layer: BudgetLayer, states: AttentionStates) -> None:
        """Let the policy note what it wants of a chunk after which nothing is evicted."""
        for part in parts(self._grain(layer), *self._sizes(layer, states)):
            if self.policy.observes:
                found = self._candidates(layer, states, part)
                self._note(layer.unfinished, part, found.states)
            self._note_queries(layer, layer.unfinished, part, states)

    @torch.no_grad()
    def evict(self, layer: BudgetLayer, states: AttentionStates, targets: IntArray) -> None:
        """Keep the best of what the layer holds.

        Parameters
        ----------
        layer : BudgetLayer
            Holds more than its budget, or padding.
        states : AttentionStates
            What its attention saw.
        targets : ndarray of int64, (batch, n_kv_heads)
            Entries to keep.
        """
        grain = self._grain(layer)
        after = Unfinished(grain=grain)
        chosen = self._choices(layer, states, targets, after)
        store_choices(layer, targets, chosen, states, bits=self.bits.get(states.layer))
        layer.unfinished = after if self.remember else Unfinished()

    def _grain(self, layer: BudgetLayer) -> int:
        if layer.entries is not None:
            return 2
        return max(layer.unfinished.grain, 0 if self.visible is None else 1)

    def _wanted_rows(self) -> int:
        """How many of the prompt's last queries the policy is to see."""
        return self.policy.query_rows(self.prompt_tokens)

    def _sizes(self, layer: BudgetLayer, states: AttentionStates) -> tuple[int, int]:
        return int(states.keys.shape[0]), int(states.keys.shape[1])

    # What there is to choose from

    def _candidates(self, layer: BudgetLayer, states: AttentionStates, part: Part) -> Candidates:
        row, head = part
        columns = self._columns(layer, states, row)
        if layer.entries is None:
            keys = _rows(states.keys, row, head)[:, :, columns]
            values = _rows(states.values, row, head)[:, :, columns]
            positions = _rows(_positions(layer, states), row, head)[:, :, columns]
            bias = _bias(layer, states)
            bias = None if bias is None else _rows(bias, row, head)[:, :, columns]
        else:
            assert row is not None
            assert head is not None
            keys, values, positions, bias = _segment(layer, states, row, head, columns)
        own = self._part_states(layer, states, part)
        later = layer.unfinished.later_of(part, columns, int(states.keys.shape[1]))
        own = replace(own, keys=keys, values=values, later=later)
        mask = self._gaps(layer, own, states, part, positions)
        if mask is not None:
            own = replace(own, mask=mask, gaps=True)
        return Candidates(states=own, positions=positions, bias=bias)

    def _gaps(
        self,
        layer: BudgetLayer,
        own: AttentionStates,
        states: AttentionStates,
        part: Part,
        positions: Tensor,
    ) -> Tensor | None:
        """What older queries see, where entries of their own tokens were evicted.

        Returns
        -------
        Tensor of bool, (batch, n_query_heads, n_rows, n_tokens), or None
            None where the last keys are those of the queries, so that plain causal is right.
        """
        n_rows = int(own.queries.shape[2])
        n_new = int(states.queries.shape[2]) if self.visible is None else 0
        if not layer.reduced or not states.queries.shape[2] or n_rows <= max(self.window, n_new):
            return None
        wanted = self.policy.query_rows(self.prompt_tokens)
        new = self._row_places(layer, states, part[0])
        places = layer.unfinished.places_of(part[0], new, wanted)
        last = positions[..., -n_rows:]
        if last.shape[-1] == n_rows and bool((last == places).all()):
            return None
        seen = positions[:, :, None] <= places[:, None]
        return seen.repeat_interleave(own.queries.shape[1] // positions.shape[1], dim=1)

    def _row_places(self, layer: BudgetLayer, states: AttentionStates, row: int | None) -> Tensor:
        """Columns of the new tokens of a row, padding left out, (n,)."""
        first = layer.seen_tokens - int(states.queries.shape[2])
        device = states.queries.device
        places = torch.arange(first, layer.seen_tokens, dtype=torch.int32, device=device)
        return places if (shown := self._shown(row, device)) is None else places[shown]

    def _columns(
        self, layer: BudgetLayer, states: AttentionStates, row: int | None
    ) -> slice | Tensor:
        """Columns of the dense storage that hold tokens of this row, and no padding."""
        if (shown := self._shown(row, states.keys.device)) is None:
            return slice(None)
        older = int(states.keys.shape[2]) - int(shown.shape[0])
        found = shown.nonzero()[:, 0] + older
        if older:
            found = torch.cat([torch.arange(older, device=found.device), found])
        first, count = (int(found[0]), int(found.numel())) if found.numel() else (0, 0)
        if count and int(found[-1]) == first + count - 1:
            return slice(first, first + count)  # a view, where padding is at one end only
        return found

    def _part_states(
        self, layer: BudgetLayer, states: AttentionStates, part: Part
    ) -> AttentionStates:
        """The states of a piece, but for its keys and values. Without padding, plain causal."""
        row, head = part
        queries = self._row_queries(states, row)
        if states.queries.shape[2] or self.held:  # else those of a layer of a group have gone
            wanted = self._wanted_rows()
            queries = layer.unfinished.queries_of(row, queries, wanted)
        changes: dict[str, Tensor | int | None] = {}
        if head is not None:
            changes["first_head"] = states.first_head + head
            n_kv_heads = int(states.keys.shape[1])
            group = queries.shape[1] // n_kv_heads
            mine = slice(head * group, (head + 1) * group)
            queries = queries[:, mine]
            if states.sink_logits is not None:
                changes["sink_logits"] = states.sink_logits[mine]
        return replace(
            states,
            queries=queries,
            mask=None,
            observed=layer.unfinished.observed_of(part, int(states.keys.shape[1])),
            **changes,  # type: ignore[arg-type]
        )

    def _row_queries(self, states: AttentionStates, row: int | None) -> Tensor:
        if row is None:
            return states.queries
        queries = states.queries[row : row + 1]
        shown = self._shown(row, queries.device)
        return queries if shown is None or not queries.shape[2] else queries[:, :, shown]

    def _shown(self, row: int | None, device: torch.device) -> Tensor | None:
        """What of a row's new tokens is no padding: the mask may be on another device."""
        return None if row is None or self.visible is None else self.visible[row].to(device)

    # What is chosen

    def _choices(
        self, layer: BudgetLayer, states: AttentionStates, targets: IntArray, after: Unfinished
    ) -> Iterator[tuple[Part, Choice]]:
        """One piece after the other, so that only one is taken apart at a time."""
        for part in parts(after.grain, *targets.shape):
            yield part, self._choose(layer, states, part, targets, after)

    def _choose(
        self,
        layer: BudgetLayer,
        states: AttentionStates,
        part: Part,
        targets: IntArray,
        after: Unfinished,
    ) -> Choice:
        found = self._candidates(layer, states, part)
        budgets = self._part_budgets(targets, part, found)
        if bool((budgets == found.states.keys.shape[2]).all()):
            kept = torch.ones_like(found.states.keys[..., 0], dtype=torch.bool)
        else:
            kept = self._kept(part, found.states, budgets)
            check_kept(self.policy, kept, budgets)
        if self.remember:
            self._note(after, part, found.states, kept)
            self._note_queries(layer, after, part, states, layer.unfinished)
        return self._chosen(found, kept)

    def _kept(self, part: Part, states: AttentionStates, budgets: Tensor) -> Tensor:
        """What the policy keeps of a piece, (batch, n_kv_heads, n_tokens)."""
        return self.policy.keep(states, budgets, sinks=self.sinks, window=self.window)

    def _part_budgets(self, targets: IntArray, part: Part, found: Candidates) -> Tensor:
        """Entries to keep of a piece, (batch, n_kv_heads)."""
        budgets = torch.from_numpy(targets).to(found.states.keys.device)
        return _rows(budgets[..., None], *part)[..., 0]

    def _chosen(self, found: Candidates, kept: Tensor) -> Choice:
        """What is stored of a piece of which that is kept."""
        combined = None
        if not bool(kept.all()):
            combined = self.policy.combine(found.states, kept, sinks=self.sinks, window=self.window)
        bias = found.bias
        if combined is not None and combined.logit_bias is not None:
            bias = combined.logit_bias
        source = found.states if combined is None else combined
        return Choice(
            keys=source.keys,
            values=source.values,
            positions=found.positions,
            bias=bias,
            kept=kept,
        )

    def _note(
        self, notes: Unfinished, part: Part, states: AttentionStates, kept: Tensor | None = None
    ) -> None:
        """What the policy remembers of this chunk, for the entries that stay."""
        observed = None
        if self.policy.observes:
            observed = self.policy.observe(states, sinks=self.sinks)
        self._keep_note(notes, part, observed, kept)

    @staticmethod
    def _keep_note(
        notes: Unfinished, part: Part, observed: Observed | None, kept: Tensor | None
    ) -> None:
        """Write down what was observed of a piece, cut to the entries that stay."""
        notes.observed.pop(part, None)
        if observed is None:
            return
        if kept is None or observed.columns is None:
            notes.observed[part] = observed
            return
        counts = kept.sum(dim=-1)
        if bool((counts == counts[0, 0]).all()):
            indices = kept.nonzero()[:, 2].view(*kept.shape[:2], -1)
            notes.observed[part] = observed.kept(indices)
            return
        # Heads differ from here on, and so will be looked at one by one.
        batch, n_kv_heads = kept.shape[:2]
        for row, head in np.ndindex(batch, n_kv_heads):
            own = part_of(observed, (row, head), n_kv_heads)
            key = (row if part[0] is None else part[0], head if part[1] is None else part[1])
            indices = kept[row, head].nonzero()[:, 0]
            notes.observed[key] = own.kept(indices[None, None])

    def _note_queries(
        self,
        layer: BudgetLayer,
        notes: Unfinished,
        part: Part,
        states: AttentionStates,
        before: Unfinished | None = None,
    ) -> None:
        """Hold back the last queries, which a later chunk may be too short to bring."""
        row, head = part
        wanted = self._wanted_rows()
        if wanted <= 0 or head not in (None, 0):
            return
        older = notes if before is None else before
        queries = older.queries_of(row, self._row_queries(states, row), wanted)
        notes.queries[row] = queries[..., -wanted:, :].clone()
        new = self._row_places(layer, states, row)
        notes.places[row] = older.places_of(row, new, wanted)[-wanted:].clone()


def _rows(states: Tensor, row: int | None, head: int | None) -> Tensor:
    """The piece of ``(batch, n_kv_heads, ...)`` that belongs to a row and a head, as a view."""
    if row is not None:
        states = states[row : row + 1]
    return states if head is None else states[:, head : head + 1]


def _positions(layer: BudgetLayer, states: AttentionStates) -> Tensor:
    """Columns of all candidates of a layer that is not ragged, (batch, n_kv_heads, n_tokens)."""
    batch, n_kv_heads, n_tokens = states.keys.shape[:3]
    kept = layer.kept_indices
    n_kept = 0 if kept is None else int(kept.shape[-1])
    following = n_tokens - n_kept
    first = layer.seen_tokens - following
    new = torch.arange(
        first, layer.seen_tokens, dtype=torch.int32, device=states.keys.device
    ).expand(batch, n_kv_heads, -1)
    return new if kept is None else torch.cat([kept, new], dim=-1)


def _bias(layer: BudgetLayer, states: AttentionStates) -> Tensor | None:
    if layer.logit_bias is None:
        return None
    following = int(states.keys.shape[2]) - int(layer.logit_bias.shape[-1])
    return torch.nn.functional.pad(layer.logit_bias, (0, following))


def _segment(
    layer: BudgetLayer, states: AttentionStates, row: int, head: int, columns: slice | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Keys, values, columns and bias of one head of a ragged layer and of what followed."""
    assert layer.entries is not None
    keys, values, positions, bias, _ = layer.entries.piece(row, head)
    n_new = int(states.keys.shape[2])
    new = torch.arange(
        layer.seen_tokens - n_new, layer.seen_tokens, dtype=torch.int32, device=keys.device
    )[columns]
    keys = torch.cat([keys, states.keys[row, head, columns]])
    values = torch.cat([values, states.values[row, head, columns]])
    if bias is not None:
        bias = torch.nn.functional.pad(bias, (0, int(new.numel())))[None, None]
    return keys[None, None], values[None, None], torch.cat([positions, new])[None, None], bias
