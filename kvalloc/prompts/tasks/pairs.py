"""Key-value retrieval: one key's value among all that fit.

References
----------
N. F. Liu et al., Lost in the Middle (2023), Sec. 3: random identifiers in a JSON object. Here, for
small models, keys are words, and some pairs come again before the question.
"""

from __future__ import annotations

import re

from kvalloc.prompts.examples import Draft, Example, Question
from kvalloc.prompts.splits import Split, belongs, split_texts
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, by_rule

LEAD = "Here are keys and their values.\n\n"
EXAMPLES = "Some of the keys again, each with its value:\n\n"
SHOWN = 3
"""Pairs that are shown again before the first question."""
TOKENS_PER_PAIR = 2
"""Not even a vocabulary of whole words takes fewer."""
QUESTION = Question(text="{examples}", prefix="{key}:", first_line=True, max_new_tokens=7)
VALUES = range(10_000, 100_000)
_WORD = re.compile(r"\b[a-z]{5,8}\b")


def plain_words(split: Split) -> list[str]:
    """Return the English words that only this split's texts have."""
    words = set(_WORD.findall(" ".join(split_texts(split).values()).lower()))
    return sorted(word for word in words if belongs(word, split))


def _pairs(brief: Brief) -> Draft:
    turns = brief.request.turns
    max_items = min(brief.request.n_tokens // TOKENS_PER_PAIR + turns + SHOWN, len(VALUES))
    values = brief.draw.sample(VALUES, max_items)
    listed = [
        f"{key}: {value}" for key, value in zip(word_keys(brief, max_items), values, strict=True)
    ]

    def make(size: int) -> Example:
        places = [int(depth * size) for depth in brief.depths(turns)]
        free = [place for place in range(size) if place not in places]
        shown = [free[(2 * n + 1) * len(free) // (2 * SHOWN)] for n in range(SHOWN)]
        examples = EXAMPLES + "\n".join(listed[place] for place in shown)
        questions = tuple(
            QUESTION.filled(
                str(values[place]),
                examples="" if turn else examples,
                key=listed[place].partition(":")[0],
            )
            for turn, place in enumerate(places)
        )
        context = LEAD + "\n".join(listed[:size])
        return Example(context=context, questions=questions, source="random pairs", chat=False)

    return Draft(make=make, min_items=turns + SHOWN, max_items=max_items)


def word_keys(brief: Brief, count: int) -> list[str]:
    """Return different words of the split, then pairs if too few."""
    words = plain_words(brief.request.split)
    keys = dict.fromkeys(brief.draw.sample(words, min(count, len(words))))
    while len(keys) < count:
        keys[" ".join(brief.draw.sample(words, 2))] = None
    return list(keys)


TASKS = (by_rule("pairs", _pairs, most_turns=MOST_TURNS),)
