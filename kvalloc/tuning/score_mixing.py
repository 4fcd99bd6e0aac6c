"""Each head's mixture of scorers as what a descent moves: prompts hand out entries by score.

Where each prompt hands out its entries among the heads by score (`kvalloc.runtime.selection`),
what is to be decided beforehand is how the scores of different heads compare, and which scorer
knows best in which head. Both are weights of scores, and the loss is made smooth in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.runtime.selection import handed_out
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

_LEAST_SCORE = 1e-9
_LOOKAHEAD = "lookahead:tokens=16:row_reduce=max:group_reduce=max:votes=0"


class MixedScores(Moves):
    """Logarithms of each head's weights of the scorers' scores.

    The score of an entry in head h is ``sum_k w_hk s_k``; the best entries of all heads together
    stay. An entry of score s is kept to the part ``sigmoid((log s - lambda) / softness)``, with the
    one lambda for the whole model that keeps as much as is wanted.
    See `kvalloc.tuning.descent.Moves`.

    The first scorer by default is what the tokens after the prompt look at; the others are these
    again, for passages; the prompt's last queries, for single entries and passages; its very last
    one; how far a key is from the others; and how late an entry stands.

    Parameters
    ----------
    job : DescentJob
    device : torch.device
    """

    own_scorer: ClassVar[str] = f"{_LOOKAHEAD}:pool=1"
    other_scorers: ClassVar[tuple[str, ...]] = (
        f"{_LOOKAHEAD}:pool=5",
        "lookahead:tokens=0:votes=32:row_reduce=max:group_reduce=max:pool=1",
        "snapkv:pool=5",
        *("tova", "keydiff", "streaming"),
    )
    settings: ClassVar[Descent] = Descent(
        steps=100,
        batch=6,
        continuation_tokens=32,
        learning_rate=0.15,
        softness=(1.0, 0.1),
        checks=4,
    )
    loss_floor: ClassVar[float] = 0.002

    def __init__(self, job: DescentJob, device: torch.device) -> None:
        self._job = job
        size = (*job.size, len(job.policies))
        first = torch.full(size, np.log(job.descent.other_weight), device=device)
        first[..., 0] = 0.0
        self._logarithms = first.requires_grad_(True)
        self.variables: Mapping[str, Tensor] = {"logarithms": self._logarithms}
        one = np.zeros(size, dtype=np.float32)
        one[..., 0] = 1.0
        self.equal: Decision = {"weights": one, "equal_budgets": np.array(True)}
        self.start = self.decision()

    @staticmethod
    def table(scores: Tensor, protected: int) -> Tensor:
        """The scores themselves."""
        return scores

    def soft_parts(self, prompt: ReadPrompt, left: float) -> Tensor:
        """Those of a soft threshold on weighted scores."""
        softness = between(self._job.descent.softness, left)
        places = (_weighted(prompt, self._logarithms.exp()) + _LEAST_SCORE).log()
        wanted = self._job.evictable_total(prompt.probe.n_tokens)
        found = threshold(places, wanted / places.numel(), softness)
        return torch.sigmoid((places - found) / softness)

    def decision(self) -> Decision:
        """The weights, the largest 1: only their proportions count."""
        weights = self._logarithms.detach().exp()
        return {"weights": (weights / weights.amax()).cpu().numpy()}

    def kept(self, prompt: ReadPrompt, decision: Decision) -> Tensor:
        """The best entries of each head, as many as the prompt hands out to it."""
        scores = self._scores(prompt, decision)
        counts = torch.from_numpy(self.handed_out(prompt, decision)).to(scores.device)
        return ranks_of(scores) < counts[..., None]

    def handed_out(self, prompt: ReadPrompt, decision: Decision) -> IntArray:
        """How many evictable entries each head keeps of a prompt, (n_full_layers, n_kv_heads)."""
        job, (layers, heads) = self._job, self._job.size
        total, units = job.evictable_total(prompt.probe.n_tokens), layers * heads
        if "equal_budgets" in decision:
            equal = np.full(units, total // units) + (np.arange(units) < total % units)
            return equal.reshape(job.size)
        scores, every = self._scores(prompt, decision), total + units * job.protected
        return handed_out(list(scores), every, protected=job.protected) - job.protected

    def part_kept(self, prompt: ReadPrompt, decision: Decision) -> FloatArray:
        """What the prompt hands out to each head."""
        return self.handed_out(prompt, decision) / prompt.table.shape[-1]

    def budgets(self, decision: Decision, parts: Sequence[FloatArray]) -> IntArray:
        """What heads kept of the prompts in the mean."""
        return self._job.budgets(np.mean(parts, axis=0), self._job.context)

    def profile_fields(self, decision: Decision) -> dict[str, Any]:
        """The weights of all scorers."""
        shape, policies = self._job.shape, self._job.policies
        weights = np.zeros((shape.n_layers, shape.n_kv_heads, len(policies)))
        # six digits say it all, and keep the file small
        short = np.vectorize(lambda one: float(f"{one:.6g}"))(decision["weights"])
        weights[list(shape.full_layers)] = short
        return {"other_policies": policies[1:], "unit_weights": weights, "by_prompt": True}

    def detail(self, losses: FloatArray, uniform: FloatArray) -> str:
        """One sentence on what came of it."""
        return (
            "each prompt hands out its entries by weighted scores; loss of the whole reduced "
            f"cache on {losses.size} held-out prompts {losses.mean():.4f} nats per token, "
            f"{uniform.mean():.4f} with equal budgets and the first scorer"
        )

    def _scores(self, prompt: ReadPrompt, decision: Decision) -> Tensor:
        weights = torch.from_numpy(decision["weights"])
        return _weighted(prompt, weights.to(prompt.table.device))


def _weighted(prompt: ReadPrompt, weights: Tensor) -> Tensor:
    """Sums of scores, (n_full_layers, n_kv_heads, n_evictable); weights (..., n_scorers)."""
    return torch.einsum("klht,lhk->lht", prompt.table, weights)
