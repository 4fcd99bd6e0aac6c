"""Word extraction: the most common words of a list.

References
----------
C.-P. Hsieh et al., RULER (2024), Sec. 3 and App. B: ten common words of 30 occurrences among
others of 3. The list here is as long as the prompt allows, with three common words.
"""

from __future__ import annotations

import re

from kvalloc.prompts.examples import Example, Question
from kvalloc.prompts.splits import Split, belongs, split_texts
from kvalloc.prompts.tasks.task import Brief, Draft, by_rule

ASKED = 3
COMMON_SHARE = 6
"""One word in this many is the first, one the second, one the third of the common words."""

COMMON_LEAD = "Below is a numbered list of words. Some of them come again and again.\n\n"
COMMON_QUESTION = Question(
    text=f"What are the {ASKED} most common words of the list?",
    prefix=f"The {ASKED} most common words of the list are",
    metric="all",
    max_new_tokens=24,
)
_WORD = re.compile(r"\b[a-z]{5,8}\b")


def plain_words(split: Split) -> list[str]:
    """Return the English words of a split's texts that are in no other split."""
    words = set(_WORD.findall(" ".join(split_texts(split).values()).lower()))
    return sorted(word for word in words if belongs(word, split))


def _common(brief: Brief) -> Draft:
    words = plain_words(brief.request.split)
    brief.draw.shuffle(words)
    common, rare = words[:ASKED], words[ASKED:]
    max_items = min(brief.request.n_tokens // 3, len(rare))
    order, questions = list(range(max_items)), (COMMON_QUESTION.filled(*common),)
    brief.draw.shuffle(order)

    def listed(place: int) -> str:
        kind = order[place] % COMMON_SHARE
        return common[kind] if kind < ASKED else rare[order[place]]

    def make(size: int) -> Example:
        # The same order whatever the size, so that a larger list is not shorter.
        lines = " ".join(f"{place + 1}. {listed(place)}" for place in range(size))
        return Example(context=f"{COMMON_LEAD}{lines}", questions=questions, source="words")

    return Draft(make=make, min_items=12 * COMMON_SHARE, max_items=max_items)


TASKS = (by_rule("common-words", _common),)
