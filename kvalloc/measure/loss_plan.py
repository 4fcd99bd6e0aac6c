"""How losses are measured beside retention, and on one sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.errors import InputError, option

if TYPE_CHECKING:
    from kvalloc.formats.policy import Policy
    from kvalloc.measure.loss_curves import LossLevel, MeasuredLosses
    from kvalloc.scorers import Scorer
    from kvalloc.shape import ModelShape

LossMethod = Literal["measured", "fast"]

DEFAULT_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Shares of the evictable entries that a unit is reduced to, besides keeping all of them."""


@dataclass(frozen=True, kw_only=True)
class LossPlan:
    """How losses are measured.

    Attributes
    ----------
    method : {"measured", "fast"}
        A forward for every unit and level, or the second-order estimate from one backward pass.
    level : {"layer", "head"}
        What is reduced alone.
    shares : tuple of float
        Shares of the evictable entries that each unit is reduced to.
    continuation_tokens : int
        Tokens after the prompt on which the distributions are compared, at most.
    batch : int
        Variants that run together.
    probes : int or None
        Measure so many figures a sample, where the solution is undecided, after a pass of estimates
        over all samples (`kvalloc.measure.probing`); all figures by default.
    policies : tuple of str
        Policies whose losses are measured beside those of the scorer's best entries, as
        `kvalloc.measure.loss_policies.named_policies` reads them.

    Raises
    ------
    InputError
        If a value is out of range.
    """

    method: LossMethod = "measured"
    level: LossLevel = "layer"
    shares: tuple[float, ...] = DEFAULT_SHARES
    continuation_tokens: int = 24
    batch: int = 8
    probes: int | None = None
    policies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in (("method", ("measured", "fast")), ("level", ("layer", "head"))):
            if getattr(self, name) not in choices:
                raise InputError(
                    f"the loss {name} is {getattr(self, name)!r}, expected {' or '.join(choices)}"
                )
        if self.continuation_tokens < 1 or self.batch < 1:
            raise InputError("a loss needs a continuation and a batch of at least 1")
        if self.probes is not None and (self.probes < 1 or self.method != "measured"):
            raise InputError(
                f"{self.probes} probes of {self.method} losses cannot be measured; ask for 1 or "
                f"more with {option('loss', 'measured')}"
            )
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise InputError(
                f"the loss levels {self.shares} are not shares within 0..1; give some such"
            )

    def named_policies(self, scorer: Scorer, *, sinks: int) -> tuple[Policy, ...]:
        """The policies beside the scorer's own; see `kvalloc.measure.loss_policies`.

        Raises
        ------
        InputError, UnsupportedRequestError
            If one of them cannot be.
        """
        from kvalloc.measure.loss_policies import named_policies

        return named_policies(self.policies, scorer, sinks=sinks)

    def levels(self, context_tokens: int, protected_tokens: int) -> IntArray:
        """Budgets at which losses are measured.

        Parameters
        ----------
        context_tokens, protected_tokens : int
            Reference context; sinks and window, which every budget includes.

        Returns
        -------
        ndarray of int64, (n_levels,)
            Rising; the last one is the context.
        """
        evictable = context_tokens - protected_tokens
        tokens = [protected_tokens + round(share * evictable) for share in self.shares]
        return np.unique([*tokens, context_tokens]).astype(np.int64)

    def measure(
        self,
        model: Any,
        shape: ModelShape,
        scorer: Scorer,
        token_ids: IntArray,
        answer_ids: IntArray | None,
        *,
        context_tokens: int,
        sinks: int,
        layer_done: Callable[[], None],
        only: BoolArray | None = None,
        question_ids: IntArray | None = None,
    ) -> MeasuredLosses:
        """Loss curves of one sample.

        Parameters
        ----------
        model : transformers.PreTrainedModel
        shape : ModelShape
        scorer : Scorer
            Ranks the entries.
        token_ids : ndarray of int64, (n_tokens,)
            The prompt.
        answer_ids : ndarray of int64, (n_answer,), or None
            The continuation; what the model writes by default.
        context_tokens, sinks : int
            Of the score profile.
        layer_done : callable
            Called after each layer.
        only : ndarray of bool, optional
            Which figures to measure; see `kvalloc.measure.loss_curves.measure_losses`. Where there
            are `probes` and it is not given, all are estimated.
        question_ids : ndarray of int64, (n_question,), optional
            What is read between prompt and continuation, and not reduced.

        Returns
        -------
        MeasuredLosses

        Raises
        ------
        UnsupportedModelError
            If the model's layers cannot be seen.
        """
        import torch

        from kvalloc.measure.loss_curves import LossJob, estimate_losses, measure_losses
        from kvalloc.measure.loss_probe import LossProbe
        from kvalloc.runtime.policies import policy_of

        device = model.get_input_embeddings().weight.device
        probe = LossProbe(
            model,
            torch.from_numpy(token_ids).to(device),
            scorer,
            sinks=sinks,
            shape=shape,
            answer_ids=None if answer_ids is None else torch.from_numpy(answer_ids).to(device),
            continuation_tokens=self.continuation_tokens,
            question_ids=None if question_ids is None else torch.from_numpy(question_ids),
            policies=[policy_of(one) for one in self.named_policies(scorer, sinks=sinks)],
        )
        job = LossJob(
            n_layers=shape.n_layers,
            context_tokens=context_tokens,
            sinks=sinks,
            window=scorer.window,
            level=self.level,
        )
        levels = self.levels(context_tokens, job.protected_tokens)
        if only is not None or (self.method == "measured" and self.probes is None):
            return measure_losses(
                probe, levels, job, batch=self.batch, only=only, layer_done=layer_done
            )
        return estimate_losses(probe, levels, job, batch=self.batch, layer_done=layer_done)

    def record(self) -> dict[str, Any]:
        """What decides the numbers, as plain values."""
        return {
            **({"policies": list(self.policies)} if self.policies else {}),
            **({} if self.probes is None else {"probes": self.probes}),
            "method": self.method,
            "level": self.level,
            "shares": list(self.shares),
            "continuation_tokens": self.continuation_tokens,
        }
