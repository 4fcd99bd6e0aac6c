"""H2O: heavy hitters, the entries that got most attention from all rows."""

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
    """Sum of an entry's attention over all causal rows of the prompt, without pooling.

    Early entries are seen by more rows, which this score does not correct; see `A2SF`. A prompt in
    chunks gives the same score, if nothing is evicted before it is complete.

    References
    ----------
    H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (Zhang et
    al., 2023): the accumulated attention score, next to a recent window.
    """

    name = "h2o"
    summary = "sum of the attention of all rows (heavy hitters)"
    reference = "H2O (Zhang et al., 2023)"
    holds_queries = False
    forgetting = 1.0

    window: Positive = 32

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return the scores of one layer's entries; see `Scorer.score`."""
        columns = self.observe(states, sinks=sinks).columns
        assert columns is not None
        return self.without_protected(columns, states, sinks=sinks)

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed:
        """Return the sums so far; see `Scorer.observe`."""
        return add_columns(states, forgetting=self.forgetting)
