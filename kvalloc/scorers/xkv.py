"""XKV, the scorer."""

from __future__ import annotations

from dataclasses import dataclass

from kvalloc.scorers.base import OddWidth, Positive
from kvalloc.scorers.pooled import PooledScorer, Reduction


@dataclass(frozen=True, kw_only=True)
class XKV(PooledScorer):
    """Mean attention of the last `window` tokens to earlier ones, average-pooled.

    Parameters
    ----------
    window, pool, group_reduce
        See `PooledScorer`. The paper has the window as "ows", and leaves the reduction open.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction, Eq. 3 and Section V-A (window 8, pooling 7,
    average).
    """

    name = "xkv"
    summary = "mean attention of the last 8 tokens, average-pooled over 7"
    reference = "XKV: Personalized KV Cache Memory Reduction, Eq. 3"

    window: Positive = 8
    pool: OddWidth = 7
    group_reduce: Reduction = "mean"
