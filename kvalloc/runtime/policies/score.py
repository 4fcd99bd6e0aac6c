"""Policy `score`: the best scores stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import SHORT_TOKENS, EvictionPolicy, Limits
from kvalloc.runtime.selection import keep_best


@dataclass(frozen=True, kw_only=True)
class Score(EvictionPolicy):
    """Sinks, window, and each KV head's best entries by the profile's scorer.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction, Algorithm 2.
    """

    name = "score"
    summary = "the best entries by the profile's scorer"
    reference = "XKV, Algorithm 2; the method is the scorer's"

    @property
    def across_layers(self) -> bool:
        """The scorer's answer."""
        return self.scorer.across_layers

    def scores(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return the scorer's scores."""
        return self.scorer.score(states, sinks=sinks)

    def keep(self, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]) -> Tensor:
        """See `EvictionPolicy.keep`."""
        scores = self.scores_of(states, budgets < states.keys.shape[2], sinks=limits["sinks"])
        return keep_best(scores, budgets, absent=states.absent, counts=states.counts, **limits)

    def scores_of(self, states: AttentionStates, heads: Tensor, *, sinks: int) -> Tensor:
        """Return scores of selected heads, one at a time if long."""
        few = states.keys.shape[2] <= SHORT_TOKENS or states.counts is not None
        if not self.scorer.by_head or few:
            return self.scores(states, sinks=sinks)
        scores = states.keys.new_zeros(states.keys.shape[:3], dtype=torch.float32)
        for head in heads.any(dim=0).nonzero()[:, 0].tolist():
            scores[:, head] = self.scores(states.kv_head(head), sinks=sinks)[:, 0]
        return scores
