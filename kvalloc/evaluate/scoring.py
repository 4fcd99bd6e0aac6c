"""Put caches through tasks: harm, right answers, bytes and speed, each with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvalloc.errors import InputError
from kvalloc.evaluate.caches import ANSWER_TOKENS, MakeCache, Run, answer_with, forced_logits
from kvalloc.evaluate.kl import Divergence, divergence

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvalloc.evaluate.tasks import EvaluationCase, Task

FloatArray = npt.NDArray[np.float64]
FULL = "full"
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one cache made of one prompt.

    Attributes
    ----------
    kl : float or None
        Mean teacher-forced KL(full cache || this cache) over the continuation, nats per token:
        what follows in the text, or the full cache's own answer; 0 for the full cache, None where
        that has one token only.
    top1_agreement : float or None
        Share of the continuation's tokens on which both agree, 0..1.
    nll : float or None
        Mean negative log likelihood of what really follows in the text, nats per token.
    found : bool
        Whether the answer is right.
    retained_bytes, full_bytes : int
        Bytes of K and V after the prompt, read from the tensors; those of the full cache.
    prefill_seconds : float
        Wall time of the prompt.
    decoded_tokens : int
        Tokens decoded one by one after the first.
    decode_seconds : float
        Wall time of those.
    """

    kl: float | None
    top1_agreement: float | None
    nll: float | None
    found: bool
    retained_bytes: int
    full_bytes: int
    prefill_seconds: float
    decoded_tokens: int
    decode_seconds: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """One cache on one task.

    Attributes
    ----------
    name : str
        The cache.
    task : str
        The task.
    context : int
        Longest prompt, tokens.
    outcomes : tuple of Outcome
        One a prompt, in the order of the prompts.
    asks : bool
        Whether the task has right answers.
    """

    name: str
    task: str
    context: int
    outcomes: tuple[Outcome, ...]
    asks: bool

    def row(self) -> dict[str, Any]:
        """Means over the prompts as plain values; ``ci95`` is that of the KL, by bootstrap."""
        kls = [outcome.kl for outcome in self.outcomes if outcome.kl is not None]
        agreed = [o.top1_agreement for o in self.outcomes if o.top1_agreement is not None]
        nlls = [outcome.nll for outcome in self.outcomes if outcome.nll is not None]
        decoded = sum(outcome.decoded_tokens for outcome in self.outcomes)
        seconds = sum(outcome.decode_seconds for outcome in self.outcomes)
        return {
            "name": self.name,
            "task": self.task,
            "context": self.context,
            "retained_bytes": round(_mean([o.retained_bytes for o in self.outcomes])),
            "full_bytes": round(_mean([o.full_bytes for o in self.outcomes])),
            "kl": _mean(kls) if kls else None,
            "ci95": bootstrap_interval(kls) if kls else None,
            "top1_agreement": _mean(agreed) if agreed else None,
            "exact_match": _mean([o.found for o in self.outcomes]) if self.asks else None,
            "perplexity": math.exp(_mean(nlls)) if nlls else None,
            "n": len(self.outcomes),
            "prefill_seconds": _mean([o.prefill_seconds for o in self.outcomes]),
            "decode_tokens_per_second": decoded / seconds if seconds > 0 else None,
        }


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[tuple[Task, Sequence[EvaluationCase]]],
    caches: Mapping[str, MakeCache],
    *,
    context: int,
    done: Callable[[], None] = lambda: None,
) -> Iterator[Score]:
    """Put every cache through every task, prompt by prompt, all caches on the same prompts.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    tasks : sequence of (Task, cases)
    caches : mapping of str to callable
        Each gives a new, empty cache, such as ``lambda: profile.cache(model)``.
    context : int
        For the rows.
    done : callable
        Called after each prompt and cache.

    Yields
    ------
    Score
        For each task the full cache first, then the others in their order.

    Raises
    ------
    InputError
        If a cache is called as the full one is.
    """
    from transformers import DynamicCache

    if FULL in caches:
        raise InputError(f"a cache cannot be called {FULL!r}; give it another name")
    for task, cases in tasks:
        outcomes: dict[str, list[Outcome]] = {name: [] for name in (FULL, *caches)}
        for case in cases:
            yardstick = _Yardstick.of(model, tokenizer, case, DynamicCache(config=model.config))
            outcomes[FULL].append(yardstick.outcome(case, yardstick.run, yardstick.logits))
            done()
            for name, make in caches.items():
                run = answer_with(model, tokenizer, case.input_ids, make(), _answer_tokens(case))
                logits = forced_logits(model, run.after_prompt, yardstick.continuation_ids)
                outcomes[name].append(yardstick.outcome(case, run, logits))
                done()
        for name, found in outcomes.items():
            yield Score(
                name=name, task=task.name, context=context, outcomes=tuple(found), asks=task.asks
            )


@dataclass(frozen=True, kw_only=True)
class _Yardstick:
    """The full cache's predictions on one prompt."""

    run: Run
    continuation_ids: tuple[int, ...]
    logits: Tensor
    is_text: bool

    @classmethod
    def of(cls, model: Any, tokenizer: Any, case: EvaluationCase, cache: Any) -> _Yardstick:
        run = answer_with(model, tokenizer, case.input_ids, cache, _answer_tokens(case))
        text = _follows(case)
        continuation = run.answer_ids if text is None else text
        return cls(
            run=run,
            continuation_ids=continuation,
            logits=forced_logits(model, run.after_prompt, continuation),
            is_text=text is not None,
        )

    def outcome(self, case: EvaluationCase, run: Run, logits: Tensor) -> Outcome:
        compared: Divergence | None = None
        if len(self.continuation_ids) > 1:
            compared = divergence(self.logits, logits)
        return Outcome(
            kl=None if compared is None else compared.kl,
            top1_agreement=None if compared is None else compared.top1_agreement,
            nll=_nll(logits, self.continuation_ids[1:]) if self.is_text else None,
            found=case.is_found(run.answer),
            retained_bytes=run.stored_bytes,
            full_bytes=self.run.stored_bytes,
            prefill_seconds=run.prefill_seconds,
            decoded_tokens=len(run.answer_ids) - 1,
            decode_seconds=run.decode_seconds,
        )


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> list[float] | None:
    """Percentile bootstrap interval of a mean.

    Parameters
    ----------
    values : sequence of float
        One a prompt.
    confidence : float
    seed : int

    Returns
    -------
    list of float or None
        Low and high end; None for fewer than two values.

    References
    ----------
    B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), Chap. 13.
    """
    if len(values) < 2:
        return None
    from scipy.stats import bootstrap

    if max(values) == min(values):
        return [float(values[0]), float(values[0])]
    found = bootstrap(
        (np.asarray(values, dtype=np.float64),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return [float(found.low), float(found.high)]


def _follows(case: EvaluationCase) -> tuple[int, ...] | None:
    continuation: tuple[int, ...] | None = getattr(case, "continuation_ids", None)
    return continuation


def _answer_tokens(case: EvaluationCase) -> int:
    """A text asks nothing, but a few tokens show the speed."""
    return ANSWER_TOKENS if _follows(case) is None else 8


def _nll(logits: Tensor, ids: Sequence[int]) -> float:
    import torch

    chosen = torch.tensor(list(ids))[:, None]
    return -float(logits.float().log_softmax(dim=-1).gather(-1, chosen).double().mean())


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(np.asarray(values, dtype=np.float64)))
