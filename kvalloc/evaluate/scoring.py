"""Run caches on tasks: loss, right answers, bytes and speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import FloatArray
from kvalloc.engine.contract import Advance, Engine, Failed, engine_of, result_of
from kvalloc.errors import InputError, SampleError
from kvalloc.evaluate.methods import Answer, Compressed, answer_greedily, end_tokens, full_cache
from kvalloc.measure.job import Steps
from kvalloc.measure.kl import divergence
from kvalloc.prompts.cases import POSITIONS
from kvalloc.prompts.intervals import interval, tails

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvalloc.evaluate.methods import Method
    from kvalloc.prompts.cases import Case
    from kvalloc.prompts.tasks import Task

T = TypeVar("T")

FULL = "full"
ALL_TASKS = "all tasks"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one method on one prompt.

    Attributes
    ----------
    answers : tuple of str, (n_turns,)
    kls : tuple of tuple of (float or None), (n_measured_turns, n_continuation)
        Teacher-forced KL(full cache || this cache) of the text's continuation, or else of the full
        cache's answer, nats. None for first tokens predicted before any eviction.
    agrees : tuple of tuple of (bool or None), as `kls`
        Whether both caches' most likely token is the same.
    nll : float or None
        Mean negative log likelihood of the continuation, nats per token.
    score, exact_match : float or None
        Means, 0..1: the task's metric, and whether the answer contains a right one.
    retained_bytes, full_bytes : int
        Bytes of this cache after the prompt, and of the full cache.
    kept_bytes, bytes_at_16_bits, full_bytes_at_16_bits : int
        See `Compressed`.
    decoded_tokens : int
        Without the first token of each answer.
    prefill_seconds, decode_seconds : float
    """

    answers: tuple[str, ...]
    kls: tuple[tuple[float | None, ...], ...]
    agrees: tuple[tuple[bool | None, ...], ...]
    nll: float | None
    score: float | None
    exact_match: float | None
    retained_bytes: int
    full_bytes: int
    kept_bytes: int
    bytes_at_16_bits: int
    full_bytes_at_16_bits: int
    prefill_seconds: float
    decoded_tokens: int
    decode_seconds: float

    @property
    def kl(self) -> float | None:
        """Mean KL after the eviction, nats per token, or None."""
        return self.kl_at(slice(None))

    def kl_at(self, positions: slice) -> float | None:
        """Return the mean KL over these positions of answers, nats per token."""
        return _mean_of_turns(self.kls, positions)

    @property
    def top1_agreement(self) -> float | None:
        """Share of compared tokens on which both caches agree, 0..1."""
        return self.agreement_at(slice(None))

    def agreement_at(self, positions: slice) -> float | None:
        """Return the agreement over these positions of answers, 0..1."""
        return _mean_of_turns(self.agrees, positions)

    @property
    def exact_tokens(self) -> float:
        """Mean number of tokens per turn that were predicted before any eviction."""
        return float(np.mean([turn.count(None) for turn in self.kls]))


@dataclass(frozen=True, kw_only=True)
class Score:
    """One method on one task.

    Attributes
    ----------
    name, task : str
    context : int
        Longest prompt, tokens.
    outcomes : tuple of Outcome, (n_prompts,)
    """

    name: str
    task: str
    context: int
    outcomes: tuple[Outcome, ...]


def values(
    tasks: Iterable[Iterable[T]], of: Callable[[T], npt.ArrayLike | None]
) -> list[FloatArray]:
    """Return the known values of each task that has any, ``(n_prompts, ...)``."""
    arrays = [[value for one in task if (value := of(one)) is not None] for task in tasks]
    return [np.array(array, dtype=np.float64) for array in arrays if array]


def mean_of_tasks(tasks: Sequence[FloatArray]) -> Any:
    """Return the mean over tasks of their prompts' mean; None without a task."""
    return np.mean([task.mean(axis=0) for task in tasks], axis=0).tolist() if tasks else None


