"""Put caches through tasks: harm, right answers, bytes and speed, each with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError
from kvalloc.evaluate.caches import end_tokens
from kvalloc.evaluate.kl import divergence
from kvalloc.evaluate.methods import Compressed, answer_greedily, full_cache
from kvalloc.prompts.intervals import interval

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvalloc.evaluate.methods import Answer, Method
    from kvalloc.prompts.cases import Case
    from kvalloc.prompts.tasks import Task

FULL = "full"
ALL_TASKS = "all tasks"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one method made of one prompt, the mean over its turns where there are several.

    Attributes
    ----------
    answers : tuple of str, (n_turns,)
        What was written greedily.
    kl : float or None
        Mean teacher-forced KL(full cache || this cache) over the continuation, nats per token:
        what follows in the text, or the full cache's own answer. A first token that is predicted
        while the prompt is read is left out: nothing is evicted yet. 0 for the full cache, None
        where nothing is left to compare.
    top1_agreement : float or None
        Share of the continuation's tokens on which both agree, 0..1.
    nll : float or None
        Mean negative log likelihood of what really follows in the text, nats per token.
    score : float or None
        The answers by the task's metric, 0..1; None where nothing is asked.
    found : float or None
        Share of the turns whose answer holds a right one, 0..1; None where nothing is asked.
    retained_bytes, full_bytes : int
        Bytes of K and V after the prompt, read from the storages; those that the full cache needs,
        which is less than it stores while sliding layers keep what has left their window.
    kept_bytes : int
        Bytes of the entries that can be attended to; see `Compressed`.
    prefill_seconds : float
        Wall time of the prompt.
    decoded_tokens : int
        Tokens decoded one by one after the first.
    decode_seconds : float
        Wall time of those.
    """

    answers: tuple[str, ...]
    kl: float | None
    top1_agreement: float | None
    nll: float | None
    score: float | None
    found: float | None
    retained_bytes: int
    full_bytes: int
    kept_bytes: int
    prefill_seconds: float
    decoded_tokens: int
    decode_seconds: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """One method on one task.

    Attributes
    ----------
    name : str
        The method.
    task : str
        The task.
    context : int
        Longest prompt, tokens.
    outcomes : tuple of Outcome
        One a prompt, in the order of the prompts.
    """

    name: str
    task: str
    context: int
    outcomes: tuple[Outcome, ...]


def values(scores: Sequence[Score], name: str) -> list[FloatArray]:
    """What is known of an attribute of `Outcome`: of each task that has some, ``(n_prompts,)``."""
    tasks = (known(getattr(outcome, name) for outcome in score.outcomes) for score in scores)
    return [np.array(task, dtype=np.float64) for task in tasks if task]


def row(scores: Sequence[Score]) -> dict[str, Any]:
    """One method as plain values: means over prompts, then over tasks, which have equal weight.

    Parameters
    ----------
    scores : sequence of Score, (n_tasks,)
        Of the same method. Perplexity is given for a single task only.

    Returns
    -------
    dict
        ``ci95`` is the interval of the KL; see `kvalloc.prompts.intervals.interval`.
    """

    def mean(name: str) -> float | None:
        return _mean_or_none([float(task.mean()) for task in values(scores, name)])

    first, nll = scores[0], mean("nll")
    counts = ("retained_bytes", "full_bytes", "kept_bytes")
    speeds = [_tokens_per_second(score.outcomes) for score in scores]
    return {
        "name": first.name,
        "task": first.task if len(scores) == 1 else ALL_TASKS,
        "context": first.context,
        **{name: round(mean(name) or 0) for name in counts},
        "kl": mean("kl"),
        "ci95": interval(values(scores, "kl")),
        "top1_agreement": mean("top1_agreement"),
        "exact_match": mean("found"),
        "score": mean("score"),
        "score_ci95": interval(values(scores, "score")),
        "perplexity": math.exp(nll) if nll is not None and len(scores) == 1 else None,
        "n": sum(len(score.outcomes) for score in scores),
        "prefill_seconds": mean("prefill_seconds"),
        "decode_tokens_per_second": _mean_or_none(known(speeds)),
    }


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[tuple[Task, Sequence[Case]]],
    methods: Mapping[str, Method],
    *,
    context: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Score]:
    """Put every method through every task, prompt by prompt, all methods on the same prompts.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    tasks : sequence of (Task, cases)
    methods : mapping of str to Method
        Such as ``CacheMethod(make_cache=lambda: profile.cache(model))``.
    context : int
        For the rows.
    progress : callable
        Called with what is done and all there is, counted in prompts with a method each.

    Yields
    ------
    Score
        For each task the full cache first, then the others in their order.

    Raises
    ------
    InputError
        If a method is called as the full cache is.
    """
    if FULL in methods:
        raise InputError(f"a method cannot be called {FULL!r}; give it another name")
    total = sum(len(cases) for _, cases in tasks) * (1 + len(methods))
    finished = iter(range(1, total + 1))
    for task, cases in tasks:
        outcomes: dict[str, list[Outcome]] = {name: [] for name in (FULL, *methods)}
        for case in cases:
            full = measure(model, tokenizer, full_cache(model), case)
            outcomes[FULL].append(full.outcome)
            progress(next(finished), total)
            for name, method in methods.items():
                outcomes[name].append(measure(model, tokenizer, method, case, full).outcome)
                progress(next(finished), total)
        for name, found in outcomes.items():
            yield Score(name=name, task=task.name, context=context, outcomes=tuple(found))


