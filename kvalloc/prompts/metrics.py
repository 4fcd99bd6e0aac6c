"""Metrics of answers against right ones: LongBench's, and more."""

from __future__ import annotations

import difflib
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvalloc.errors import InputError, option

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[, ](?=\d)")
_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CODE_NOISE = ("`", "#", "//")


def contained(answer: str, right: str, _: Sequence[str] = ()) -> bool:
    """Return whether an answer contains the right one, in any letter case.

    Commas and spaces in numbers do not count; longer numbers do not match.

    Examples
    --------
    >>> contained("It is 1,234.", "1234"), contained("It is 12345.", "1234")
    (True, False)
    """
    if right.isdigit():
        plain = _BETWEEN_DIGITS.sub("", answer)
        return re.search(rf"(?<!\d){right}(?!\d)", plain) is not None
    return right.casefold() in answer.casefold()


def f1(answer: str, right: str, _: Sequence[str] = ()) -> float:
    """Return the harmonic mean of precision and recall of words, 0..1.

    Words have counts, in lower case, without punctuation and English articles.

    References
    ----------
    P. Rajpurkar et al., SQuAD (2016), Sec. 6.1; LongBench's ``qa_f1_score``.
    """
    answer_words, right_words = _words(answer), _words(right)
    return _harmonic(
        (Counter(answer_words) & Counter(right_words)).total(), len(answer_words), len(right_words)
    )


def rouge_l(answer: str, right: str, _: Sequence[str] = ()) -> float:
    """Return the F1 of the longest common subsequence of words, 0..1.

    References
    ----------
    C.-Y. Lin, ROUGE (2004), Sec. 3; LongBench's ``rouge_score``. There ``rouge`` goes by sentences
    and counts repeated words once; here answers are one sequence.
    """
    answer_words, right_words = answer.split(), right.split()
    row = [0] * (len(right_words) + 1)
    for word in answer_words:
        diagonal = 0
        for place, other in enumerate(right_words, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return _harmonic(row[-1], len(answer_words), len(right_words))


def classification(answer: str, right: str, classes: Sequence[str]) -> float:
    """Return the share of the right label among all labels in the answer, 0..1.

    Labels within the right one do not count.

    References
    ----------
    LongBench's ``classification_score``.
    """
    named = [label for label in classes if label in answer]
    kept = [label for label in named if label == right or label not in right]
    return 1.0 / len(kept) if right in kept else 0.0


def edit_similarity(answer: str, right: str, _: Sequence[str] = ()) -> float:
    """Return the similarity of an answer's first line of code to the right one, 0..1.

    It is the first without a back-tick, ``#`` or ``//``, as in LongBench's ``code_sim_score``. The
    ratio, 2 M / T (`difflib.SequenceMatcher`), is not rounded as there (``fuzzywuzzy``).
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in _CODE_NOISE)), "")
    return difflib.SequenceMatcher(None, line, right, autojunk=False).ratio()


def retrieval(answer: str, right: str, _: Sequence[str] = ()) -> float:
    """Return the share of an answer's numbers that are the right paragraph's, 0..1.

    References
    ----------
    LongBench's ``retrieval_score``: the right answer must read "Paragraph N".
    """
    match = _PARAGRAPH.search(right)
    if match is None:
        raise InputError(
            f"the answer {right!r} is not 'Paragraph N', which the metric retrieval needs; "
            f"choose another {option('metric')}"
        )
    return _share_of_numbers(answer, match.group(1))


def count(answer: str, right: str, _: Sequence[str] = ()) -> float:
    """Return the share of the answer's numbers that are the right one, 0..1.

    References
    ----------
    LongBench's ``count_score``.
    """
    return _share_of_numbers(answer, right.strip())


def exact(answer: str, right: str, _: Sequence[str] = ()) -> float:
    """Return 1 for the right answer in any case, punctuation and articles, else 0."""
    return float(_words(answer) == _words(right))


def called(answer: str, right: str, _: Sequence[str] = ()) -> bool:
    """Return whether an answer makes the right calls of tools, and no others.

    Calls are JSON objects; ``name`` and ``arguments`` must be equal, types included. Order and
    other text do not count.

    References
    ----------
    S. G. Patil et al., Berkeley Function Calling Leaderboard (2025): calls are compared as parsed.

    Examples
    --------
    >>> right = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    >>> called('Sure: [{"name": "add", "arguments": {"b": 2, "a": 1}}]', right)
    True
    """
    if not (expected := _calls(right)):
        raise InputError(
            f"the answer {right!r} holds no JSON object with 'name' and 'arguments', which the "
            f"metric call needs; choose another {option('metric')}"
        )
    return _calls(answer) == expected


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A way to score an answer.

    Attributes
    ----------
    of : callable
        ``of(answer, right, classes)`` returns 0..1.
    needs_all : bool
        Whether all right answers are needed.
    holds : callable
        ``holds(answer, right)``: whether an answer contains a right one.
    """

    of: Callable[[str, str, Sequence[str]], float]
    needs_all: bool = False
    holds: Callable[[str, str], bool] = contained

    def score(self, answer: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
        """Return the best score against the right answers, or the mean if all are needed, 0..1."""
        scores = [float(self.of(answer, right, classes)) for right in answers]
        return sum(scores) / len(scores) if self.needs_all else max(scores)


METRICS = {
    "contains": Metric(of=contained),
    "all": Metric(of=contained, needs_all=True),
    "exact": Metric(of=exact),
    "f1": Metric(of=f1),
    "rouge-l": Metric(of=rouge_l),
    "classification": Metric(of=classification),
    "edit": Metric(of=edit_similarity),
    "retrieval": Metric(of=retrieval),
    "count": Metric(of=count),
    "call": Metric(of=called, holds=called),
}
"""The values of ``--metric``."""


def _calls(text: str) -> list[str]:
    """Return a text's calls, written alike and sorted."""
    decoder, calls, at = json.JSONDecoder(), [], -1
    while (at := text.find("{", at + 1)) >= 0:
        with suppress(ValueError, RecursionError):
            value, end = decoder.raw_decode(text, at)
            # A call may be nested in an object without these keys, so scanning goes on inside it.
            if value.keys() >= {"name", "arguments"}:
                calls.append(json.dumps([value["name"], value["arguments"]], sort_keys=True))
                at = end - 1
    return sorted(calls)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _harmonic(common: int, answer: int, right: int) -> float:
    return 2 * common / (answer + right) if common else 0.0


def _share_of_numbers(answer: str, right: str) -> float:
    stated = _NUMBER.findall(answer)
    return stated.count(right) / len(stated) if stated else 0.0
