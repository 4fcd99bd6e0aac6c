"""XKV: attention of the last few rows, with average pooling."""

from __future__ import annotations

from dataclasses import dataclass

from kvalloc.scorers.base import OddWidth, Positive
from kvalloc.scorers.pooled import PooledScorer, Reduction


@dataclass(frozen=True, kw_only=True)
class XKV(PooledScorer):
    """Mean attention of the last `window` tokens to each earlier one, average-pooled.

    Parameters
    ----------
    window : int
        Observation window in tokens ("ows" in the paper).
    pool : int
        Odd width of the average pooling, tokens; 1 turns it off.
    group_reduce : {"mean", "max"}
        Reduction over the query heads of a KV head; the paper leaves it open.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction for Long-Context LLM Inference, Eq. 3 and Section
    V-A (window 8, pooling 7, average).
    """

    name = "xkv"
    summary = "mean attention of the last 8 tokens, average-pooled over 7"
    reference = "XKV: Personalized KV Cache Memory Reduction, Eq. 3"

    window: Positive = 8
    pool: OddWidth = 7
    group_reduce: Reduction = "mean"