@dataclass(frozen=True, kw_only=True)
class ReadTurn:
    """One turn with one cache.

    Attributes
    ----------
    answer : Answer
        Written greedily.
    continuation_ids : tuple of int, (n_continuation,)
        What was then read: the text, or the full cache's answer.
    logits : Tensor of float32, (n_predictions, vocabulary)
        Predictions of the continuation while it was read; without that of the first token where
        the prompt's own prefill made it.
    """

    answer: Answer
    continuation_ids: tuple[int, ...]
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one cache made of one prompt; that of the full cache is the yardstick for the others.

    Attributes
    ----------
    turns : tuple of ReadTurn, (n_turns,)
    outcome : Outcome
    """

    turns: tuple[ReadTurn, ...]
    outcome: Outcome


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    case: Case,
    full: Measured | None = None,
) -> Measured:
    """Answer one prompt with a method's cache, and compare to the full cache's answer.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    method : Method
    case : Case
    full : Measured, optional
        What the full cache made of it; None while that is measured.
    """
    compressed = method.compress(model, case.input_ids)
    turns = read_turns(compressed, tokenizer, case, None if full is None else full.turns)
    full_bytes = compressed.kept_bytes if full is None else full.outcome.full_bytes
    yardstick = turns if full is None else full.turns
    outcome = _outcome(case, compressed, turns, yardstick, full_bytes=full_bytes)
    return Measured(turns=tuple(turns), outcome=outcome)


def read_turns(
    compressed: Compressed,
    tokenizer: PreTrainedTokenizerBase,
    case: Case,
    yardstick: Sequence[ReadTurn] | None = None,
) -> list[ReadTurn]:
    """Answer every turn greedily on a copy, and read the full cache's answer.

    Parameters
    ----------
    compressed : Compressed
        Grows by the questions and the full cache's answers.
    tokenizer : PreTrainedTokenizerBase
    case : Case
    yardstick : sequence of ReadTurn, optional
        The full cache's; None while it is made.

    Returns
    -------
    list of ReadTurn, (n_turns,)
    """
    turns: list[ReadTurn] = []
    unread: tuple[int, ...] = ()
    for number, turn in enumerate(case.turns):
        question = unread + turn.question_ids
        answer = answer_greedily(compressed.fork(), tokenizer, question, turn.max_new_tokens)
        if turn.continuation_ids:
            continuation = turn.continuation_ids
        else:
            continuation = answer.ids if yardstick is None else yardstick[number].continuation_ids
        n_predicted = len(continuation) - (0 if question else 1)
        logits = compressed.logits[None, :][:0]
        if question or len(continuation) > 1:
            logits = compressed.feed(question, continuation[:-1], last=n_predicted)
        turns.append(ReadTurn(answer=answer, continuation_ids=continuation, logits=logits))
        # The last token was predicted, not read; an end mark is for the next question to bring.
        unread = continuation[-1:]
        if unread and unread[0] in end_tokens(compressed.model, tokenizer):
            unread = ()
    return turns


def known(values: Iterable[float | None]) -> list[float]:
    """Those that are not None."""
    return [value for value in values if value is not None]


def _outcome(
    case: Case,
    compressed: Compressed,
    turns: Sequence[ReadTurn],
    yardstick: Sequence[ReadTurn],
    *,
    full_bytes: int,
) -> Outcome:
    compared = [
        divergence(right.logits, mine.logits)
        for right, mine in zip(yardstick, turns, strict=True)
        if len(right.logits)
    ]
    scores, found, nlls = [], [], []
    for turn, read in zip(case.turns, turns, strict=True):
        scores.append(turn.score(read.answer.text))
        found.append(float(turn.is_found(read.answer.text)) if turn.answers else None)
        if turn.continuation_ids and len(read.logits):
            nlls.append(_nll(read.logits, turn.continuation_ids[-len(read.logits) :]))
    return Outcome(
        answers=tuple(read.answer.text for read in turns),
        kl=_mean_or_none([one.kl for one in compared]),
        top1_agreement=_mean_or_none([one.top1_agreement for one in compared]),
        nll=_mean_or_none(nlls),
        score=_mean_or_none(known(scores)),
        found=_mean_or_none(known(found)),
        retained_bytes=compressed.stored_bytes,
        full_bytes=full_bytes,
        kept_bytes=compressed.kept_bytes,
        prefill_seconds=compressed.prefill_seconds,
        decoded_tokens=sum(len(read.answer.ids) - 1 for read in turns),
        decode_seconds=sum(read.answer.decode_seconds for read in turns),
    )


def _nll(logits: Tensor, ids: Sequence[int]) -> float:
    import torch

    chosen = torch.tensor(list(ids))[:, None]
    return -float(logits.float().log_softmax(dim=-1).gather(-1, chosen).double().mean())


def _tokens_per_second(outcomes: Sequence[Outcome]) -> float | None:
    seconds = sum(outcome.decode_seconds for outcome in outcomes)
    return sum(outcome.decoded_tokens for outcome in outcomes) / seconds if seconds > 0 else None


def _mean_or_none(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
