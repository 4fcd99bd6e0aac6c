"""Needles: numbers hidden in real text, and questions that only they answer."""

from __future__ import annotations

from collections.abc import Callable

from kvalloc.errors import InputError
from kvalloc.prompts.examples import Question
from kvalloc.prompts.splits import KEYS
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, Draft, by_rule

LEAD = "Read the text and remember what it says.\n\n"
NEEDLE = "The secret number of the {key} is {number}."
QUESTION = Question(
    text="What is the secret number of the {key}? Answer with the number only.",
    prefix="The secret number of the {key} is",
)
MANY = 8
"""Needles of the task with many keys: all alike but for key and number."""


def hidden_number(key: str, number: str) -> tuple[str, Question]:
    """The sentence that is hidden, and the question that it answers."""
    return NEEDLE.format(key=key, number=number), QUESTION.filled(number, key=key)


def _needles(least_hidden: int) -> Callable[[Brief], Draft]:
    def recipe(brief: Brief) -> Draft:
        n_hidden = max(least_hidden, brief.request.turns)
        lowered = brief.text.casefold()
        free = [key for key in KEYS[brief.request.split] if key not in lowered]
        if len(free) < n_hidden:
            raise InputError(f"the text {brief.source} holds too many keys; use another one")
        hidden = [
            hidden_number(key, str(brief.draw.randrange(1_000_000, 10_000_000)))
            for key in brief.draw.sample(free, n_hidden)
        ]
        # The asked ones first, spread over the text from the depth of the first one on.
        depths = [(brief.depth + place / n_hidden) % 1.0 for place in range(n_hidden)]
        sentences, questions = zip(*hidden, strict=True)
        return brief.scattered(LEAD, sentences, depths, questions[: brief.request.turns])

    return recipe


TASKS = (
    by_rule("needle", _needles(1), most_turns=MOST_TURNS),
    by_rule("needle-keys", _needles(MANY), most_turns=MOST_TURNS),
)
