"""H2O, the scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.scorers.base import Positive, Scorer
from kvalloc.scorers.column_sums import add_columns

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class H2O(Scorer):
    """Sum of an entry's attention over all causal prompt rows, without pooling.

    More rows see early entries; see `A2SF`. Chunks give the same score, if nothing is evicted
    before the end.

    References
    ----------
    H2O (Zhang et al., 2023): accumulated attention, beside a recent window.
    """

    name = "h2o"
    summary = "sum of the attention of all rows (heavy hitters)"
    reference = "H2O (Zhang et al., 2023)"
    holds_queries = False
    forgetting = 1.0

    window: Positive = 32

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`."""
        columns = self.observe(states, sinks=sinks).columns
        assert columns is not None
        return self.without_protected(columns, states, sinks=sinks)

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed:
        """See `Scorer.observe`."""
        return add_columns(states, forgetting=self.forgetting)
