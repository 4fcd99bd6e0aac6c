"""Questions about a text: scattered facts, and the whole text."""

from __future__ import annotations

from dataclasses import replace

from kvalloc.data import words
from kvalloc.prompts.examples import Draft, Question
from kvalloc.prompts.splits import belongs
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, by_rule

WRITTEN = {
    "towns": "{name} was born in {fact}.",
    "jobs": "{name} earned a living as a {fact}.",
    "pets": "{name} kept a {fact} at home.",
}
"""Sentence about a person, by the word list of its fact."""
QUESTIONS = {
    kind: Question(text=text, prefix=prefix, first_line=True, max_new_tokens=8)
    for kind, text, prefix in (
        ("towns", "In which town was {name} born?", "{name} was born in"),
        ("jobs", "What was the profession of {name}?", "{name} worked as a"),
        ("pets", "Which animal did {name} own?", "{name} owned a"),
    )
}

LEAD = "Read the text and remember what it says about each person.\n\n"
PEOPLE = 4
OWN_LEAD = "Read the text.\n\n"
OWN_QUESTION = Question(text="Tell in your own words, and in detail, what the text says.")


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
    # Facts with a question come first in the list, and so at the depth of the brief.
    questions = tuple(
        QUESTIONS[kind].filled(facts[kind, name], name=name)
        for kind, name in known[: brief.request.turns]
    )
    return brief.scattered(LEAD, sentences, brief.depths(len(known)), questions)


def _without_answer(brief: Brief) -> Draft:
    """Return a question without a right answer."""
    question = replace(OWN_QUESTION, max_new_tokens=brief.request.answer_tokens)
    return brief.scattered(OWN_LEAD, (), (), (question,))


TASKS = (
    by_rule("qa", _facts, most_turns=MOST_TURNS),
    by_rule("own", _without_answer),
)
