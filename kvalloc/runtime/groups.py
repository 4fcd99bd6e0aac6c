"""Layers that keep the same entries: what is held of each until the last one has been scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.formats.sharing_groups import Groups
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.eviction import Eviction
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.policies import RankedPolicy
from kvalloc.runtime.refusals import check_kept
from kvalloc.runtime.storing import Choice, store_choices
from kvalloc.runtime.unfinished import Part, Unfinished, parts

__all__ = ["GroupEviction", "Held", "groups_by_layer", "joint_rankings"]

#: What a policy decides by, for each piece of a layer that has to give up entries.
Rankings: TypeAlias = dict[Part, tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A layer of a group that has attended and not yet evicted.

    Attributes
    ----------
    layer : BudgetLayer
        Holds all its entries, old and new.
    states : AttentionStates
        What its attention saw, but for the queries: a whole prompt's would be as large as keys
        and values together.
    targets : ndarray of int64, (batch, n_kv_heads)
        Entries to keep, the same for every layer of the group.
    rankings : Rankings
        By which the group chooses.
    notes : Unfinished
        What the policy noted for a later chunk, of all entries that are there.
    """

    layer: BudgetLayer
    states: AttentionStates
    targets: IntArray
    rankings: Rankings
    notes: Unfinished


class GroupEviction(Eviction):
    """How one forward ends in the layers of a sharing group: held, ranked, and chosen for once."""

    def evict_in_group(
        self,
        layer: BudgetLayer,
        states: AttentionStates,
        targets: IntArray,
        group: tuple[int, ...] | None,
        held: list[Held],
    ) -> None:
        """Evict from a layer, or hold it until the last one of its group has been ranked.

        Parameters
        ----------
        layer, states, targets
            As for `evict`.
        group : tuple of int or None
            The layers that it shares with; None where it is alone.
        held : list of Held
            Those of the group before it; empty again after the last one.
        """
        if group is None:
            self.evict(layer, states, targets)
            return
        held.append(self.hold(layer, states, targets))
        if states.layer == group[-1]:
            self.evict_together(held)

    @torch.no_grad()
    def hold(self, layer: BudgetLayer, states: AttentionStates, targets: IntArray) -> Held:
        """Rank the entries of a layer, whose group chooses when its last layer has been ranked.

        Parameters
        ----------
        layer, states, targets
            As for `evict`.
        """
        assert isinstance(self.policy, RankedPolicy), "a profile of groups has been checked for it"
        grain = self._grain(layer)
        rankings: Rankings = {}
        notes = Unfinished(grain=grain)
        evicts = self._rows_that_evict(layer, states, targets)
        for part in parts(grain, *targets.shape):
            ranks = bool(evicts[slice(None) if part[0] is None else part[0]].any())
            if ranks or self.remember:
                own = self._candidates(layer, states, part).states
                if ranks:
                    found = self.policy.rankings(own, sinks=self.sinks, window=self.window)
                    rankings[part] = found
                if self.remember:
                    self._note(notes, part, own)
                    self._note_queries(layer, notes, part, states, layer.unfinished)
        queries = states.queries[:, :, :0].clone()  # a view would keep them all alive
        return Held(
            layer=layer,
            states=replace(states, queries=queries, mask=None),
            targets=targets,
            rankings=rankings,
            notes=notes,
        )

    @torch.no_grad()
    def evict_together(self, group: list[Held]) -> None:
        """Choose once for the layers of a group, and let each keep what was chosen.

        Parameters
        ----------
        group : list of Held
            All its layers, in order. It is emptied, so that each is freed when it is done.
        """
        members = [held.rankings for held in group]
        joint = joint_rankings(members, sinks=self.sinks, window=self.window)
        kept = self._kept_together(group[-1], joint)
        while group:
            held = group.pop(0)
            notes = held.notes
            after = Unfinished(grain=notes.grain, queries=notes.queries, places=notes.places)
            chosen = self._shared_choices(held, kept, after)
            bits = self.bits.get(held.states.layer)
            store_choices(held.layer, held.targets, chosen, held.states, bits=bits)
            held.layer.unfinished = after if self.remember else Unfinished()

    def _rows_that_evict(
        self, layer: BudgetLayer, states: AttentionStates, targets: IntArray
    ) -> BoolArray:
        """Whether any head of a row gives up an entry that is no padding, (batch,)."""
        columns = np.full(targets.shape[0], int(states.keys.shape[2]), dtype=np.int64)
        if self.visible is not None:
            columns -= (~self.visible).sum(dim=1).cpu().numpy()
        there = columns[:, None] + (0 if layer.entries is None else layer.entries.lengths)
        return np.asarray((targets < there).any(axis=1))

    def _kept_together(self, last: Held, joint: Rankings) -> dict[Part, Tensor]:
        """The group's choice, piece by piece; of the last layer only sizes and place count."""
        policy, kept = self.policy, {}
        assert isinstance(policy, RankedPolicy)
        for part, rankings in joint.items():
            found = self._candidates(last.layer, last.states, part)
            budgets = self._part_budgets(last.targets, part, found)
            kept[part] = policy.keep_ranked(
                rankings, found.states, budgets, sinks=self.sinks, window=self.window
            )
            check_kept(policy, kept[part], budgets)
        return kept

    def _shared_choices(
        self, held: Held, kept: dict[Part, Tensor], after: Unfinished
    ) -> Iterator[tuple[Part, Choice]]:
        """What a layer of the group stores, one piece after the other."""
        for part in parts(held.notes.grain, *held.targets.shape):
            found = self._candidates(held.layer, held.states, part)
            own = kept.get(part)
            if own is None:  # nothing of this row goes
                own = torch.ones_like(found.states.keys[..., 0], dtype=torch.bool)
            own = own.to(found.states.keys.device)
            self._keep_note(after, part, held.notes.observed.get(part), own)
            yield part, self._chosen(found, own)


