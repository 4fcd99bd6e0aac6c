"""Key-value retrieval: the value of one key among as many as fit.

References
----------
N. F. Liu et al., Lost in the Middle (2023), Sec. 3: random identifiers in a JSON object. Keys are
words here, and some pairs are shown again before the one that is asked for: a small model takes
one random identifier for another, and does not know what is wanted of it unless it is shown.
"""

from __future__ import annotations

from kvalloc.prompts.examples import Example, Question
from kvalloc.prompts.tasks.extraction import plain_words
from kvalloc.prompts.tasks.task import MOST_TURNS, Draft, Room, Task, by_rule

LEAD = "Here are keys and their values.\n\n"
AGAIN = "Some of the keys again, each with its value:\n\n"
SHOWN = 3
"""Pairs that are shown again before the first question."""
TOKENS_PER_PAIR = 2
"""Not even a vocabulary of whole words takes fewer."""
VALUES = range(10_000, 100_000)


def _pairs(room: Room) -> Draft:
    most = min(room.n_tokens // TOKENS_PER_PAIR + room.turns + SHOWN, len(VALUES))
    values = room.draw.sample(VALUES, most)
    listed = [f"{key}: {value}" for key, value in zip(_keys(room, most), values, strict=True)]

    def make(size: int) -> Example:
        asked = [int((room.depth + turn / room.turns) % 1.0 * size) for turn in range(room.turns)]
        others = [place for place in range(size) if place not in asked]
        shown = [others[(2 * n + 1) * len(others) // (2 * SHOWN)] for n in range(SHOWN)]
        again = AGAIN + "\n".join(listed[place] for place in shown)
        questions = tuple(
            Question(
                text="" if turn else again,
                prefix=f"{listed[place].partition(':')[0]}:",
                answers=(str(values[place]),),
                first_line=True,
                max_new_tokens=7,
            )
            for turn, place in enumerate(asked)
        )
        context = LEAD + "\n".join(listed[:size])
        return Example(context=context, questions=questions, source="random pairs", chat=False)

    return Draft(make=make, least=room.turns + SHOWN, most=most)


def _keys(room: Room, count: int) -> list[str]:
    """Words of the split, and two words where there are no more of one."""
    words = plain_words(room.split)
    keys = dict.fromkeys(room.draw.sample(words, min(count, len(words))))
    while len(keys) < count:
        keys[" ".join(room.draw.sample(words, 2))] = None
    return list(keys)


PAIRS_TASK = Task(
    name="pairs",
    summary="the value of one key among as many as fit (key-value retrieval)",
    build=by_rule("pairs", _pairs),
    most_turns=MOST_TURNS,
)
