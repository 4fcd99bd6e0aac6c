"""Variable tracking: all variables with a value, by chains of assignments in noise.

References
----------
C.-P. Hsieh et al., RULER (2024), Sec. 3.2: one chain of four hops, as here; further questions add
chains. For small models, the two examples are shorter, and all is running text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from string import ascii_uppercase

from kvalloc.prompts.examples import Draft, Question
from kvalloc.prompts.splits import coded_words
from kvalloc.prompts.tasks.magic_numbers import noise
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, by_rule

TEXT = "Memorize and track the chains of variable assignment hidden in the following text.\n\n"
QUESTION = Question(
    text="Question: Find all variables that are assigned the value {value} in the text above.",
    prefix="Answer: The variables that are assigned the value {value} are:",
    metric="all",
    first_line=True,
    max_new_tokens=48,
)
EXAMPLES = {
    "31416": "VAR QAB = 31416. The sky is blue. VAR KTI = VAR QAB. Here we go. VAR WUM = VAR KTI.",
    "27183": "VAR HEX = 27183. The grass is green. VAR JOL = VAR HEX. VAR PIR = VAR JOL.",
}
"""Short texts, by the value that is asked."""
VARIABLES = 5
"""Of a chain: the first one has a number, each other one the value of the one before."""
LETTERS = 5


def _example(value: str, text: str) -> str:
    question = QUESTION.filled(value=value)
    names = " ".join(re.findall(r"VAR (\w+) =", text))
    return f"{TEXT}{text}\n\n{question.text}\n{question.prefix} {names}\n\n"


LEAD = "".join(_example(*one) for one in EXAMPLES.items()) + TEXT


def _chains(brief: Brief) -> Draft:
    turns = brief.request.turns
    count = turns * VARIABLES
    names = coded_words(
        brief.draw, brief.request.split, count, letters=ascii_uppercase, length=LETTERS
    )
    values = brief.draw.sample(range(10_000, 100_000), turns)
    sentences, questions = [], []
    for turn, value in enumerate(values):
        chain = names[turn * VARIABLES :][:VARIABLES]
        sources = [str(value), *(f"VAR {name}" for name in chain[:-1])]
        sentences += [
            f"VAR {name} = {source}." for name, source in zip(chain, sources, strict=True)
        ]
        questions.append(QUESTION.filled(*chain, value=value))
    # Sorted within a chain: no variable is read before it has a value.
    depths = [
        depth for _ in values for depth in sorted(brief.draw.random() for _ in range(VARIABLES))
    ]
    hidden = (sentences, depths, questions)
    return replace(brief, source="noise").between(LEAD, noise(brief), *hidden, chat=False)


TASKS = (by_rule("vt", _chains, most_turns=MOST_TURNS),)
