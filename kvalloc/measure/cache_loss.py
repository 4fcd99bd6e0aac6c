"""Loss of a whole reduced cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from kvalloc.errors import InputError
from kvalloc.extensions.answering import answer
from kvalloc.extensions.making import make_cache
from kvalloc.measure.kl import divergence
from kvalloc.measure.loss_probe import check_continues
from kvalloc.models.names import cache_keyword
from kvalloc.models.structure import evaluating, input_device

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.measure.checkpoint import Checkpoint
    from kvalloc.measure.sampling import Sample


CONTINUATION_TOKENS = 24
"""Most tokens of an answer; the last one is predicted from, too."""


class CacheLosses:
    """Losses of whole caches on prompts, over at most `continuation_tokens` predictions.

    Without an answer, the unchanged model writes one with the full cache.
    """

    def __init__(
        self,
        model: Any,
        samples: Sequence[Sample],
        *,
        continuation_tokens: int = CONTINUATION_TOKENS,
        kept: Checkpoint | None = None,
    ) -> None:
        self._model, self._samples, self._kept = model, samples, kept
        self._continuation_tokens = continuation_tokens
        self._full: dict[int, tuple[Tensor, Tensor]] = {}

    def loss(self, index: int, profile: BudgetProfile) -> float:
        """Return the mean of `losses`, nats per token."""
        name = f"{profile.digest}-{index}"
        known = None if self._kept is None else self._kept.load(name, {"loss": ()})
        if known is not None:
            return float(known["loss"])
        loss = float(np.mean(self.losses(index, profile)))
        if self._kept is not None:
            self._kept.save(name, {"loss": np.array(loss)})
        return loss

    @torch.no_grad()
    def losses(self, index: int, profile: BudgetProfile) -> tuple[float, ...]:
        """Return KL(full cache || reduced cache) of each token of one prompt's answer, nats.

        Raises
        ------
        InputError
            If the model has no answer, or the loss is not finite.
        """
        with evaluating(self._model):
            prompt, question = self._ids(index, "token_ids"), self._ids(index, "question_ids")
            n_prompt, n_question = int(prompt.shape[1]), int(question.shape[1])
            if index not in self._full:
                following = torch.cat([question, self._answer(index, prompt, question)], dim=1)
                cache = DynamicCache(config=self._model.config)
                full = self._predictions(cache, prompt, following, n_question)
                self._full[index] = following, full
            following, full = self._full[index]
            reduced = make_cache(
                self._model, profile, allow_other_model=True, prompt_tokens=n_prompt
            )
            losses = divergence(full, self._predictions(reduced, prompt, following, n_question)).kls
        if not math.isfinite(sum(losses)):
            raise InputError(
                f"{self._where(index)}: the loss is not finite; load the model in float32 or "
                "bfloat16, or check its weights"
            )
        return losses

    def _ids(self, index: int, name: str) -> Tensor:
        ids, device = getattr(self._samples[index], name), input_device(self._model)
        row = [] if ids is None else ids.tolist()
        return torch.tensor([row], dtype=torch.long, device=device)

    def _answer(self, index: int, prompt: Tensor, question: Tensor) -> Tensor:
        stated = self._ids(index, "answer_ids")[:, : self._continuation_tokens]
        if stated.numel():
            return stated
        ids = torch.cat([prompt, question], dim=1)
        cache = DynamicCache(config=self._model.config)
        longest = self._continuation_tokens
        written = [*answer(self._model, cache, ids, max_new_tokens=longest, keep=True)]
        check_continues(self._model, written[0], where=f"{self._where(index)}: ")
        return ids.new_tensor([written])

    def _where(self, index: int) -> str:
        return self._samples[index].name or f"prompt {index}"

    def _predictions(
        self, cache: Any, prompt: Tensor, following: Tensor, n_question: int
    ) -> Tensor:
        """Return logits from the question's last token on, (n, vocabulary)."""
        self._model(input_ids=prompt, logits_to_keep=1, **cache_keyword(self._model, cache))
        keyword = cache_keyword(self._model, cache)
        logits: Tensor = self._model(input_ids=following, **keyword).logits
        return logits[0, max(0, n_question - 1) :]
