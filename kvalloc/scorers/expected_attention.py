"""Expected attention, the scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.models.rope import Rotation, known_rotation, rotate
from kvalloc.scorers.attention_rows import protected_columns
from kvalloc.scorers.base import NonNegative, Positive, Scorer

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Scorer):
    """Softmax of a future query's expected logit, times the value's norm.

    Queries before rotation count as normal, with mean m and covariance C of the prompt's, sinks
    excluded. With the mean rotation R over the next `future` positions, ``logit = s * k.Rm + s ** 2
    / 2 * k.(R C R^T)k`` with the logits' scaling s. The score is ``(softmax + epsilon) * ||v||``,
    with the softmax's mean over the query heads of a KV head.

    Parameters
    ----------
    window, future : int
    epsilon : float

    References
    ----------
    Expected Attention (Devoto et al., 2025), and its code: 512 positions, mean rotation, epsilon 0.
    Here queries are rotated back, not made from the projection, which would miss their norm.
    """

    name = "expected_attention"
    summary = "attention that queries like those so far would pay, times ||v||"
    reference = "Expected Attention (Devoto et al., 2025)"
    holds_queries = False
    rotates = True

    window: Positive = 8
    future: Positive = 512
    epsilon: NonNegative = 0.0

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`.

        Raises
        ------
        UnsupportedModelError
            If the queries' rotation is unknown, or logits have a cap or a sink.
        """
        import torch

        seen = self.observe(states, sinks=sinks)
        logits = self._expected_logits(states, seen)
        hidden = protected_columns(states, sinks=sinks)[:, :, None]
        # finite where a row has no token to score
        logits = logits.masked_fill(hidden, torch.finfo(torch.float32).min)
        scores = torch.softmax(logits, dim=-1).mean(dim=2)
        scores = (scores + self.epsilon) * states.values.float().norm(dim=-1)
        return self.without_protected(scores, states, sinks=sinks)

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed:
        """Return count, sum and outer products of queries so far, at position 0."""
        import torch

        rotation, states = _rotation(states), states.unobserved()
        before = states.observed
        if before is not None and not states.queries.shape[2]:
            return before
        start = 0 if before is None else before.n_tokens
        batch, _, n_new, _ = states.queries.shape
        real = ~protected_columns(states, sinks=sinks)[:, :, -n_new:].expand(batch, 1, n_new)
        totals = {"count": real.sum(dim=(1, 2)).double()}
        for first in range(0, n_new, _BLOCK_TOKENS):
            block = states.queries[:, :, first : first + _BLOCK_TOKENS].float()
            positions = torch.arange(first, first + block.shape[2], device=real.device) + start
            block = rotate(block, -positions, rotation)
            block = block * real[:, :, first : first + _BLOCK_TOKENS, None]
            outer = (block.transpose(2, 3) @ block).double()
            sums = {"sum": block.sum(dim=2).double(), "outer": outer}
            totals |= {name: totals.get(name, 0.0) + addend for name, addend in sums.items()}
        if before is not None:
            totals = {name: total + before.totals.get(name, 0.0) for name, total in totals.items()}
        return Observed(n_tokens=start + n_new, totals=totals)

    def _expected_logits(self, states: AttentionStates, seen: Observed) -> Tensor:
        """Return the expected logits, (batch, n_kv_heads, group, n_tokens)."""
        import torch

        batch, n_kv_heads, n_tokens, head_dim = states.keys.shape
        count = seen.totals["count"].clamp(min=1)[:, None, None]
        mean = seen.totals["sum"] / count
        ahead = torch.arange(self.future, device=mean.device) + seen.n_tokens
        turn = _mean_rotation(ahead, _rotation(states), head_dim)
        keys = states.keys.float()[:, :, None]
        query = (mean @ turn.T).float().view(batch, n_kv_heads, -1, head_dim, 1)
        logits = (keys @ query).squeeze(-1) * states.scaling
        spread = seen.totals["outer"] / count[..., None] - mean[..., None] * mean[..., None, :]
        spread = (turn @ spread @ turn.T).float().view(batch, n_kv_heads, -1, head_dim, head_dim)
        for member in range(spread.shape[2]):
            along = (keys[:, :, 0] @ spread[:, :, member]).mul_(keys[:, :, 0]).sum(dim=-1)
            logits[:, :, member] += along * (states.scaling**2 / 2)
        return logits


def _rotation(states: AttentionStates) -> Rotation:
    instead = "use a scorer that looks at attention, such as snapkv"
    if states.softcap is not None or states.sink_logits is not None:
        raise UnsupportedModelError(
            "the scorer expected_attention knows plain logits only, and this model caps them or "
            f"adds a sink to them; {instead}"
        )
    user = "the scorer expected_attention"
    return known_rotation(states.rotation, user=user, instead=instead)


def _mean_rotation(positions: Tensor, rotation: Rotation, head_dim: int) -> Tensor:
    """Return the positions' mean matrix of `rotate`, (head_dim, head_dim)."""
    import torch

    basis = torch.eye(head_dim, device=positions.device)[:, None].expand(-1, positions.numel(), -1)
    # row i is the image of unit vector i, so the columns of the matrix are the rows
    return rotate(basis, positions, rotation).double().mean(dim=1).T
