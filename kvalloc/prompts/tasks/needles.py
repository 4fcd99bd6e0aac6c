"""Needles: numbers hidden in real text, and questions about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvalloc.errors import InputError
from kvalloc.prompts.examples import Draft, Question
from kvalloc.prompts.splits import KEYS
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, by_rule

LEAD = "Read the text and remember what it says.\n\n"
NEEDLE = "The secret number of the {key} is {number}."
QUESTION = Question(
    text="What is the secret number of the {key}? Answer with the number only.",
    prefix="The secret number of the {key} is",
)
FACTS_QUESTION = Question(
    text="What are the secret numbers of {keys}? Answer with one sentence for each of them.",
    prefix="The secret number of the {key} is",
    metric="all",
)
FACTS = 4
"""Needles that one answer asks for."""
KEY_COUNT = 8
"""Needles of the task with many keys; they differ in key and number only."""


def listing(items: Sequence[str]) -> str:
    """Return items as words: ``a, b and c``."""
    *before, last = items
    return f"{', '.join(before)} and {last}" if before else last


def _needles(min_hidden: int, *, in_one: bool = False) -> Callable[[Brief], Draft]:
    """Return the recipe of hidden numbers, with a question for each or for all."""

    def recipe(brief: Brief) -> Draft:
        n_hidden = max(min_hidden, brief.request.turns)
        lowered = brief.text.casefold()
        free = [key for key in KEYS[brief.request.split] if key not in lowered]
        if len(free) < n_hidden:
            raise InputError(f"the text {brief.source} holds too many keys; use another one")
        keys = brief.draw.sample(free, n_hidden)
        hidden = [(key, str(brief.draw.randrange(1_000_000, 10_000_000))) for key in keys]
        sentences = [NEEDLE.format(key=key, number=number) for key, number in hidden]
        questions = [QUESTION.filled(number, key=key) for key, number in hidden]
        if in_one:
            listed = listing([f"the {key}" for key in keys])
            question = FACTS_QUESTION.filled(*dict(hidden).values(), keys=listed, key=keys[0])
            questions = [replace(question, max_new_tokens=brief.request.answer_tokens)]
        # Needles of questions come first, and so at the depth of the brief.
        of_turns = questions[: brief.request.turns]
        return brief.scattered(LEAD, sentences, brief.depths(n_hidden), of_turns)

    return recipe


TASKS = (
    by_rule("needle", _needles(1), most_turns=MOST_TURNS),
    by_rule("needle-keys", _needles(KEY_COUNT), most_turns=MOST_TURNS),
    by_rule("facts", _needles(FACTS, in_one=True)),
)
