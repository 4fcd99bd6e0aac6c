"""K-norm, the scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates
from kvalloc.scorers.base import Positive, Scorer

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_NORM = 1e-6


@dataclass(frozen=True, kw_only=True)
class KNorm(Scorer):
    """``1 / ||k||``: entries with shorter keys are kept.

    It only ranks: use it as a policy, not to decide budgets.

    References
    ----------
    A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (Devoto et al., 2024).
    """

    name = "knorm"
    summary = "keys of a small L2 norm; needs no queries"
    reference = "L2 norm-based compression (Devoto et al., 2024)"
    holds_queries = False
    across_layers = True

    window: Positive = 8

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`."""
        scores = states.keys.float().norm(dim=-1).clamp_(min=_LEAST_NORM).reciprocal_()
        return self.without_protected(scores, states, sinks=sinks)
