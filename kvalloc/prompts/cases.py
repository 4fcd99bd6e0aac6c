"""Cases: a prompt that may be compressed, and the turns that follow it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvalloc.errors import one_of
from kvalloc.prompts.metrics import METRICS, Metric, contained

ANSWER_TOKENS = 16
"""Longest answer: a seven-digit number takes ten tokens of most vocabularies."""
LONG_ANSWER_TOKENS = 128
"""Longest free answer: many times the tokens that any method looks at before it evicts."""
POSITIONS = {"0-15": slice(0, 16), "16-63": slice(16, 64), "64-255": slice(64, 256)}
"""Pieces of an answer whose KL is reported by itself."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Which answers are right, and how what the model writes is held against them.

    Attributes
    ----------
    answers : tuple of str
        Right answers, any of which counts; empty if there is no question.
    metric : str
        See `kvalloc.prompts.metrics.METRICS`.
    classes : tuple of str
        All labels there are, for the metric of classification.
    first_line : bool
        Whether only the first line of what the model writes counts.
    max_new_tokens : int
        Longest answer, tokens.
    """

    answers: tuple[str, ...] = ()
    metric: str = "contains"
    classes: tuple[str, ...] = ()
    first_line: bool = False
    max_new_tokens: int = ANSWER_TOKENS

    def score(self, answer: str) -> float | None:
        """Return the score of an answer by the metric, 0..1; None if there is no right answer."""
        if not self.answers:
            return None
        return self._metric.score(self._counts(answer), self.answers, self.classes)

    def is_found(self, answer: str) -> bool:
        """Whether a right answer stands in what the model wrote, letter case aside.

        All of them, where the metric asks for all.
        """
        every = all if self._metric.every else any
        return every(contained(self._counts(answer), right) for right in self.answers)

    @property
    def _metric(self) -> Metric:
        return one_of("metric", self.metric, METRICS)

    def _counts(self, answer: str) -> str:
        return answer.strip().split("\n")[0].strip() if self.first_line else answer


@dataclass(frozen=True, kw_only=True)
class Turn(Expected):
    """One question to a compressed prompt, or the text that follows it.

    Attributes
    ----------
    question_ids : tuple of int, (n_question,)
        What is read after the compression, before the answer; empty where the prompt itself ends
        with the question.
    continuation_ids : tuple of int, (n_continuation,)
        What really follows; empty where the full cache's own answer is the yardstick.
    begun_tokens : int
        Last tokens of what is read first that begin the answer, such as "The number is".
    measured : bool
        False for one that is only there so that others come in later turns.
    """

    question_ids: tuple[int, ...] = ()
    continuation_ids: tuple[int, ...] = ()
    begun_tokens: int = 0
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt and the turns about it.

    Attributes
    ----------
    input_ids : tuple of int, (n_tokens,)
        What is compressed.
    turns : tuple of Turn
        In order. Before each one every cache reads the full cache's answers to the earlier ones,
        so that all caches read the same.
    source : str
        What it was made of, for messages and result files.
    """

    input_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    source: str = ""

    @cached_property
    def n_tokens(self) -> int:
        """Length of the prompt and of all questions, tokens."""
        return len(self.input_ids) + sum(len(turn.question_ids) for turn in self.turns)

    @cached_property
    def longest_tokens(self) -> int:
        """Most tokens that reading and answering it may take."""
        answers = sum(max(len(t.continuation_ids), t.max_new_tokens) for t in self.turns)
        return self.n_tokens + answers
