"""How an answer is held against the right ones: LongBench's metrics, and two of our own."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvalloc.errors import InputError, option

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[, ](?=\d)")
_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CODE_NOISE = ("`", "#", "//")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A way to score an answer.

    Attributes
    ----------
    name : str
        What ``--metric`` takes.
    summary : str
        One line.
    of : callable
        ``of(said, right, classes)`` gives 0..1.
    every : bool
        Whether all right answers are wanted, not any of them.
    """

    name: str
    summary: str
    of: Callable[[str, str, Sequence[str]], float]
    every: bool = False

    def score(self, said: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
        """The best score against any right answer, or the mean where all are wanted, 0..1.

        Parameters
        ----------
        said : str
            What the model wrote.
        answers : sequence of str
            Right answers.
        classes : sequence of str
            All labels there are; only classification reads them.
        """
        scores = [self.of(said, right, classes) for right in answers]
        return sum(scores) / len(scores) if self.every else max(scores)


def contained(said: str, right: str) -> bool:
    """Whether the right answer stands in what was said, letter case aside.

    A right answer of digits is a number of its own: commas and spaces within a number do not
    count, and a longer number is no match.

    Examples
    --------
    >>> contained("It is 1,234.", "1234"), contained("It is 12345.", "1234")
    (True, False)
    """
    if right.isdigit():
        plain = _BETWEEN_DIGITS.sub("", said)
        return re.search(rf"(?<!\d){right}(?!\d)", plain) is not None
    return right.casefold() in said.casefold()


def f1(said: str, right: str) -> float:
    """Harmonic mean of precision and recall of words, 0..1.

    Words are compared in lower case, without punctuation and English articles, each as often as it
    stands there.

    References
    ----------
    P. Rajpurkar et al., SQuAD (2016), Sec. 6.1; LongBench's ``qa_f1_score``.

    Examples
    --------
    >>> f1("The big cat sat.", "a cat")  # 1 of 3 words right, 1 of 1 found
    0.5
    """
    return _f1(_words(said), _words(right))


def rouge_l(said: str, right: str) -> float:
    """F1 of the longest common subsequence of words, 0..1.

    References
    ----------
    C.-Y. Lin, ROUGE (2004), Sec. 3; LongBench's ``rouge_score``. There the package ``rouge`` goes
    sentence by sentence and counts repeated words once; here the answer is one sequence, in which
    every word counts.

    Examples
    --------
    >>> round(rouge_l("a b c d", "a c x"), 4)  # a c: 2 of 4 and 2 of 3
    0.5714
    """
    mine, theirs = said.split(), right.split()
    if not mine or not theirs:
        return 0.0
    row = [0] * (len(theirs) + 1)
    for word in mine:
        diagonal = 0
        for place, other in enumerate(theirs, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return _harmonic(row[-1] / len(mine), row[-1] / len(theirs))


def classification(said: str, right: str, classes: Sequence[str]) -> float:
    """Share of the right label among all labels that were said, 0..1.

    A label that is part of the right one does not count as another.

    References
    ----------
    LongBench's ``classification_score``.

    Examples
    --------
    >>> classification("city or country", "city", ["city", "country", "date"])
    0.5
    """
    named = [label for label in classes if label in said]
    kept = [label for label in named if label == right or label not in right]
    return 1.0 / len(kept) if right in kept else 0.0


def edit_similarity(said: str, right: str) -> float:
    r"""Similarity of the first line that is code to the right one, 0..1.

    The first line without a back-tick, ``#`` or ``//`` is what counts, as in LongBench's
    ``code_sim_score``. There the similarity is the rounded ratio of the package ``fuzzywuzzy``;
    that ratio, 2 M / T, is `difflib.SequenceMatcher`'s and is not rounded here.

    Examples
    --------
    >>> edit_similarity("# next\nreturn x + 1", "return x")
    0.8
    """
    lines = said.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in _CODE_NOISE)), "")
    return difflib.SequenceMatcher(None, line, right, autojunk=False).ratio()


def retrieval(said: str, right: str) -> float:
    """Share of the numbers said that are the right paragraph's, 0..1.

    References
    ----------
    LongBench's ``retrieval_score``: the right answer reads "Paragraph N".

    Examples
    --------
    >>> retrieval("Paragraph 7, not 12", "Paragraph 7")
    0.5
    """
    found = _PARAGRAPH.search(right)
    if found is None:
        raise InputError(
            f"the answer {right!r} is not 'Paragraph N', which the metric retrieval needs; "
            f"choose another {option('metric')}"
        )
    return _share_of_numbers(said, found.group(1))


def count(said: str, right: str) -> float:
    """Share of the numbers said that are the right one, 0..1.

    References
    ----------
    LongBench's ``count_score``.
    """
    return _share_of_numbers(said, right.strip())


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="contains",
            summary="1 where a right answer stands in what was said",
            of=lambda said, right, _: float(contained(said, right)),
        ),
        Metric(
            name="all",
            summary="share of the right answers that stand in what was said",
            of=lambda said, right, _: float(contained(said, right)),
            every=True,
        ),
        Metric(
            name="exact",
            summary="1 where it is a right answer, but for case, punctuation and articles",
            of=lambda said, right, _: float(_words(said) == _words(right)),
        ),
        Metric(name="f1", summary="F1 of words", of=lambda said, right, _: f1(said, right)),
        Metric(
            name="rouge-l",
            summary="F1 of the longest common subsequence of words",
            of=lambda said, right, _: rouge_l(said, right),
        ),
        Metric(
            name="classification",
            summary="share of the right label among the labels said",
            of=classification,
        ),
        Metric(
            name="edit",
            summary="similarity of the first line of code",
            of=lambda said, right, _: edit_similarity(said, right),
        ),
        Metric(
            name="retrieval",
            summary="share of the right paragraph among the numbers said",
            of=lambda said, right, _: retrieval(said, right),
        ),
        Metric(
            name="count",
            summary="share of the right number among the numbers said",
            of=lambda said, right, _: count(said, right),
        ),
    )
}
"""What ``--metric`` offers."""


def find_metric(name: str) -> Metric:
    """The metric of a name.

    Raises
    ------
    InputError
        If there is none; lists them.
    """
    if name not in METRICS:
        raise InputError(f"there is no metric {name!r}; choose from: {', '.join(METRICS)}")
    return METRICS[name]


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(said: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(said) & Counter(right)).values())
    if not common:
        return 0.0
    return _harmonic(common / len(said), common / len(right))


def _harmonic(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _share_of_numbers(said: str, right: str) -> float:
    numbers = _NUMBER.findall(said)
    return numbers.count(right) / len(numbers) if numbers else 0.0
