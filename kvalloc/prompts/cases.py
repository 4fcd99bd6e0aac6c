"""Prompts that may be compressed, and later turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvalloc.errors import one_of
from kvalloc.prompts.metrics import METRICS, Metric

ANSWER_TOKENS = 16
"""Longest answer: a seven-digit number takes ten tokens of most vocabularies."""
LONG_ANSWER_TOKENS = 128
"""Longest free answer: many times the tokens that any method looks at before it evicts."""
POSITIONS = {
    **{"0-15": slice(0, 16), "16-63": slice(16, 64), "64-255": slice(64, 256)},
    **{"256-1023": slice(256, 1024), "1024-": slice(1024, None)},
}
"""Ranges of an answer's tokens with a KL of their own in reports, if an answer is that long."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Right answers, and their comparison with the model's.

    Attributes
    ----------
    answers, classes : tuple of str
        Right answers, and labels for classification.
    metric : str
        See `kvalloc.prompts.metrics.METRICS`.
    first_line : bool
        Whether only the answer's first line counts.
    max_new_tokens : int
    """

    answers: tuple[str, ...] = ()
    metric: str = "contains"
    classes: tuple[str, ...] = ()
    first_line: bool = False
    max_new_tokens: int = ANSWER_TOKENS

    def score(self, answer: str) -> float | None:
        """Return the metric's score, 0..1; None without a right answer."""
        if not self.answers:
            return None
        return self._metric.score(self._counts(answer), self.answers, self.classes)

    def is_found(self, answer: str) -> bool:
        """Return whether an answer contains a right one, or all if all are needed."""
        enough = all if self._metric.needs_all else any
        counts = self._counts(answer)
        return enough(self._metric.holds(counts, right) for right in self.answers)

    @property
    def _metric(self) -> Metric:
        return one_of("metric", self.metric, METRICS)

    def _counts(self, answer: str) -> str:
        return answer.strip().split("\n")[0].strip() if self.first_line else answer


@dataclass(frozen=True, kw_only=True)
class Turn(Expected):
    """Question to a compressed prompt, or text after it.

    Attributes
    ----------
    question_ids : tuple of int, (n_question,)
        Empty if the prompt ends with it.
    continuation_ids : tuple of int, (n_continuation,)
        Empty if the full cache's answer is the reference.
    begun_tokens : int
        Last given tokens, which begin the answer.
    measured : bool
        False for a turn that only moves the next ones.
    """

    question_ids: tuple[int, ...] = ()
    continuation_ids: tuple[int, ...] = ()
    begun_tokens: int = 0
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt and its turns.

    Attributes
    ----------
    input_ids : tuple of int, (n_tokens,)
    turns : tuple of Turn
        Before each, every cache reads the full cache's earlier answers.
    source : str
        Name of its text.
    """

    input_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    source: str = ""

    @cached_property
    def n_tokens(self) -> int:
        """Length of prompt and questions, tokens."""
        return len(self.input_ids) + sum(len(turn.question_ids) for turn in self.turns)

    @cached_property
    def longest_tokens(self) -> int:
        """Largest number of tokens with answers."""
        answers = sum(max(len(t.continuation_ids), t.max_new_tokens) for t in self.turns)
        return self.n_tokens + answers
