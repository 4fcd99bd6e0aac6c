"""CAKE's eviction score: what is looked at much, or by fits and starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvalloc.scorers.base import Scorer, check_at_least, check_number, check_odd
from kvalloc.scorers.window_rows import window_scores

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import AttentionStates


class CAKE(Scorer):
    """Mean plus `gamma` times the variance of the window's attention, average-pooled.

    This is the method's choice of entries; its choice of budgets is the solver ``proportional``.

    Parameters
    ----------
    window : int
        Observation window, tokens.
    pool : int
        Odd width of the average pooling, tokens; 1 turns it off.
    gamma : float
        Weight of the variance over the window's rows.

    Raises
    ------
    InputError
        If a parameter is out of range.

    References
    ----------
    CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences (Qin et al., 2025); its
    code: window 32, pooling 5, gamma 200, unbiased variance.
    """

    name: ClassVar[str] = "cake"
    summary: ClassVar[str] = "mean + gamma * variance of the last 32 tokens' attention, pooled"
    reference: ClassVar[str] = "CAKE (Qin et al., 2025)"

    def __init__(self, *, window: int = 32, pool: int = 5, gamma: float = 200.0) -> None:
        self.window = check_at_least("window", window, 1, self.name)
        self.pool = check_odd("pool", pool, self.name)
        self.gamma = check_number("gamma", gamma, "scorer cake", least=0.0)

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Scores of one layer's entries; see `Scorer.score`."""
        return window_scores(
            states,
            window=self.window,
            sinks=sinks,
            pool=self.pool,
            pooling="avg",
            group_reduce="mean",
            variance_weight=self.gamma,
        )

    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again."""
        return {"window": self.window, "pool": self.pool, "gamma": self.gamma}