def groups_by_layer(groups: Groups) -> dict[int, tuple[int, ...]]:
    """The group of each layer that is in one."""
    return {layer: group for group in groups for layer in group}


def joint_rankings(members: list[Rankings], *, sinks: int, window: int) -> Rankings:
    """Rankings of a group: each layer's as a share of its mass, added up.

    ``sum over layers of r / sum over all heads' evictable entries of r``, times the mean mass of a
    layer over their number, so that a group is on the scale of one layer. This is what the
    curves of shared layers are measured by (`kvalloc.measure.curves.SharedRuns`), in float64 as
    there. A layer without any mass has no say.

    Parameters
    ----------
    members : list of Rankings
        One a layer, in order, of the same pieces; their numbers (batch, n_kv_heads, n_tokens),
        without padding.
    sinks, window : int
        First and last entries, which are not evictable.

    Returns
    -------
    Rankings
        float64, on the device of the last layer.

    References
    ----------
    MPCache, Sec. 4.4.
    """
    masses = [_row_masses(rankings, sinks, window) for rankings in members]
    joint: Rankings = {}
    for part, leading in members[-1].items():
        found = []
        for place, last in enumerate(leading):
            own = [mass[part[0]][place].to(last.device) for mass in masses]
            rows = [rankings[part][place].to(last.device).double() for rankings in members]
            total = torch.zeros_like(last, dtype=torch.float64)
            # from the last one back, as the curves are added up
            for ranking, mass in reversed(list(zip(rows, own, strict=True))):
                total += ranking / torch.where(mass > 0, mass, 1.0)[:, None, None]
            scale = torch.stack(own).mean(dim=0) / len(members)
            found.append(total * torch.where(scale > 0, scale, 1.0)[:, None, None])
        joint[part] = tuple(found)
    return joint


def _row_masses(rankings: Rankings, sinks: int, window: int) -> dict[int | None, list[Tensor]]:
    """Of each row, or of all (None): each ranking's sum over all heads, (n_rows,)."""
    masses: dict[int | None, list[Tensor]] = {}
    for (row, _), numbers in rankings.items():
        own = []
        for ranking in numbers:
            evictable = ranking[..., sinks : max(int(ranking.shape[-1]) - window, sinks)]
            own.append(evictable.double().sum(dim=(1, 2)))
        before = masses.get(row)
        masses[row] = own if before is None else [a + b for a, b in zip(before, own, strict=True)]
    return masses
