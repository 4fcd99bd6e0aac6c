"""XKV: the last few rows vote, with average pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvalloc.scorers.base import Scorer, check_at_least, check_choice, check_odd
from kvalloc.scorers.window_rows import GROUP_REDUCTIONS, window_scores

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import AttentionStates


class XKV(Scorer):
    """Mean attention of the last `window` tokens to each earlier one, average-pooled.

    Parameters
    ----------
    window : int
        Observation window, tokens ("ows" in the paper).
    pool : int
        Odd width of the average pooling, tokens; 1 turns it off.
    group_reduce : {"mean", "max"}
        How the query heads that share a KV head are reduced; the paper leaves it open.

    Raises
    ------
    InputError
        If a parameter is out of range.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction for Long-Context LLM Inference, Eq. 3 and
    Section V-A (window 8, pooling 7, average).
    """

    name: ClassVar[str] = "xkv"
    summary: ClassVar[str] = "mean attention of the last 8 tokens, average-pooled over 7"
    reference: ClassVar[str] = "XKV: Personalized KV Cache Memory Reduction, Eq. 3"

    def __init__(self, *, window: int = 8, pool: int = 7, group_reduce: str = "mean") -> None:
        self.window = check_at_least("window", window, 1, self.name)
        self.pool = check_odd("pool", pool, self.name)
        self.group_reduce = check_choice("group_reduce", group_reduce, GROUP_REDUCTIONS, self.name)

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Scores of one layer's entries; see `Scorer.score`."""
        return window_scores(
            states,
            window=self.window,
            sinks=sinks,
            pool=self.pool,
            pooling="avg",
            group_reduce=self.group_reduce,
        )

    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again."""
        return {"window": self.window, "pool": self.pool, "group_reduce": self.group_reduce}
