"""Key-value retrieval: the value of one random key among many.

References
----------
N. F. Liu et al., Lost in the Middle (2023), Sec. 3.
"""

from __future__ import annotations

from kvalloc.evaluate.examples import Example, Question
from kvalloc.evaluate.tasks.task import MOST_TURNS, Draft, Room, Task, by_rule

LEAD = "Here are keys and their values.\n\n"
QUESTION = "What is the value of the key {key}?"
PREFIX = "The value of the key {key} is"
LEAST_PAIRS = 2


def _pairs(room: Room) -> Draft:
    pairs: dict[str, str] = {}
    while len(pairs) < room.n_tokens // 4 + room.turns:  # more than can fit
        pairs[f"{room.draw.randrange(16**6):06x}"] = str(room.draw.randrange(10_000, 100_000))
    listed = list(pairs.items())

    def make(size: int) -> Example:
        places = [
            int(((room.depth + turn / room.turns) % 1.0) * size) for turn in range(room.turns)
        ]
        lines = "\n".join(f"{key}: {value}" for key, value in listed[:size])
        questions = tuple(
            Question(
                text=QUESTION.format(key=listed[place][0]),
                prefix=PREFIX.format(key=listed[place][0]),
                answers=(listed[place][1],),
            )
            for place in places
        )
        return Example(context=f"{LEAD}{lines}", questions=questions, source="random pairs")

    return Draft(make=make, least=max(LEAST_PAIRS, room.turns), most=len(listed))


PAIRS_TASK = Task(
    name="pairs",
    summary="the value of one key among many (key-value retrieval)",
    build=by_rule("pairs", _pairs),
    most_turns=MOST_TURNS,
)
