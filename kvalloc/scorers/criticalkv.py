"""CriticalKV's second ranking as a score: what an entry adds to the layer's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvalloc.scorers.base import (
    Scorer,
    check_at_least,
    check_choice,
    check_number,
    check_odd,
)
from kvalloc.scorers.column_sums import without_protected
from kvalloc.scorers.projected_values import projected_value_norms
from kvalloc.scorers.window_rows import POOLINGS, window_scores

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import AttentionStates


class CriticalKV(Scorer):
    """``(A + epsilon) * || V W_O ||_1``, with A the pooled mean attention of the window.

    Keeping the most of it minimises an upper bound of the change of the layer's output (Theorem
    3.5), so that a retention curve made of it is about the output rather than about attention.
    The method itself picks in two stages, for which it needs the budget: see the policy
    ``critical``.

    Parameters
    ----------
    window : int
        Observation window, tokens.
    pool : int
        Odd pooling width, tokens; 1 turns it off.
    pooling : {"avg", "max"}
        How neighbours are pooled.
    epsilon : float
        Added to A.

    Raises
    ------
    InputError
        If a parameter is out of range.

    References
    ----------
    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (Feng et
    al., 2025), Theorem 3.5 and Algorithm 1, line 3, on SnapKV's window with maximum pooling
    (Algorithm 2).
    """

    name: ClassVar[str] = "criticalkv"
    summary: ClassVar[str] = "attention of the window times ||V W_O||: what changes the output"
    reference: ClassVar[str] = "CriticalKV (Feng et al., 2025), Theorem 3.5"

    def __init__(
        self,
        *,
        window: int = 32,
        pool: int = 7,
        pooling: str = "max",
        epsilon: float = 1e-4,
    ) -> None:
        self.window = check_at_least("window", window, 1, self.name)
        self.pool = check_odd("pool", pool, self.name)
        self.pooling = check_choice("pooling", pooling, POOLINGS, self.name)
        self.epsilon = check_number("epsilon", epsilon, "scorer criticalkv", least=0.0)

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Scores of one layer's entries; see `Scorer.score`.

        Raises
        ------
        UnsupportedModelError
            If the layer's output projection cannot be read.
        """
        attention = window_scores(
            states,
            window=self.window,
            sinks=sinks,
            pool=self.pool,
            pooling=self.pooling,
            group_reduce="mean",
        )
        scores = attention.add_(self.epsilon).mul_(projected_value_norms(states))
        return without_protected(scores, states, sinks=sinks, window=self.window)

    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again."""
        return {
            "window": self.window,
            "pool": self.pool,
            "pooling": self.pooling,
            "epsilon": self.epsilon,
        }