def row(scores: Sequence[Score]) -> dict[str, Any]:
    """Return one method's plain values: means over prompts, then tasks of equal weight.

    Parameters
    ----------
    scores : sequence of Score, (n_tasks,)
        Of the same method.

    Returns
    -------
    dict
        ``ci95`` is the KL's `interval`; percentiles are `tails` over all tokens. ``by_position``
        has the ranges that an answer reaches. ``perplexity`` is None for several tasks.
    """
    outcomes = [score.outcomes for score in scores]
    turns = [turn for prompts in outcomes for one in prompts for turn in one.kls]

    def mean_of(of: Callable[[Outcome], float | None]) -> Any:
        return mean_of_tasks(values(outcomes, of))

    def mean(name: str) -> Any:
        return mean_of(attrgetter(name))

    def distance(positions: slice) -> dict[str, Any]:
        return {
            "kl": mean_of(lambda one: one.kl_at(positions)),
            **tails(kl for turn in turns for kl in turn[positions]),
            "top1_agreement": mean_of(lambda one: one.agreement_at(positions)),
        }

    longest = max(map(len, turns), default=0)
    first, nll = scores[0], mean("nll")
    counts = ("retained_bytes", "full_bytes", "kept_bytes", "bytes_at_16_bits")
    qualities = ("exact_tokens", "exact_match", "score")
    speeds = [_tokens_per_second(one) for one in outcomes]
    return {
        "name": first.name,
        "task": first.task if len(scores) == 1 else ALL_TASKS,
        "context": first.context,
        **{name: round(mean(name) or 0) for name in counts},
        "share_of_16_bits": mean_of(lambda one: one.bytes_at_16_bits / one.full_bytes_at_16_bits),
        **distance(slice(None)),
        "ci95": interval(values(outcomes, attrgetter("kl"))),
        "by_position": {
            name: distance(piece) for name, piece in POSITIONS.items() if piece.start < longest
        },
        **{name: mean(name) for name in qualities},
        "score_ci95": interval(values(outcomes, attrgetter("score"))),
        "perplexity": math.exp(nll) if nll is not None and len(scores) == 1 else None,
        "n": sum(len(score.outcomes) for score in scores),
        "prefill_seconds": mean("prefill_seconds"),
        "decode_tokens_per_second": _mean_or_none(known(speeds)),
    }


class CaseWork:
    """Work on one prompt: every method, the full cache first.

    Parameters
    ----------
    make : callable
        Returns a model's methods by name.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, make: Callable[[Any], Mapping[str, Method]]
    ) -> None:
        self._tokenizer, self._make = tokenizer, make
        self._methods: Mapping[str, Method] | None = None

    def __call__(self, model: Any, case: Case | None, advance: Advance) -> dict[str, Any]:
        """Return each method's outcome; without a prompt only the names."""
        if self._methods is None:
            self._methods = self._make(model)
        if case is None:
            return dict.fromkeys(self._methods)
        full, outcomes = None, {}
        for name, method in {FULL: full_cache(model), **self._methods}.items():
            measured = measure(model, self._tokenizer, method, case, full)
            outcomes[name] = measured.outcome
            full = full or measured
            advance(1)
        return outcomes

    def names(self, engine: Engine) -> list[str]:
        """Return the names of the methods.

        Raises
        ------
        InputError
            If a method has the full cache's name, or cannot be made for the model.
        """
        names = [*result_of(engine, self)]
        if FULL in names:
            raise InputError(f"a method cannot be called {FULL!r}; give it another name")
        return names


def evaluate(
    model: PreTrainedModel | Engine,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[tuple[Task, Sequence[Case]]],
    methods: Mapping[str, Method] | CaseWork,
    *,
    context: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Score]:
    """Run every method on the same prompts of every task.

    Parameters
    ----------
    model : PreTrainedModel or Engine
        Workers share the prompts; see `kvalloc.engine.ray.RayEngine`.
    tasks : sequence of (Task, cases)
    methods : mapping of str to Method, or CaseWork
        For workers a CaseWork.
    context : int
        Longest prompt, tokens; for the rows.
    progress : callable
        Called with numbers of done and all pairs of prompt and method.

    Returns
    -------
    list of Score
        The full cache first for each task.

    Raises
    ------
    InputError
        If a method has the full cache's name, or a prompt kills its worker repeatedly.
    """
    engine = engine_of(model)
    work = methods
    if not isinstance(work, CaseWork):
        named = work
        work = CaseWork(tokenizer, lambda _: named)
    names = work.names(engine)
    cases = [(task, case) for task, of_task in tasks for case in of_task]
    steps = Steps(len(cases) * (1 + len(names)), progress)
    items = {number: case for number, (_, case) in enumerate(cases)}
    outcomes: dict[int, dict[str, Outcome]] = {}
    for number, result in engine.run(work, items, steps.advance):
        if isinstance(result, Failed):
            task, case = cases[number]
            if isinstance(result.error, SampleError):
                raise InputError(f"{case.source or task.name}, prompt {number}: {result.reason}")
            raise result.error
        outcomes[number] = result
    in_order = iter(outcomes[number] for number in sorted(outcomes))
    scores: list[Score] = []
    for task, of_task in tasks:
        by_prompt = [next(in_order) for _ in of_task]
        scores += [
            Score(
                name=name,
                task=task.name,
                context=context,
                outcomes=tuple(outcome[name] for outcome in by_prompt),
            )
            for name in (FULL, *names)
        ]
    return scores


