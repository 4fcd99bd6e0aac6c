"""CriticalKV: half the budget by attention, half by the size of an entry's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import EvictionPolicy, Limits
from kvalloc.runtime.selection import best_entries, evictable, free_counts
from kvalloc.scorers.base import NonNegative, Share
from kvalloc.scorers.projected_values import projected_value_norms


@dataclass(frozen=True, kw_only=True)
class Critical(EvictionPolicy):
    """Two stages that spend the budget b, without sinks and window, on the scorer's scores A.

    Stage 1 keeps the ``floor(alpha * b)`` best by A. Stage 2 takes the best others by ``(A +
    epsilon) * || V W_O ||_1``, which bounds the output's change. Scores should be mean attention
    weights (``snapkv``, ``xkv``), for epsilon's scale.

    Parameters
    ----------
    alpha : float
        Share of b for stage 1, 0..1. The paper's Algorithm 1 prints 0.25, its text and experiments
        0.5.
    epsilon : float

    References
    ----------
    CriticalKV: Identify Critical KV Cache in LLM Inference (Feng et al., 2025), Algorithm 1.
    """

    name = "critical"
    summary = "half by attention, the rest by attention times ||V W_O||"
    reference = "CriticalKV (Feng et al., 2025), Algorithm 1"
    unserved = ("latent", "shared")

    alpha: Share = 0.5
    epsilon: NonNegative = 1e-4

    def keep(self, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]) -> Tensor:
        """Choose in two stages; see `EvictionPolicy.keep`.

        Raises
        ------
        UnsupportedModelError
            If the layer's output projection cannot be read.
        """
        scores = self.scorer.score(states, sinks=limits["sinks"])
        weighted = (scores + self.epsilon) * projected_value_norms(states)
        free, counts = evictable(scores, **limits), free_counts(scores, budgets, **limits)
        first = (counts * self.alpha).floor().long()
        stage_1 = best_entries(scores, first, among=free)
        return ~free | stage_1 | best_entries(weighted, counts - first, among=free & ~stage_1)
