"""SnapKV, the scorer."""

from __future__ import annotations

from dataclasses import dataclass

from kvalloc.scorers.base import OddWidth, Positive
from kvalloc.scorers.pooled import PooledScorer, Pooling, Reduction


@dataclass(frozen=True, kw_only=True)
class SnapKV(PooledScorer):
    """Mean attention of the last `window` tokens to earlier ones, pooled.

    The method sums; the mean ranks alike and makes windows comparable.

    Parameters
    ----------
    window, pool, pooling, group_reduce
        See `PooledScorer`.

    References
    ----------
    SnapKV (Li et al., 2024). Class defaults of its code: window 64, kernel 5, average; its runs use
    window 32, kernel 7, maximum.
    """

    name = "snapkv"
    summary = "mean attention of the last 64 tokens, pooled over 5 (avg or max)"
    reference = "SnapKV (Li et al., 2024)"

    window: Positive = 64
    pool: OddWidth = 5
    pooling: Pooling = "avg"
    group_reduce: Reduction = "mean"
