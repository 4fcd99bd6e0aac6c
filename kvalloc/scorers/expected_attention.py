"""Expected attention: what queries yet to come will look at, if they are like those so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.attention import Observed
from kvalloc.scorers.base import Scorer, check_at_least, check_number
from kvalloc.scorers.column_sums import without_protected
from kvalloc.scorers.rotation import rotated
from kvalloc.scorers.window_rows import protected_columns

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import AttentionStates

_BLOCK_TOKENS = 2048


class ExpectedAttention(Scorer):
    """Softmax of the expected logit of a future query, times the norm of the value.

    Queries before rotation are taken for normally distributed, with the mean m and covariance C of
    the prompt's own (sinks left out). With the mean rotation R over the next `future` positions,
    ``logit = s * k.Rm + s ** 2 / 2 * k.(R C R^T)k`` with the logits' scaling s; its softmax over
    the entries, mean over the query heads of a KV head, times ``||v||``. A prompt in chunks gives
    the same score: counts and sums of the queries are kept by the cache.

    Parameters
    ----------
    window : int
        Last tokens that are never evicted, tokens.
    future : int
        Positions after the prompt that are averaged over, tokens.
    covariance : bool
        Use C; without it the expected logit is that of the mean query.
    value_norm : bool
        Multiply by the L2 norm of the value.
    epsilon : float
        Added to the softmax before that.

    Raises
    ------
    InputError
        If a parameter is out of range.

    References
    ----------
    Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution (Devoto et al., 2025), and its public code: 512 positions, mean rotation, epsilon
    0. It takes the queries from the projection's weights, and so not behind a norm of queries;
    here they are rotated back, which works with that, too.
    """

    name: ClassVar[str] = "expected_attention"
    summary: ClassVar[str] = "attention that queries like those so far would pay, times ||v||"
    reference: ClassVar[str] = "Expected Attention (Devoto et al., 2025)"

    def __init__(
        self,
        *,
        window: int = 8,
        future: int = 512,
        covariance: bool = True,
        value_norm: bool = True,
        epsilon: float = 0.0,
    ) -> None:
        self.window = check_at_least("window", window, 1, self.name)
        self.future = check_at_least("future", future, 1, self.name)
        self.covariance = bool(covariance)
        self.value_norm = bool(value_norm)
        self.epsilon = check_number("epsilon", epsilon, f"scorer {self.name}", least=0.0)

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Scores of one layer's entries; see `Scorer.score`.

        Raises
        ------
        UnsupportedModelError
            If the model does not rotate halves of its queries, or changes its logits in a way
            that has no expectation in closed form.
        """
        import torch

        seen = self.observe(states, sinks=sinks)
        logits = self._expected_logits(states, seen)
        hidden = protected_columns(states, sinks=sinks)[:, :, None]
        # finite where a row has no token to score
        logits = logits.masked_fill(hidden, torch.finfo(torch.float32).min)
        scores = torch.softmax(logits, dim=-1).mean(dim=2)
        if self.value_norm:
            scores = (scores + self.epsilon) * states.values.float().norm(dim=-1)
        return without_protected(scores, states, sinks=sinks, window=self.window)

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed:
        """Count, sum and outer products of the queries so far, rotated back to position 0."""
        import torch

        _check_model(states)
        before = states.observed
        start = 0 if before is None else before.n_tokens
        batch, n_heads, n_new, head_dim = states.queries.shape
        real = ~protected_columns(states, sinks=sinks)[:, 0, -n_new:]
        real = real.expand(batch, n_new)
        totals = {
            "count": real.sum(dim=-1).double(),
            "sum": torch.zeros(batch, n_heads, head_dim, dtype=torch.float64, device=real.device),
            "outer": torch.zeros(
                batch, n_heads, head_dim, head_dim, dtype=torch.float64, device=real.device
            ),
        }
        for first in range(0, n_new, _BLOCK_TOKENS):
            block = states.queries[:, :, first : first + _BLOCK_TOKENS].float()
            positions = torch.arange(first, first + block.shape[2], device=real.device) + start
            block = rotated(block, -positions, _known(states.frequencies))
            block = block * real[:, None, first : first + _BLOCK_TOKENS, None]
            totals["sum"] += block.sum(dim=2).double()
            if self.covariance:
                totals["outer"] += (block.transpose(2, 3) @ block).double()
        if before is not None:
            totals = {name: total + before.totals[name] for name, total in totals.items()}
        return Observed(n_tokens=start + n_new, totals=totals)

    def _expected_logits(self, states: AttentionStates, seen: Observed) -> Tensor:
        """(batch, n_kv_heads, group, n_tokens)."""
        import torch

        batch, n_kv_heads, n_tokens, head_dim = states.keys.shape
        count = seen.totals["count"].clamp(min=1)[:, None, None]
        mean = seen.totals["sum"] / count
        ahead = torch.arange(self.future, device=mean.device) + seen.n_tokens
        turn = _mean_rotation(ahead, states.frequencies, head_dim)
        keys = states.keys.float()[:, :, None]
        query = (mean @ turn.T).float().view(batch, n_kv_heads, -1, head_dim, 1)
        logits = (keys @ query).squeeze(-1) * states.scaling
        if not self.covariance:
            return logits
        spread = seen.totals["outer"] / count[..., None] - mean[..., None] * mean[..., None, :]
        spread = (turn @ spread @ turn.T).float().view(batch, n_kv_heads, -1, head_dim, head_dim)
        for member in range(spread.shape[2]):
            along = (keys[:, :, 0] @ spread[:, :, member]).mul_(keys[:, :, 0]).sum(dim=-1)
            logits[:, :, member] += along * (states.scaling**2 / 2)
        return logits

    def query_rows(self, n_tokens: int) -> int:
        """None: each query is added once, when it comes."""
        return 0

    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again."""
        return {
            "window": self.window,
            "future": self.future,
            "covariance": self.covariance,
            "value_norm": self.value_norm,
            "epsilon": self.epsilon,
        }


def _check_model(states: AttentionStates) -> None:
    if states.frequencies is None:
        raise UnsupportedModelError(
            "the scorer expected_attention has to rotate queries, and this model does not turn "
            "its queries in halves; use a scorer that looks at attention, such as snapkv"
        )
    if states.softcap is not None or states.sink_logits is not None:
        raise UnsupportedModelError(
            "the scorer expected_attention knows plain logits only, and this model caps them or "
            "adds a sink to them; use a scorer that looks at attention, such as snapkv"
        )


def _known(frequencies: Tensor | None) -> Tensor:
    assert frequencies is not None  # `_check_model` has refused others
    return frequencies


def _mean_rotation(positions: Tensor, frequencies: Tensor | None, head_dim: int) -> Tensor:
    """Mean over the positions of the matrix that `_rotated` applies, (head_dim, head_dim)."""
    import torch

    basis = torch.eye(head_dim, device=positions.device)[:, None].expand(-1, positions.numel(), -1)
    # row i is the image of unit vector i, so the columns of the matrix are the rows
    return rotated(basis, positions, _known(frequencies)).double().mean(dim=1).T
