"""Needles: numbers hidden in real text, and questions that only they answer."""

from __future__ import annotations

from collections.abc import Callable

from kvalloc.errors import InputError
from kvalloc.prompts.examples import Example, Question
from kvalloc.prompts.needle import ANSWER_PREFIX, NEEDLE, QUESTION
from kvalloc.prompts.splits import KEYS
from kvalloc.prompts.tasks.task import MOST_TURNS, Draft, Room, Task, by_rule, scatter

LEAD = "Read the text and remember what it says.\n\n"
MANY = 8
"""Needles of the task with many keys: all alike but for key and number."""


def _needles(least_hidden: int) -> Callable[[Room], Draft]:
    def recipe(room: Room) -> Draft:
        n_hidden = max(least_hidden, room.turns)
        lowered = room.text.casefold()
        free = [key for key in KEYS[room.split] if key not in lowered]
        if len(free) < n_hidden:
            raise InputError(f"the text {room.source} holds too many keys; use another one")
        keys = room.draw.sample(free, n_hidden)
        numbers = [str(room.draw.randrange(1_000_000, 10_000_000)) for _ in keys]
        # The asked ones first, spread over the text from the depth of the first one on.
        depths = [(room.depth + place / n_hidden) % 1.0 for place in range(n_hidden)]
        hidden = [NEEDLE.format(key=k, number=n) for k, n in zip(keys, numbers, strict=True)]
        words = room.excerpt_words()
        questions = tuple(
            Question(
                text=QUESTION.format(key=key),
                prefix=ANSWER_PREFIX.format(key=key),
                answers=(number,),
            )
            for key, number in zip(keys[: room.turns], numbers, strict=False)
        )

        def make(size: int) -> Example:
            text = scatter(" ".join(words[:size]), hidden, depths)
            return Example(context=f"{LEAD}{text}", questions=questions, source=room.source)

        return Draft(make=make, least=20, most=len(words))

    return recipe


NEEDLE_TASK = Task(
    name="needle",
    summary="a number hidden in real text",
    build=by_rule("needle", _needles(1)),
    most_turns=MOST_TURNS,
)
NEEDLE_KEYS_TASK = Task(
    name="needle-keys",
    summary=f"one of {MANY} numbers hidden in real text under different keys",
    build=by_rule("needle-keys", _needles(MANY)),
    most_turns=MOST_TURNS,
)
