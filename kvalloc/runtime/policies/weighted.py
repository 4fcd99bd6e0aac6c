"""Several scorers in one cache: each KV head ranks by its own weighted sum of their scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import Combined, CombinedPolicy, EvictionPolicy, Limits
from kvalloc.runtime.selection import keep_best
from kvalloc.scorers import Scorer


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted(CombinedPolicy):
    """Each KV head keeps the best by a sum of scores that are weighted for it.

    The weights say which scorer knows best in a head, and how much a head's scores count beside
    those of others where entries are handed out among heads by score. It has no name to be asked
    for: a budget profile with weights makes it.

    Parameters
    ----------
    scorer : Scorer
        The first one of `scorers`.
    scorers : tuple of Scorer
    weights : ndarray of float64, (n_layers, n_kv_heads, n_scorers)
        Not below 0.
    combining : EvictionPolicy, optional
        What it does with the evicted entries is done here, too; what it would keep does not count.
    """

    name = "weighted"
    summary = "each KV head by its own mixture of scorers"
    reference = "ours"

    scorers: tuple[Scorer, ...]
    weights: FloatArray
    combining: EvictionPolicy | None = None

    @property
    def parts(self) -> tuple[EvictionPolicy | Scorer, ...]:
        """The scorers, and the policy that combines."""
        return self.scorers if self.combining is None else (*self.scorers, self.combining)

    def scores(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """The weighted sums of one layer's scores.

        Parameters
        ----------
        states : AttentionStates
            All KV heads of a layer, or some of them.
        sinks : int
            First tokens, never evicted.

        Returns
        -------
        Tensor of float32, (batch, n_kv_heads, n_tokens)
        """
        n_heads = int(states.keys.shape[1])
        own = self.weights[states.layer, states.first_head : states.first_head + n_heads]
        summed = states.keys.new_zeros(states.keys.shape[:3], dtype=torch.float32)
        for place in self._used(states.layer):
            weights = torch.tensor(own[:, place], dtype=torch.float32, device=summed.device)
            found = self.scorers[place].score(states, sinks=sinks)
            summed += weights[None, :, None] * found.to(summed.device)
        return summed

    def keep(self, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]) -> Tensor:
        """Choose the entries that stay; see `EvictionPolicy.keep`."""
        scores = self.scores(states, sinks=limits["sinks"])
        return keep_best(scores, budgets, **limits)

    def combine(
        self, states: AttentionStates, kept: Tensor, budgets: Tensor, **limits: Unpack[Limits]
    ) -> Combined | None:
        """As the policy that combines does, if there is one; see `EvictionPolicy.combine`."""
        if self.combining is None:
            return None
        return self.combining.combine(states, kept, budgets, **limits)

    @property
    def combines(self) -> bool:
        """Whether there is a policy that does."""
        return self.combining is not None and self.combining.combines

    @property
    def holds(self) -> bool:
        """Whether that policy wants the prompt held."""
        return self.combining is not None and self.combining.holds

    @property
    def early(self) -> Weighted:
        """The same mixture of what each scorer says early; see `EvictionPolicy.early`."""
        early = tuple(scorer.early for scorer in self.scorers)
        return replace(self, scorer=early[0], scorers=early, combining=None)

    @property
    def again(self) -> Weighted:
        """The same mixture, and what its combining policy does then."""
        combining = self.combining
        return self if combining is None else replace(self, combining=combining.again)

    def _used(self, layer: int) -> list[int]:
        """Places of the scorers that count in any head of a layer."""
        return [int(place) for place in np.flatnonzero(self.weights[layer].any(axis=0))]

    def later_scorers(self, layer: int) -> tuple[Scorer, ...]:
        """Those that count in some head of the layer, and what the combining policy looks at."""
        used = [self.scorers[place] for place in self._used(layer)]
        if self.combining is not None:
            own = self.combining.scorer
            used += [one for one in self.combining.later_scorers(layer) if one is not own]
        return tuple(scorer for scorer in used if scorer.later is not None)
