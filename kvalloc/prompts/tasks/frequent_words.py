"""Aggregation: the words that are most frequent in a long list.

References
----------
C.-P. Hsieh et al., RULER (2024), Sec. 3.3: common words (cwe) and frequent words (fwe). Here a
prompt is long from 8,192 tokens (RULER's code: 4,096). Words are the split's, the example before
the list is shorter.
"""

from __future__ import annotations

import math
from string import ascii_lowercase

from kvalloc.prompts.examples import Draft, Example, Question
from kvalloc.prompts.splits import coded_words
from kvalloc.prompts.tasks.pairs import word_keys
from kvalloc.prompts.tasks.task import Brief, by_rule

COMMON_TEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n\n"
)
COMMON_QUESTION = Question(
    text="Question: What are the {count} most common words in the above list?",
    prefix="Answer: The top {count} words that appear most often in the list are:",
    metric="all",
    first_line=True,
    max_new_tokens=120,
)
COMMON = 10
LONG_TOKENS = 8192
"""From this length on, words occur 30 and 3 times; in shorter prompts 6 times and once."""

CODED_TEXT = (
    "Read the following coded text and track the frequency of each coded word. Ignore the dots.\n\n"
)
CODED_QUESTION = Question(
    text="Question: What are the three most frequently appeared words in the above coded text?",
    prefix="Answer: The three most frequently appeared words in the coded text are:",
    metric="all",
    first_line=True,
    max_new_tokens=50,
)
DOTS = "..."
"""Most frequent word of the coded text, which the answer leaves out."""
EXPONENT = 2.0
"""Exponent of the zeta distribution, with the sum pi^2 / 6."""
MIN_WORDS = 60
"""Fewest words of a coded text with different frequencies of its third and fourth word."""


def _example(lead: str, words: str, question: Question) -> str:
    answer = " ".join(question.answers)
    return f"{lead}{words}\n\n{question.text}\n{question.prefix} {answer}\n\n{lead}"


COMMON_LEAD = _example(
    COMMON_TEXT,
    "1. tea 2. oak 3. bus 4. tea 5. oak 6. sun 7. tea 8. oak 9. ink 10. tea",
    COMMON_QUESTION.filled("tea", "oak", count=2),
)
CODED_LEAD = _example(
    CODED_TEXT,
    "... qab kti ... qab wum ... hex ... kti wum qab ... ... kti qab ... wum kti qab",
    CODED_QUESTION.filled("qab", "kti", "wum"),
)


def _common(brief: Brief) -> Draft:
    n_tokens = brief.request.n_tokens
    often, seldom = (30, 3) if n_tokens >= LONG_TOKENS else (6, 1)
    words = word_keys(brief, COMMON + n_tokens // (2 * seldom))
    common, rare = words[:COMMON], words[COMMON:]
    places = [
        [brief.draw.random() for _ in range(seldom if n >= COMMON else often)]
        for n in range(len(words))
    ]

    def make(size: int) -> Example:
        listed = zip([*common, *rare[:size]], places, strict=False)
        ordered = sorted((place, word) for word, places_of in listed for place in places_of)
        text = " ".join(f"{n}. {word}" for n, (_, word) in enumerate(ordered, start=1))
        questions = (COMMON_QUESTION.filled(*common, count=COMMON),)
        return Example(context=COMMON_LEAD + text, questions=questions, source="words", chat=False)

    return Draft(make=make, min_items=COMMON, max_items=len(rare))


def _frequent(brief: Brief) -> Draft:
    n_tokens = brief.request.n_tokens
    n_words = math.isqrt(n_tokens) + 5  # rarer ones would occur less than once
    split, letters = brief.request.split, ascii_lowercase
    words = [DOTS, *coded_words(brief.draw, split, n_words, letters=letters, length=6)]
    shares = [6 / math.pi**2 / rank**EXPONENT for rank in range(1, len(words) + 1)]
    places = [[brief.draw.random() for _ in range(int(share * n_tokens))] for share in shares]

    def make(size: int) -> Example:
        counts = (int(share * size) for share in shares)
        counted = zip(words, places, counts, strict=True)
        ordered = sorted((place, word) for word, at, n in counted for place in at[:n])
        text = " ".join(word for _, word in ordered)
        questions = (CODED_QUESTION.filled(*words[1:4]),)
        return Example(context=CODED_LEAD + text, questions=questions, source="codes", chat=False)

    return Draft(make=make, min_items=MIN_WORDS, max_items=n_tokens)


TASKS = (by_rule("cwe", _common), by_rule("fwe", _frequent))
