"""SnapKV: attention of an observation window, with average or maximum pooling."""

from __future__ import annotations

from dataclasses import dataclass

from kvalloc.scorers.base import OddWidth, Positive
from kvalloc.scorers.pooled import PooledScorer, Pooling, Reduction


@dataclass(frozen=True, kw_only=True)
class SnapKV(PooledScorer):
    """Mean attention of the last `window` tokens to each earlier one, pooled.

    The method sums the rows; the mean ranks alike and makes masses comparable between windows.

    Parameters
    ----------
    window : int
        Observation window, tokens.
    pool : int
        Odd pooling width, tokens; 1 turns it off.
    pooling : {"avg", "max"}
        How neighbours are pooled.
    group_reduce : {"mean", "max"}
        Reduction over the query heads of a KV head.

    References
    ----------
    SnapKV: LLM Knows What You are Looking for Before Generation (Li et al., 2024). Class defaults
    of its code: window 64, kernel 5, average; its runs use window 32, kernel 7, maximum.
    """

    name = "snapkv"
    summary = "mean attention of the last 64 tokens, pooled over 5 (avg or max)"
    reference = "SnapKV (Li et al., 2024)"

    window: Positive = 64
    pool: OddWidth = 5
    pooling: Pooling = "avg"
    group_reduce: Reduction = "mean"
