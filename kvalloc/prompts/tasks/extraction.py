"""Word extraction: the most common words of a list, the most frequent of coded words.

References
----------
C.-P. Hsieh et al., RULER (2024), Sec. 3 and App. B: ten common words of 30 occurrences among
others of 3, and the three most frequent of a zeta distribution with alpha 2. The lists here are
as long as the prompt allows, and three words are asked for in both.
"""

from __future__ import annotations

import re
import string
from dataclasses import replace

from kvalloc.prompts.examples import Example, Question
from kvalloc.prompts.splits import Split, belongs, split_texts
from kvalloc.prompts.tasks.task import Brief, Draft, by_rule

ASKED = 3
COMMON_SHARE = 6
"""One word in this many is the first, one the second, one the third of the common words."""
CODED_WORDS = 40
ZETA_ALPHA = 2.0

COMMON_LEAD = "Below is a numbered list of words. Some of them come again and again.\n\n"
COMMON_QUESTION = Question(
    text=f"What are the {ASKED} most common words of the list?",
    prefix=f"The {ASKED} most common words of the list are",
    metric="all",
    max_new_tokens=24,
)
FREQUENT_LEAD = "Below is a text of coded words. Some of them come again and again.\n\n"
FREQUENT_QUESTION = replace(
    COMMON_QUESTION,
    text=f"What are the {ASKED} most frequent coded words of the text?",
    prefix=f"The {ASKED} most frequent coded words are",
)

_WORD = re.compile(r"\b[a-z]{5,8}\b")


def plain_words(split: Split) -> list[str]:
    """English words of a split: of its texts, and of no other split by their checksum."""
    found = set(_WORD.findall(" ".join(split_texts(split).values()).lower()))
    return sorted(word for word in found if belongs(word, split))


def _common(brief: Brief) -> Draft:
    words = plain_words(brief.request.split)
    brief.draw.shuffle(words)
    common, rare = words[:ASKED], words[ASKED:]
    most = min(brief.request.n_tokens // 3, len(rare))
    order, asked = list(range(most)), (COMMON_QUESTION.filled(*common),)
    brief.draw.shuffle(order)

    def listed(place: int) -> str:
        kind = order[place] % COMMON_SHARE
        return common[kind] if kind < ASKED else rare[order[place]]

    def make(size: int) -> Example:
        # The same order whatever the size, so that a larger list is not shorter.
        lines = " ".join(f"{place + 1}. {listed(place)}" for place in range(size))
        return Example(context=f"{COMMON_LEAD}{lines}", questions=asked, source="words")

    return Draft(make=make, least=12 * COMMON_SHARE, most=most)


def _frequent(brief: Brief) -> Draft:
    coded: list[str] = []
    while len(coded) < CODED_WORDS:
        word = "".join(brief.draw.choices(string.ascii_lowercase, k=6))
        if word not in coded:
            coded.append(word)
    # Where each occurrence stands, drawn once: a larger text is not shorter.
    place = [
        [brief.draw.random() for _ in range(count)]
        for count in _zeta_counts(brief.request.n_tokens)
    ]
    asked = (FREQUENT_QUESTION.filled(*coded[:ASKED]),)

    def make(size: int) -> Example:
        standing = sorted(
            (place[rank][occurrence], rank)
            for rank, count in enumerate(_zeta_counts(size))
            for occurrence in range(count)
        )
        context = f"{FREQUENT_LEAD}{' '.join(coded[rank] for _, rank in standing)}"
        return Example(context=context, questions=asked, source="coded words")

    return Draft(make=make, least=60, most=brief.request.n_tokens)


def _zeta_counts(total: int) -> list[int]:
    weights = [rank**-ZETA_ALPHA for rank in range(1, CODED_WORDS + 1)]
    return [max(1, round(total * weight / sum(weights))) for weight in weights]


TASKS = (by_rule("common-words", _common), by_rule("frequent-words", _frequent))
