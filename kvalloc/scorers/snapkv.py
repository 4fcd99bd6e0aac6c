"""SnapKV: a longer observation window, average or maximum pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvalloc.scorers.base import Scorer, check_at_least, check_choice, check_odd
from kvalloc.scorers.window_rows import GROUP_REDUCTIONS, POOLINGS, window_scores

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import AttentionStates


class SnapKV(Scorer):
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
        How the query heads that share a KV head are reduced.

    Raises
    ------
    InputError
        If a parameter is out of range.

    References
    ----------
    SnapKV: LLM Knows What You are Looking for Before Generation (Li et al., 2024). Class defaults
    of its code: window 64, kernel 5, average; its runs use window 32, kernel 7, maximum.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "mean attention of the last 64 tokens, pooled over 5 (avg or max)"
    reference: ClassVar[str] = "SnapKV (Li et al., 2024)"

    def __init__(
        self,
        *,
        window: int = 64,
        pool: int = 5,
        pooling: str = "avg",
        group_reduce: str = "mean",
    ) -> None:
        self.window = check_at_least("window", window, 1, self.name)
        self.pool = check_odd("pool", pool, self.name)
        self.pooling = check_choice("pooling", pooling, POOLINGS, self.name)
        self.group_reduce = check_choice("group_reduce", group_reduce, GROUP_REDUCTIONS, self.name)

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Scores of one layer's entries; see `Scorer.score`."""
        return window_scores(
            states,
            window=self.window,
            sinks=sinks,
            pool=self.pool,
            pooling=self.pooling,
            group_reduce=self.group_reduce,
        )

    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again."""
        return {
            "window": self.window,
            "pool": self.pool,
            "pooling": self.pooling,
            "group_reduce": self.group_reduce,
        }
