"""Key-value retrieval: one value of a JSON object of UUIDs.

References
----------
X. Zhang et al., InfiniteBench (2024), Retrieve.KV, after N. F. Liu et al., Lost in the Middle
(2023), Sec. 3. Here the answer begins with the key, as in the object.
"""

from __future__ import annotations

import json
from uuid import UUID

from kvalloc.prompts.examples import Draft, Example, Question
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, by_rule

LEAD = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
QUESTION = Question(
    text='Key: "{key}"\nThe value associated with the specified key is:',
    prefix='"{key}":',
    first_line=True,
    max_new_tokens=50,
)
TOKENS_PER_PAIR = 16
"""A pair takes more tokens in any vocabulary: two UUIDs of 32 digits in five groups."""


def _pairs(brief: Brief) -> Draft:
    turns = brief.request.turns
    max_items = brief.request.n_tokens // TOKENS_PER_PAIR + turns
    keys, values = (
        [str(UUID(int=brief.draw.getrandbits(128), version=4)) for _ in range(max_items)]
        for _ in range(2)
    )

    def make(size: int) -> Example:
        places = [int(depth * size) for depth in brief.depths(turns)]
        questions = tuple(QUESTION.filled(values[place], key=keys[place]) for place in places)
        text = json.dumps(dict(zip(keys[:size], values, strict=False)))
        return Example(
            context=f"{LEAD}{text}", questions=questions, source="random UUIDs", chat=False
        )

    return Draft(make=make, min_items=turns, max_items=max_items)


TASKS = (by_rule("kv_retrieval", _pairs, most_turns=MOST_TURNS),)
