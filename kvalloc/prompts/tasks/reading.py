"""Extractive question answering: facts strewn into real text, and its own sentences."""

from __future__ import annotations

import re

from kvalloc.data import words
from kvalloc.errors import InputError
from kvalloc.prompts.examples import Example, Question
from kvalloc.prompts.splits import belongs
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, Draft, by_rule

FACTS = {
    "towns": ("{name} was born in {fact}.", "In which town was {name} born?", "{name} was born in"),
    "jobs": (
        "{name} earned a living as a {fact}.",
        "What was the profession of {name}?",
        "{name} worked as a",
    ),
    "pets": ("{name} kept a {fact} at home.", "Which animal did {name} own?", "{name} owned a"),
}
"""What is known of a person, by the word list of it: how it is written, asked and answered."""

LEAD = "Read the text and remember what it says about each person.\n\n"
PEOPLE = 4
CLOZE_LEAD = "Read the text.\n\n"
CLOZE_QUESTION = "How does the text go on after these words? Quote it: {begin}"
BEGIN_WORDS, ANSWER_WORDS = 9, 6

_SENTENCE = re.compile(r"[A-Z][^.!?]*[.!?](?=\s|$)")


def _facts(brief: Brief) -> Draft:
    firsts = [name for name in words("first_names") if belongs(name, brief.request.split)]
    people = [
        f"{first} {last}"
        for first, last in zip(
            brief.draw.sample(firsts, min(PEOPLE, len(firsts))),
            brief.draw.sample(words("last_names"), min(PEOPLE, len(firsts))),
            strict=True,
        )
    ]
    known = [(kind, name) for name in people for kind in FACTS]
    brief.draw.shuffle(known)
    facts = {one: brief.draw.choice(words(one[0])) for one in known}
    sentences = [FACTS[kind][0].format(name=name, fact=facts[kind, name]) for kind, name in known]
    # The asked ones come first in the list, and so at the depth that is wanted.
    depths = [(brief.depth + place / len(known)) % 1.0 for place in range(len(known))]
    questions = tuple(
        Question(
            text=FACTS[kind][1].format(name=name),
            prefix=FACTS[kind][2].format(name=name),
            answers=(facts[kind, name],),
            first_line=True,
            max_new_tokens=8,
        )
        for kind, name in known[: brief.request.turns]
    )
    return brief.scattered(LEAD, sentences, depths, questions)


def _cloze(brief: Brief) -> Draft:
    excerpt = brief.excerpt_words()
    whole = " ".join(excerpt)
    needed = BEGIN_WORDS + ANSWER_WORDS

    def candidates(text: str) -> list[list[str]]:
        found = [match.group().split() for match in _SENTENCE.finditer(text)]
        return [
            sentence
            for sentence in found
            if len(sentence) >= needed and whole.count(" ".join(sentence[:BEGIN_WORDS])) == 1
        ]

    if len(candidates(whole)) < 2 * brief.request.turns:
        raise InputError(f"the text {brief.source} has too few long sentences; use another one")

    def make(size: int) -> Example:
        some = candidates(" ".join(excerpt[:size])) or candidates(whole)
        asked = [
            some[int(((brief.depth + turn / brief.request.turns) % 1.0) * len(some))]
            for turn in range(brief.request.turns)
        ]
        questions = tuple(
            Question(
                text=CLOZE_QUESTION.format(begin=" ".join(sentence[:BEGIN_WORDS])),
                prefix=f"The text says: {' '.join(sentence[:BEGIN_WORDS])}",
                answers=(" ".join(sentence[BEGIN_WORDS:needed]),),
                metric="f1",
                max_new_tokens=12,
            )
            for sentence in asked
        )
        text = " ".join(excerpt[:size])
        return Example(context=f"{CLOZE_LEAD}{text}", questions=questions, source=brief.source)

    return Draft(make=make, least=200, most=len(excerpt))


TASKS = (
    by_rule("qa", _facts, most_turns=MOST_TURNS),
    by_rule("quote", _cloze, most_turns=MOST_TURNS),
)
