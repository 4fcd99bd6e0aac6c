"""H2O: heavy hitters, the entries that got most attention from all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvalloc.scorers.base import Scorer, check_at_least
from kvalloc.scorers.column_sums import add_columns, column_scores

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import AttentionStates, Observed


class H2O(Scorer):
    """Sum of an entry's attention over all causal rows of the prompt, without pooling.

    Early entries are seen by more rows, which this score does not even out; see `A2SF`. A prompt
    in chunks gives the same score, as long as nothing is evicted before it is complete.

    Parameters
    ----------
    window : int
        Last tokens that are never evicted, tokens.

    Raises
    ------
    InputError
        If the window is out of range.

    References
    ----------
    H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (Zhang et
    al., 2023): the accumulated attention score, next to a recent window.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "sum of the attention of all rows (heavy hitters)"
    reference: ClassVar[str] = "H2O (Zhang et al., 2023)"

    def __init__(self, *, window: int = 32) -> None:
        self.window = check_at_least("window", window, 1, self.name)

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Scores of one layer's entries; see `Scorer.score`."""
        return column_scores(states, sinks=sinks, window=self.window)

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed:
        """The sums so far; see `Scorer.observe`."""
        return add_columns(states)

    def query_rows(self, n_tokens: int) -> int:
        """None: each row is added once, when it comes."""
        return 0

    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again."""
        return {"window": self.window}
