"""CriticalKV: half the budget by attention, the rest by what an entry adds to the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import RankedPolicy
from kvalloc.runtime.selection import Room, best_entries
from kvalloc.scorers.base import Scorer, check_number, check_share
from kvalloc.scorers.projected_values import projected_value_norms

if TYPE_CHECKING:
    from torch import Tensor


class Critical(RankedPolicy):
    """Two stages within the evictable budget b, on the scores A of the profile's scorer.

    Stage 1 keeps the ``floor(alpha * b)`` best by A. Stage 2 fills the rest with the best by
    ``(A + epsilon) * || V W_O ||_1``, which bounds how much the output can change. b leaves out
    sinks and window, which stay in any case. The method is meant for scores that are mean
    attention weights (``snapkv``, ``xkv``): epsilon is on their scale.

    Parameters
    ----------
    scorer : Scorer
        Gives A.
    alpha : float
        Share of b for stage 1, 0..1. The paper's Algorithm 1 prints 0.25; its text and all its
        experiments have 0.5.
    epsilon : float
        Added to A in stage 2.

    Raises
    ------
    InputError
        If a parameter is out of range.

    References
    ----------
    Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (Feng et
    al., 2025), Algorithm 1.
    """

    name: ClassVar[str] = "critical"
    summary: ClassVar[str] = "half by attention, the rest by attention times ||V W_O||"
    reference: ClassVar[str] = "CriticalKV (Feng et al., 2025), Algorithm 1"

    def __init__(self, *, scorer: Scorer, alpha: float = 0.5, epsilon: float = 1e-4) -> None:
        super().__init__(scorer=scorer)
        self.alpha = check_share("alpha", alpha, "policy critical")
        self.epsilon = check_number("epsilon", epsilon, "policy critical", least=0.0)

    def rankings(
        self, states: AttentionStates, *, sinks: int, window: int, valid: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """A, and ``(A + epsilon) * || V W_O ||_1``; see `RankedPolicy.rankings`.

        Raises
        ------
        UnsupportedModelError
            If the layer's output projection cannot be read.
        """
        scores = self.scorer.score(states, sinks=sinks)
        return scores, (scores + self.epsilon) * projected_value_norms(states)

    def keep_ranked(
        self,
        rankings: tuple[Tensor, ...],
        states: AttentionStates,
        budgets: Tensor,
        *,
        sinks: int,
        window: int,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Choose in two stages; see `RankedPolicy.keep_ranked`."""
        scores, weighted = rankings
        room = Room.of(states.keys, budgets, sinks=sinks, window=window, valid=valid)
        first = (room.counts * self.alpha).floor().long()
        stage_1 = best_entries(scores, first, among=room.evictable)
        left = room.evictable & ~stage_1
        stage_2 = best_entries(weighted, room.counts - first, among=left)
        return room.always | stage_1 | stage_2

    def parameters(self) -> dict[str, Any]:
        """What builds this policy again, apart from the scorer."""
        return {"alpha": self.alpha, "epsilon": self.epsilon}
