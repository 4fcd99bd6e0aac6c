"""Needles: numbers hidden in real text, and questions that only they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

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
FACTS_QUESTION = Question(
    text="What are the secret numbers of {keys}? Answer with one sentence for each of them.",
    prefix="The secret number of the {key} is",
    metric="all",
)
FACTS = 4
"""Needles that one answer asks for."""
MANY = 8
"""Needles of the task with many keys: all alike but for key and number."""


def hidden_number(key: str, number: str) -> tuple[str, Question]:
    """The sentence that is hidden, and the question that it answers."""
    return NEEDLE.format(key=key, number=number), QUESTION.filled(number, key=key)


def _needles(least_hidden: int, *, together: bool = False) -> Callable[[Brief], Draft]:
    def recipe(brief: Brief) -> Draft:
        n_hidden = max(least_hidden, brief.request.turns)
        lowered = brief.text.casefold()
        free = [key for key in KEYS[brief.request.split] if key not in lowered]
        if len(free) < n_hidden:
            raise InputError(f"the text {brief.source} holds too many keys; use another one")
        keys = brief.draw.sample(free, n_hidden)
        hidden = [
            hidden_number(key, str(brief.draw.randrange(1_000_000, 10_000_000))) for key in keys
        ]
        # The asked ones first, spread over the text from the depth of the first one on.
        depths = [(brief.depth + place / n_hidden) % 1.0 for place in range(n_hidden)]
        sentences, questions = zip(*hidden, strict=True)
        if together:
            questions = (_all_of(keys, questions, brief.request.answer_tokens),)
        return brief.scattered(LEAD, sentences, depths, questions[: brief.request.turns])

    return recipe


def _all_of(keys: Sequence[str], single: Sequence[Question], answer_tokens: int) -> Question:
    """One question for all numbers."""
    listed = ", ".join(f"the {key}" for key in keys[:-1]) + f" and the {keys[-1]}"
    answers = [answer for one in single for answer in one.answers]
    asked = FACTS_QUESTION.filled(*answers, keys=listed, key=keys[0])
    return replace(asked, max_new_tokens=answer_tokens)


TASKS = (
    by_rule("needle", _needles(1), most_turns=MOST_TURNS),
    by_rule("needle-keys", _needles(MANY), most_turns=MOST_TURNS),
    by_rule("facts", _needles(FACTS, together=True)),
)
