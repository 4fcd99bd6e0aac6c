"""A prompt that was held: who votes among the tokens after it, and how all layers evict at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.arrival import Step
from kvalloc.runtime.eviction import Eviction, rows_of
from kvalloc.runtime.following import Tail
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.unfinished import Part, parts
from kvalloc.scorers import Scorer
from kvalloc.scorers.base import following_notes

__all__ = ["Followers", "LateEviction", "note_queries"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Followers:
    """Which tokens after a held prompt vote: of each row the latest, padding left out.

    Attributes
    ----------
    columns : Tensor of int64, (batch, at most so many as vote)
        Where they stand, increasing; -1 in front where a row has fewer.
    counts : Tensor of int64, (batch,)
        How many tokens have followed in each row.
    """

    columns: Tensor
    counts: Tensor

    @classmethod
    def none(cls, batch: int) -> Followers:
        """Nothing has followed yet."""
        nothing = torch.empty(batch, 0, dtype=torch.long)
        return cls(columns=nothing, counts=nothing.sum(dim=1))

    def after(self, step: Step, tokens: int) -> tuple[Followers, Tensor]:
        """Those after a forward, of which the latest `tokens` of a row vote.

        Returns
        -------
        Followers
        Tensor of int64, (batch, n)
            Where these stand among those before and the new tokens.
        """
        new = torch.arange(step.seen, step.seen + step.new_tokens).expand(step.batch, -1)
        if step.new_visible is not None:
            new = new.masked_fill(~step.new_visible, -1)
        columns, order = _latest(torch.cat([self.columns, new], dim=1), tokens)
        return Followers(columns=columns, counts=self.counts + (new >= 0).sum(dim=1)), order

    def before(self, end: int) -> tuple[Followers, Tensor]:
        """Those in front of a column, to which the cache is cropped; and their places, as above."""
        gone = self.columns >= end
        columns, order = _latest(self.columns.masked_fill(gone, -1), self.columns.shape[1])
        return Followers(columns=columns, counts=self.counts - gone.sum(dim=1)), order

    def rows(self, rows: Tensor) -> Followers:
        """The same for other rows of the batch."""
        rows = rows.cpu()
        return Followers(columns=self.columns[rows], counts=self.counts[rows])


def _latest(columns: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Of each row the latest columns that are not -1, and their places; -1 stands in front."""
    first = max(int(columns.shape[1]) - tokens, 0)
    order = (columns >= 0).byte().argsort(dim=1, stable=True)[:, first:]
    found = columns.gather(1, order)
    some = (found >= 0).any(dim=0)
    return found[:, some], order[:, some]


def note_queries(layer: BudgetLayer, order: Tensor, new: Tensor | None = None) -> None:
    """Note the queries of the tokens that vote; `order` says where they stand, see `Followers`.

    Parameters
    ----------
    layer : BudgetLayer
    order : Tensor of int64, (batch, n)
    new : Tensor, (batch, n_query_heads, n_new_tokens, head_dim), optional
        Queries of new tokens, which come behind those noted.
    """
    older = layer.unfinished.following
    among = [own for own in (older, new) if own is not None]
    if among:
        joined = torch.cat(among, dim=2)
        index = order.to(joined.device)[:, None, :, None]
        index = index.expand(-1, joined.shape[1], -1, joined.shape[3])
        layer.unfinished.following = joined.gather(2, index)


@dataclass(frozen=True, kw_only=True, slots=True)
class LateEviction(Eviction):
    """An eviction after the prompt was complete: its last queries are those noted as it arrived.

    ``visible`` covers the new tokens while it arrives, and all of it when entries are evicted.

    Attributes
    ----------
    scorers : mapping of int to sequence of Scorer
        For each layer, those that look at tokens after the prompt.
    following_visible : Tensor of bool, (batch, following), or None
        False marks padding among them.
    followers : Followers, optional
        Which of them vote, the latest ones; None while the prompt arrives.
    row_tokens : ndarray of int64, (batch,), optional
        Length of each row's prompt without padding; None while it arrives.
    """

    scorers: Mapping[int, Sequence[Scorer]] = field(default_factory=dict)
    following_visible: Tensor | None = None
    followers: Followers | None = None
    row_tokens: IntArray | None = None

    late: ClassVar[bool] = True

    @torch.no_grad()
    def hold_queries(self, layer: BudgetLayer, states: AttentionStates) -> None:
        """Note the queries that `evict` will need when the held prompt is complete."""
        layer.unfinished.grain = self._grain(layer)
        for part in parts(self._grain(layer), *self._sizes(layer, states)):
            self._note_queries(layer, layer.unfinished, part, states)

    def _grain(self, layer: BudgetLayer | Tail) -> int:
        padded = self.visible is not None or self.following_visible is not None
        return max(Eviction._grain(self, layer), int(padded))

    def _candidates(
        self, layer: BudgetLayer | Tail, states: AttentionStates, part: Part
    ) -> tuple[AttentionStates, Tensor]:
        assert isinstance(layer, BudgetLayer)
        # slots: super() finds no class
        found, positions = Eviction._candidates(self, layer, states, part)
        scorers = self.scorers.get(states.layer, ())
        if self.followers is None or not scorers:
            return found, positions
        _, notes = self.scored.get((states.layer, part), (None, None))
        if notes is None:
            own, n_prompt = self._with_following(layer, found, part), int(found.keys.shape[2])
            notes = following_notes(scorers, own, n_prompt, sinks=self.sinks)
        return replace(found, later={**(found.later or {}), **notes}), positions

    def _with_following(
        self, layer: BudgetLayer, states: AttentionStates, part: Part
    ) -> AttentionStates:
        """The piece with the tokens that followed, whose queries are those that vote."""
        row, head = part
        queries = layer.unfinished.following
        queries = states.queries[:, :, :0] if queries is None else queries
        bias = states.bias
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, self.following))
        states = replace(states, bias=bias, mask=None, gaps=False)
        if row is None and not layer.reduced:
            keys, values = layer.latest()  # no padding, no copy
            return replace(states, queries=queries, keys=keys, values=values)
        latest = [rows_of(own, row, head) for own in layer.latest(self.following)]
        if row is not None:
            assert self.followers is not None
            if layer.unfinished.following is not None:
                none = int((self.followers.columns[row] < 0).sum())
                queries = queries[row : row + 1, :, none:]
            if self.following_visible is not None:
                shown = self.following_visible[row].nonzero()[:, 0].to(queries.device)
                latest = [own[:, :, shown] for own in latest]
        if head is not None:
            group = queries.shape[1] // layer.keys.shape[1]
            queries = queries[:, head * group : (head + 1) * group]
        pairs = zip((states.keys, states.values), latest, strict=True)
        keys, values = (torch.cat(pair, dim=2) for pair in pairs)
        return replace(states, queries=queries, keys=keys, values=values)

    def _wanted_rows(self, row: int | None = None) -> int:
        """Of the prompt's last queries, all where somebody adds up what each chunk brings."""
        policy, n_tokens = self.policy, self.prompt_tokens
        if row is not None and self.row_tokens is not None:
            n_tokens = int(self.row_tokens[row])  # no more than the row would have alone
        sums = policy.observes or policy.needs_whole_prompt
        return n_tokens if sums else policy.query_rows(n_tokens)

    def _noted_rows(self) -> int:
        """None, where they have been added up."""
        evicts, sums = self.followers is not None, self.policy.observes
        return 0 if evicts and sums else self._wanted_rows()
