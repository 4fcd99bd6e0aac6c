"""CriticalKV, as a scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates
from kvalloc.scorers.base import NonNegative, OddWidth, Positive
from kvalloc.scorers.pooled import PooledScorer, Pooling
from kvalloc.scorers.projected_values import projected_value_norms

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CriticalKV(PooledScorer):
    """``(A + epsilon) * || V W_O ||_1``, with A the pooled mean attention of the window.

    The largest minimise an upper bound of the output's change. The method picks in two stages: see
    the policy ``critical``.

    Parameters
    ----------
    window, pool, pooling, epsilon
        See `PooledScorer` and the formula.

    References
    ----------
    CriticalKV (Feng et al., 2025), Theorem 3.5 and Algorithm 1, line 3, on SnapKV's window with
    maximum pooling (Algorithm 2).
    """

    name = "criticalkv"
    summary = "attention of the window times ||V W_O||: what changes the output"
    reference = "CriticalKV (Feng et al., 2025), Theorem 3.5"
    across_layers = False  # each has its output projection

    window: Positive = 32
    pool: OddWidth = 7
    pooling: Pooling = "max"
    epsilon: NonNegative = 1e-4

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`.

        Raises
        ------
        UnsupportedModelError
            If the output projection cannot be read.
        """
        attention = super().score(states, sinks=sinks)
        scores = attention.add_(self.epsilon).mul_(projected_value_norms(states))
        return self.without_protected(scores, states, sinks=sinks)
