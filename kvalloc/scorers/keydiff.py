"""KeyDiff, the scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.models.attention import AttentionStates
from kvalloc.scorers.attention_rows import protected_columns
from kvalloc.scorers.base import Positive, Scorer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Scorer):
    """``1 - cos(k, anchor)``; the anchor is the mean of the head's normalised keys.

    References
    ----------
    KeyDiff (Park et al., 2025).
    """

    name = "keydiff"
    summary = "keys that point away from the mean key; needs no queries"
    reference = "KeyDiff (Park et al., 2025)"
    holds_queries = False
    across_layers = True

    window: Positive = 8

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`."""
        from torch.nn import functional

        directions = functional.normalize(states.keys.float(), dim=-1)
        pads = protected_columns(states, sinks=0)
        anchor = directions.masked_fill(pads[..., None], 0.0).sum(dim=2, keepdim=True)
        cosines = (directions * functional.normalize(anchor, dim=-1)).sum(dim=-1)
        scores = (1.0 - cosines).clamp_(min=0.0)
        return self.without_protected(scores, states, sinks=sinks)
