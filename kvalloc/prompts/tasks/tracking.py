"""Variable tracking: which variables hold a value, over chains of assignments in real text.

References
----------
C.-P. Hsieh et al., RULER (2024), Sec. 3 and App. B (one chain of four hops by default there).
"""

from __future__ import annotations

import string

from kvalloc.prompts.examples import Question
from kvalloc.prompts.tasks.task import Brief, Draft, by_rule

LEAD = "The text below assigns values to variables. Keep track of them.\n\n"
QUESTION = Question(
    text="Which variables are assigned the value {value}? Name all of them.",
    prefix="The variables that are assigned the value {value} are",
    metric="all",
    max_new_tokens=24,
)
CHAINS = 2
HOPS = 2
"""Assignments of a variable to the next one; a small model gets nowhere with RULER's four."""


def _tracking(brief: Brief) -> Draft:
    names: list[str] = []
    while len(names) < CHAINS * (HOPS + 1):
        name = "".join(brief.draw.choices(string.ascii_uppercase, k=3))
        if name not in names and name.casefold() not in brief.text.casefold():
            names.append(name)
    values = brief.draw.sample(range(10_000, 100_000), CHAINS)
    chains = [names[chain::CHAINS][: HOPS + 1] for chain in range(CHAINS)]
    sentences, depths = [], []
    for chain, value in zip(chains, values, strict=True):
        shown = [str(value), *(f"VAR {name}" for name in chain[:-1])]
        sentences += [f"VAR {n} = {held}." for n, held in zip(chain, shown, strict=True)]
        depths += sorted(brief.draw.random() for _ in chain)
    question = QUESTION.filled(*chains[0], value=values[0])
    return brief.scattered(LEAD, sentences, depths, [question])


TASKS = (by_rule("tracking", _tracking),)
