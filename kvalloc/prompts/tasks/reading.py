"""Extractive question answering: facts strewn into real text, and its own sentences."""

from __future__ import annotations

import re

from kvalloc.errors import InputError
from kvalloc.prompts.examples import Example, Question
from kvalloc.prompts.splits import belongs
from kvalloc.prompts.tasks.task import MOST_TURNS, Draft, Room, Task, by_rule, scatter

FIRST_NAMES = (
    "Alice", "Bruno", "Clara", "David", "Elena", "Felix", "Grace", "Hugo", "Irene", "Jonas",
    "Karla", "Louis", "Marta", "Nadia", "Oscar", "Paula", "Ralph", "Sofia", "Tomas", "Ursula",
    "Victor", "Wanda", "Xavier", "Yvonne", "Agnes", "Boris", "Celia", "Dexter", "Edith", "Frida",
)  # fmt: skip
LAST_NAMES = (
    "Barlow", "Castell", "Dunmore", "Eastley", "Farrow", "Gable", "Hobart", "Ingram", "Jessop",
    "Kellan", "Lorimer", "Merton", "Norwood", "Oakley", "Penrose", "Quimby", "Redfern", "Sefton",
    "Thorne", "Upton", "Varley", "Wexford", "Yardley", "Zeller", "Ashdown", "Birkett", "Corwin",
)  # fmt: skip
TOWNS = (
    "Lisbon", "Geneva", "Cracow", "Bergen", "Toledo", "Verona", "Dresden", "Galway", "Utrecht",
    "Malmo", "Trieste", "Bruges", "Tampere", "Riga", "Seville", "Aarhus", "Basel", "Ghent",
)  # fmt: skip
JOBS = (
    "baker", "dentist", "gardener", "painter", "plumber", "surgeon", "tailor", "teacher",
    "carpenter", "librarian", "violinist", "sailor", "chemist", "potter", "miller", "jeweller",
)  # fmt: skip
PETS = ("dog", "cat", "horse", "goat", "rabbit", "turtle", "goose", "donkey", "hamster", "mouse")
"""What is known of a person; each fact in one sentence, asked for in other words."""

FACTS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "town": ("{name} was born in {fact}.", "In which town was {name} born?",
             "{name} was born in", TOWNS),
    "job": ("{name} earned a living as a {fact}.", "What was the profession of {name}?",
            "{name} worked as a", JOBS),
    "pet": ("{name} kept a {fact} at home.", "Which animal did {name} own?",
            "{name} owned a", PETS),
}  # fmt: skip
LEAD = "Read the text and remember what it says about each person.\n\n"
PEOPLE = 4
CLOZE_LEAD = "Read the text.\n\n"
CLOZE_QUESTION = "How does the text go on after these words? Quote it: {begin}"
BEGIN_WORDS, ANSWER_WORDS = 9, 6

_SENTENCE = re.compile(r"[A-Z][^.!?]*[.!?](?=\s|$)")


def _facts(room: Room) -> Draft:
    firsts = [name for name in FIRST_NAMES if belongs(name, room.split)]
    people = [
        f"{first} {last}"
        for first, last in zip(
            room.draw.sample(firsts, min(PEOPLE, len(firsts))),
            room.draw.sample(LAST_NAMES, min(PEOPLE, len(firsts))),
            strict=True,
        )
    ]
    told = [(kind, name) for name in people for kind in FACTS]
    room.draw.shuffle(told)
    facts = {one: room.draw.choice(FACTS[one[0]][3]) for one in told}
    sentences = [FACTS[kind][0].format(name=name, fact=facts[kind, name]) for kind, name in told]
    # The asked ones come first in the list, and so at the depth that is wanted.
    depths = [(room.depth + place / len(told)) % 1.0 for place in range(len(told))]
    questions = tuple(
        Question(
            text=FACTS[kind][1].format(name=name),
            prefix=FACTS[kind][2].format(name=name),
            answers=(facts[kind, name],),
            first_line=True,
            max_new_tokens=8,
        )
        for kind, name in told[: room.turns]
    )
    words = room.excerpt_words()

    def make(size: int) -> Example:
        text = scatter(" ".join(words[:size]), sentences, depths)
        return Example(context=f"{LEAD}{text}", questions=questions, source=room.source)

    return Draft(make=make, least=20, most=len(words))


def _cloze(room: Room) -> Draft:
    words = room.excerpt_words()
    whole = " ".join(words)
    needed = BEGIN_WORDS + ANSWER_WORDS

    def candidates(text: str) -> list[list[str]]:
        found = [match.group().split() for match in _SENTENCE.finditer(text)]
        return [
            sentence
            for sentence in found
            if len(sentence) >= needed and whole.count(" ".join(sentence[:BEGIN_WORDS])) == 1
        ]

    if len(candidates(whole)) < 2 * room.turns:
        raise InputError(f"the text {room.source} has too few long sentences; use another one")

    def make(size: int) -> Example:
        some = candidates(" ".join(words[:size])) or candidates(whole)
        asked = [
            some[int(((room.depth + turn / room.turns) % 1.0) * len(some))]
            for turn in range(room.turns)
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
        text = " ".join(words[:size])
        return Example(context=f"{CLOZE_LEAD}{text}", questions=questions, source=room.source)

    return Draft(make=make, least=200, most=len(words))


FACTS_TASK = Task(
    name="qa",
    summary=f"a fact about one of {PEOPLE} people, strewn into real text (extractive QA)",
    build=by_rule("qa", _facts),
    most_turns=MOST_TURNS,
)
QUOTE_TASK = Task(
    name="quote",
    summary="how a sentence of the text goes on",
    build=by_rule("quote", _cloze),
    most_turns=MOST_TURNS,
)
