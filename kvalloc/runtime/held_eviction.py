"""How a prompt that was held whole ends: what is noted while it arrives, and what is chosen by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.groups import GroupEviction
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.policies import ByHead
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.policies.weighted import Weighted
from kvalloc.runtime.selection import keep_best
from kvalloc.runtime.unfinished import Part, parts
from kvalloc.scorers import Scorer

__all__ = ["HeldEviction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldEviction(GroupEviction):
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
            return GroupEviction._kept(self, part, states, budgets)  # slots: super() finds no class
        return keep_best(scores, budgets, sinks=self.sinks, window=self.window)

    def _wanted_rows(self) -> int:
        """Of the prompt's last queries, all where somebody adds up what each chunk brings."""
        policy, n_tokens = self.policy, self.prompt_tokens
        several = isinstance(policy, ByHead | Weighted) and policy.needs_whole_prompt
        sums, rows = policy.observes or several, policy.query_rows(n_tokens)
        if self.deciding is not None:
            sums |= type(self.deciding).observe is not Scorer.observe
            rows = max(rows, self.deciding.query_rows(n_tokens))
        return n_tokens if sums else rows