@dataclass(frozen=True, kw_only=True)
class ReadTurn:
    """One turn with one cache.

    Attributes
    ----------
    answer : Answer
    continuation_ids : tuple of int, (n_continuation,)
        The text's continuation, or the full cache's answer.
    logits : Tensor of float32, (n_predictions, vocabulary)
        Predictions of the continuation, except by the prompt's prefill.
    """

    answer: Answer
    continuation_ids: tuple[int, ...]
    logits: Tensor

    @property
    def exact_tokens(self) -> int:
        """Number of continuation tokens that the prompt's prefill predicted."""
        return len(self.continuation_ids) - len(self.logits)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Turns, (n_turns,), and outcome of one cache on one prompt."""

    turns: tuple[ReadTurn, ...]
    outcome: Outcome


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    case: Case,
    full: Measured | None = None,
    *,
    answers: bool = True,
) -> Measured:
    """Answer one prompt with a method's cache, and compare to the full cache's answer.

    Parameters
    ----------
    full : Measured, optional
        Result of the full cache; None to measure the full cache.
    answers : bool
        See `read_turns`.
    """
    compressed = method.compress(model, case.input_ids)
    yardstick = None if full is None else full.turns
    turns = read_turns(compressed, tokenizer, case, yardstick, answers=answers)
    outcome = _outcome(case, compressed, turns, full)
    return Measured(turns=tuple(turns), outcome=outcome)


def read_turns(
    compressed: Compressed,
    tokenizer: PreTrainedTokenizerBase,
    case: Case,
    yardstick: Sequence[ReadTurn] | None = None,
    *,
    answers: bool = True,
) -> list[ReadTurn]:
    """Answer every turn greedily on a copy, and read the full cache's answer.

    Parameters
    ----------
    compressed : Compressed
        Grows by the questions and the full cache's answers.
    yardstick : sequence of ReadTurn, optional
        Turns of the full cache; None to read them with it.
    answers : bool
        Whether turns with a yardstick are answered, too.
    """
    turns: list[ReadTurn] = []
    unread: tuple[int, ...] = ()
    for number, turn in enumerate(case.turns):
        question = unread + turn.question_ids
        answer = Answer(text="", ids=(), decode_seconds=0.0)
        if yardstick is None or (answers and turn.measured):
            answer = answer_greedily(
                compressed.fork(),
                tokenizer,
                question,
                turn.max_new_tokens,
                first_line=turn.first_line,
            )
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
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def _outcome(
    case: Case,
    compressed: Compressed,
    turns: Sequence[ReadTurn],
    full: Measured | None,
) -> Outcome:
    kls, agrees, scores, matches, nlls = [], [], [], [], []
    rights = turns if full is None else full.turns
    for turn, read, right in zip(case.turns, turns, rights, strict=True):
        if not turn.measured:
            continue
        compared = divergence(right.logits, read.logits) if len(read.logits) else None
        exact = [None] * read.exact_tokens
        kls.append((*exact, *(compared.kls if compared else ())))
        agrees.append((*exact, *(compared.agrees if compared else ())))
        if read.answer.ids:
            scores.append(turn.score(read.answer.text))
            matches.append(float(turn.is_found(read.answer.text)) if turn.answers else None)
        if turn.continuation_ids and len(read.logits):
            nlls.append(_nll(read.logits, turn.continuation_ids[-len(read.logits) :]))
    return Outcome(
        answers=tuple(read.answer.text for read in turns),
        kls=tuple(kls),
        agrees=tuple(agrees),
        nll=_mean_or_none(nlls),
        score=_mean_or_none(known(scores)),
        exact_match=_mean_or_none(known(matches)),
        retained_bytes=compressed.stored_bytes,
        full_bytes=compressed.kept_bytes if full is None else full.outcome.full_bytes,
        kept_bytes=compressed.kept_bytes,
        bytes_at_16_bits=compressed.bytes_at_16_bits,
        full_bytes_at_16_bits=(
            compressed.bytes_at_16_bits if full is None else full.outcome.bytes_at_16_bits
        ),
        prefill_seconds=compressed.prefill_seconds,
        decoded_tokens=sum(len(read.answer.ids) - 1 for read in turns if read.answer.ids),
        decode_seconds=sum(read.answer.decode_seconds for read in turns),
    )


def _nll(logits: Tensor, ids: Sequence[int]) -> float:
    import torch

    chosen = torch.tensor(list(ids), device="cpu")[:, None]
    return -float(logits.float().log_softmax(dim=-1).gather(-1, chosen).double().mean())


def _tokens_per_second(outcomes: Sequence[Outcome]) -> float | None:
    seconds = sum(outcome.decode_seconds for outcome in outcomes)
    return sum(outcome.decoded_tokens for outcome in outcomes) / seconds if seconds > 0 else None


def _mean_of_turns(turns: Sequence[Sequence[float | None]], positions: slice) -> float | None:
    """Return the mean over turns of known values' mean at some positions."""
    at = (known(turn[positions]) for turn in turns)
    return _mean_or_none([float(np.mean(turn)) for turn in at if turn])


def _mean_or_none(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
