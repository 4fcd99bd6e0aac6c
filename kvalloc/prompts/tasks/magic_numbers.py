"""RULER's needles: numbers in noise, among other keys' numbers, or in real text.

References
----------
C.-P. Hsieh et al., RULER (2024), Sec. 3.1 and App. B: single, multi-keys, multi-values and
multi-queries NIAH. Here keys are words of the split, numbers have seven digits, texts are shipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvalloc.prompts.examples import Draft, Question
from kvalloc.prompts.tasks.needles import listing
from kvalloc.prompts.tasks.pairs import word_keys
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, by_rule

LEAD = (
    "Some special magic numbers are hidden within the following text. Memorize them. You will be "
    "asked about the numbers afterwards.\n\n"
)
NEEDLE = "One of the special magic numbers for {key} is: {number}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ONE = Question(
    text="What is the special magic number for {keys} mentioned in the provided text?",
    prefix="The special magic number for {keys} mentioned in the provided text is",
)
SEVERAL = Question(
    text="What are all the special magic numbers for {keys} mentioned in the provided text?",
    prefix="The special magic numbers for {keys} mentioned in the provided text are",
    metric="all",
    max_new_tokens=128,
)
N_ANSWERS = 4
"""Numbers of one key, or keys of one question."""
TOKENS_PER_SENTENCE = 10
"""Noise and needles have more words than this."""


def noise(brief: Brief) -> list[str]:
    """Return more pieces of noise than fit into a prompt."""
    return [NOISE] * (brief.request.n_tokens // TOKENS_PER_SENTENCE + 1)


def _magic(haystack: str, *, n_keys: int = 1, n_values: int = 1) -> Callable[[Brief], Draft]:
    """Return the recipe for ``n_keys`` keys with ``n_values`` numbers each."""

    def recipe(brief: Brief) -> Draft:
        turns, n_tokens = brief.request.turns, brief.request.n_tokens
        n_distractors = n_tokens // TOKENS_PER_SENTENCE + 1 if haystack == "needles" else 0
        keys = word_keys(brief, turns * n_keys + n_distractors)
        targets, distractors = keys[: turns * n_keys], keys[turns * n_keys :]
        owners = [key for key in targets for _ in range(n_values)] + distractors
        secrets = brief.draw.sample(range(1_000_000, 10_000_000), len(owners))
        needles = [
            NEEDLE.format(key=key, number=number)
            for key, number in zip(owners, secrets, strict=True)
        ]
        n_answers = n_keys * n_values
        n_hidden = turns * n_answers
        question = SEVERAL if n_answers > 1 else ONE
        questions = [
            question.filled(
                *map(str, secrets[turn * n_answers : (turn + 1) * n_answers]),
                keys=listing(targets[turn * n_keys : (turn + 1) * n_keys]),
            )
            for turn in range(turns)
        ]
        hidden = (needles[:n_hidden], brief.depths(n_hidden), questions)
        if haystack == "text":
            return brief.scattered(LEAD, *hidden)
        pieces = needles[n_hidden:] or noise(brief)
        return replace(brief, source=haystack).between(LEAD, pieces, *hidden)

    return recipe


TASKS = (
    by_rule("niah_single", _magic("noise"), most_turns=MOST_TURNS),
    by_rule("niah_multikey", _magic("needles"), most_turns=MOST_TURNS),
    by_rule("niah_multivalue", _magic("text", n_values=N_ANSWERS), most_turns=MOST_TURNS),
    by_rule("niah_multiquery", _magic("text", n_keys=N_ANSWERS), most_turns=MOST_TURNS),
)
