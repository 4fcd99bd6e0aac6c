"""A2SF: accumulated attention that forgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvalloc.scorers.base import Scorer, check_at_least, check_share
from kvalloc.scorers.column_sums import add_columns, column_scores

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import AttentionStates, Observed


class A2SF(Scorer):
    """Sum of an entry's attention over all rows, each row worth less the longer ago it was.

    ``A[k] = sum over rows q of forgetting ** (last - q) * S[q, k]``: with 1 it is H2O, towards 0
    it is the last row alone. The paper tunes the factor for each model and task; the default here
    is ours, and looks back over some hundred rows. A prompt in chunks gives the same score, as
    long as nothing is evicted before it is complete.

    Parameters
    ----------
    window : int
        Last tokens that are never evicted, tokens.
    forgetting : float
        Factor a row, above 0 and at most 1.

    Raises
    ------
    InputError
        If a parameter is out of range.

    References
    ----------
    A2SF: Accumulative Attention Scoring with Forgetting Factor for Token Pruning in Transformer
    Decoder (Jo and Shin, 2024).
    """

    name: ClassVar[str] = "a2sf"
    summary: ClassVar[str] = "sum of the attention of all rows, fading with their age"
    reference: ClassVar[str] = "A2SF (Jo and Shin, 2024)"

    def __init__(self, *, window: int = 32, forgetting: float = 0.99) -> None:
        self.window = check_at_least("window", window, 1, self.name)
        self.forgetting = check_share("forgetting", forgetting, "scorer a2sf", least_above=True)

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Scores of one layer's entries; see `Scorer.score`."""
        return column_scores(states, sinks=sinks, window=self.window, forgetting=self.forgetting)

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed:
        """The sums so far; see `Scorer.observe`."""
        return add_columns(states, forgetting=self.forgetting)

    def query_rows(self, n_tokens: int) -> int:
        """None: each row is added once, when it comes."""
        return 0

    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again."""
        return {"window": self.window, "forgetting": self.forgetting}
