"""K-norm: keys of a small norm matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvalloc.scorers.base import Scorer, check_at_least
from kvalloc.scorers.column_sums import without_protected

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import AttentionStates

_LEAST_NORM = 1e-6


class KNorm(Scorer):
    """``1 / ||k||``: of two entries, the one with the shorter key is kept.

    Needs no queries, so chunks make no difference. The ranking is the method's; the method has no
    scores to add up, so a retention curve made of these is ours: use it as a policy rather than to
    decide budgets.

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
    A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (Devoto et al., 2024).
    """

    name: ClassVar[str] = "knorm"
    summary: ClassVar[str] = "keys of a small L2 norm; needs no queries"
    reference: ClassVar[str] = "L2 norm-based compression (Devoto et al., 2024)"

    def __init__(self, *, window: int = 8) -> None:
        self.window = check_at_least("window", window, 1, self.name)

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Scores of one layer's entries; see `Scorer.score`."""
        scores = states.keys.float().norm(dim=-1).clamp_(min=_LEAST_NORM).reciprocal_()
        return without_protected(scores, states, sinks=sinks, window=self.window)

    def query_rows(self, n_tokens: int) -> int:
        """None."""
        return 0

    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again."""
        return {"window": self.window}
