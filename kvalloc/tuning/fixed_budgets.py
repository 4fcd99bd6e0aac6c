"""Budgets and policies of single heads, the same for every prompt, as what a descent moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.tuning.descent import (
    Decision,
    Descent,
    DescentJob,
    Moves,
    ReadPrompt,
    between,
    ranks_of,
    threshold,
)


class FixedBudgets(Moves):
    """Logits of shares, ``theta``, and of each head's policies, ``mixing``.

    Entry t of a head with n evictable entries, budget share s and policy p is kept to the part
    ``sigmoid((s n - rank_p(t) - 1/2) / (tau n))``, the head's mixture of policies is a softmax, and
    the shares are ``sigmoid(theta + lambda)`` with the one lambda that meets the budget. tau (the
    softness) and the softmax's temperature fall until each head has one policy and a sharp budget.
    See `kvalloc.tuning.descent.Moves`.

    Parameters
    ----------
    job : DescentJob
    device : torch.device
    """

    own_scorer: ClassVar[str] = "xkv"
    other_scorers: ClassVar[tuple[str, ...]] = (
        *("xkv:window=4:pool=1", "criticalkv:window=8", "tova", "keydiff", "streaming"),
        "expected_attention",
    )
    settings: ClassVar[Descent] = Descent(
        steps=60,
        batch=5,
        continuation_tokens=16,
        learning_rate=0.25,
        softness=(0.04, 0.004),
        checks=3,
    )
    loss_floor: ClassVar[float] = 0.02

    def __init__(self, job: DescentJob, device: torch.device) -> None:
        self._job = job
        self._theta = torch.zeros(job.size, device=device, requires_grad=True)
        size = (*job.size, len(job.policies))
        self._mixing = torch.zeros(size, device=device, requires_grad=True)
        self.variables: Mapping[str, Tensor] = {"theta": self._theta, "mixing": self._mixing}
        self.equal: Decision = {
            "shares": np.full(job.size, job.evictable_share),
            "places": np.zeros(job.size, dtype=np.int64),
        }
        self.start = self.equal

    @staticmethod
    def table(scores: Tensor, protected: int) -> Tensor:
        """Ranks; sinks and window come first."""
        return (ranks_of(scores) + protected).int()

    def soft_parts(self, prompt: ReadPrompt, left: float) -> Tensor:
        """The policies' soft masks, mixed."""
        job = self._job
        shares = shares_of(self._theta, job.evictable_share)
        mixture = (self._mixing / between(job.descent.temperature, left)).softmax(dim=-1)
        room = prompt.probe.n_tokens - job.protected
        threshold = shares * room + (job.protected - 0.5)
        softness = between(job.descent.softness, left) * room
        parts = torch.sigmoid((threshold[None, ..., None] - prompt.table) / softness)
        return torch.einsum("lhp,plht->lht", mixture, parts)

    def decision(self) -> Decision:
        """Shares of the evictable entries, and each head's place among the policies."""
        shares = shares_of(self._theta, self._job.evictable_share)
        places = self._mixing.argmax(dim=-1)
        return {"shares": shares.double().cpu().numpy(), "places": places.cpu().numpy()}

    def kept(self, prompt: ReadPrompt, decision: Decision) -> Tensor:
        """The best entries of each head by its policy."""
        budgets = self._job.budgets(decision["shares"], prompt.probe.n_tokens)
        ranks = prompt.table
        index = torch.from_numpy(decision["places"]).to(ranks.device)[None, ..., None]
        own = ranks.gather(0, index.expand(1, *ranks.shape[1:]))[0]
        return own < torch.from_numpy(budgets).to(ranks.device)[..., None]

    def part_kept(self, prompt: ReadPrompt, decision: Decision) -> FloatArray:
        """The same of every prompt."""
        shares: FloatArray = decision["shares"]
        return shares

    def budgets(self, decision: Decision, parts: Sequence[FloatArray]) -> IntArray:
        """Those that were decided."""
        return self._job.budgets(decision["shares"], self._job.context)

    def profile_fields(self, decision: Decision) -> dict[str, Any]:
        """The policies that heads really have."""
        shape, policies, places = self._job.shape, self._job.policies, decision["places"]
        used = [0, *(int(place) for place in np.unique(places) if place)]
        table = np.zeros((shape.n_layers, shape.n_kv_heads), dtype=np.int64)
        table[list(shape.full_layers)] = np.searchsorted(used, places)
        return {
            "other_policies": tuple(policies[place] for place in used[1:]),
            "unit_policies": table if len(used) > 1 else None,
        }

    def detail(self, losses: FloatArray, uniform: FloatArray) -> str:
        """One sentence on what came of it."""
        return (
            f"loss of the whole reduced cache on {losses.size} prompts that were held out of the "
            f"descent and chose its best stage: {losses.mean():.4f} nats per token, "
            f"{uniform.mean():.4f} with equal budgets"
        )


def shares_of(theta: Tensor, mean: float) -> Tensor:
    """``sigmoid(theta + lambda)`` with the given mean, lambda's own derivative included."""
    return torch.sigmoid(theta - threshold(theta, mean))
