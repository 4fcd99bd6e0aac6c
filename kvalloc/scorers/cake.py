"""CAKE, the scorer."""

from __future__ import annotations

from dataclasses import dataclass

from kvalloc.scorers.base import NonNegative, OddWidth, Positive
from kvalloc.scorers.pooled import PooledScorer


@dataclass(frozen=True, kw_only=True)
class CAKE(PooledScorer):
    """Mean plus `gamma` times the variance of the window's attention, average-pooled.

    Parameters
    ----------
    window, pool, gamma
        See `PooledScorer`.

    References
    ----------
    CAKE (Qin et al., 2025); its code: window 32, pooling 5, gamma 200, unbiased variance.
    """

    name = "cake"
    summary = "mean + gamma * variance of the last 32 tokens' attention, pooled"
    reference = "CAKE (Qin et al., 2025)"

    window: Positive = 32
    pool: OddWidth = 5
    gamma: NonNegative = 200.0
