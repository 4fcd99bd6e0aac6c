"""StreamingLLM, as a scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates
from kvalloc.scorers.base import Positive, Scorer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Streaming(Scorer):
    """Score that grows with the position: sinks and most recent tokens stay.

    Its budgets are equal: use it as a policy, and decide budgets by another.

    References
    ----------
    StreamingLLM (Xiao et al., 2024): 4 sinks and the most recent tokens.
    """

    name = "streaming"
    summary = "the most recent tokens, blind to the text"
    reference = "StreamingLLM (Xiao et al., 2024)"
    across_layers = True

    window: Positive = 8

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return ``(position + 1) / n_tokens``; see `Scorer.score`."""
        import torch

        n_tokens = states.keys.shape[2]
        recency = torch.arange(1, n_tokens + 1, dtype=torch.float32, device=states.keys.device)
        scores = (recency / n_tokens).expand(states.keys.shape[:3]).clone()
        return self.without_protected(scores, states, sinks=sinks)
