"""Questions about what is read: facts strewn into real text, its own sentences, all of it."""

from __future__ import annotations

import re
from dataclasses import replace

from kvalloc.data import words
from kvalloc.errors import InputError
from kvalloc.prompts.examples import Example, Question
from kvalloc.prompts.splits import belongs
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, Draft, by_rule

WRITTEN = {
    "towns": "{name} was born in {fact}.",
    "jobs": "{name} earned a living as a {fact}.",
    "pets": "{name} kept a {fact} at home.",
}
"""What is known of a person, by the word list of it."""
ASKED = {
    kind: Question(text=text, prefix=prefix, first_line=True, max_new_tokens=8)
    for kind, text, prefix in (
        ("towns", "In which town was {name} born?", "{name} was born in"),
        ("jobs", "What was the profession of {name}?", "{name} worked as a"),
        ("pets", "Which animal did {name} own?", "{name} owned a"),
    )
}

LEAD = "Read the text and remember what it says about each person.\n\n"
PEOPLE = 4
CLOZE_LEAD = "Read the text.\n\n"
CLOZE_QUESTION = Question(
    text="How does the text go on after these words? Quote it: {begin}",
    prefix="The text says: {begin}",
    metric="f1",
    max_new_tokens=12,
)
BEGIN_WORDS, ANSWER_WORDS = 9, 6

OWN_QUESTION = Question(text="Tell in your own words, and in detail, what the text says.")

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
    known = [(kind, name) for name in people for kind in WRITTEN]
    brief.draw.shuffle(known)
    facts = {one: brief.draw.choice(words(one[0])) for one in known}
    sentences = [WRITTEN[kind].format(name=name, fact=facts[kind, name]) for kind, name in known]
    # The asked ones come first in the list, and so at the depth that is wanted.
    depths = [(brief.depth + place / len(known)) % 1.0 for place in range(len(known))]
    questions = tuple(
        ASKED[kind].filled(facts[kind, name], name=name)
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
            CLOZE_QUESTION.filled(
                " ".join(sentence[BEGIN_WORDS:needed]), begin=" ".join(sentence[:BEGIN_WORDS])
            )
            for sentence in asked
        )
        text = " ".join(excerpt[:size])
        return Example(context=f"{CLOZE_LEAD}{text}", questions=questions, source=brief.source)

    return Draft(make=make, least=200, most=len(excerpt))


def _own(brief: Brief) -> Draft:
    """No answer is right: the full cache's own is what others are held against."""
    question = replace(OWN_QUESTION, max_new_tokens=brief.request.answer_tokens)
    return brief.scattered(CLOZE_LEAD, (), (), (question,))


TASKS = (
    by_rule("qa", _facts, most_turns=MOST_TURNS),
    by_rule("quote", _cloze, most_turns=MOST_TURNS),
    by_rule("own", _own),
)
