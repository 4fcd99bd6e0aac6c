"""Few-shot classification: what kind of answer a question asks for.

Questions and labels are made by rule here, in the manner of TREC's coarse question types, whose
data does not ship with any small package.

References
----------
X. Li and D. Roth, Learning Question Classifiers (2002): the task.
"""

from __future__ import annotations

from kvalloc.prompts.examples import Example, Question
from kvalloc.prompts.splits import Split, belongs
from kvalloc.prompts.tasks.task import MOST_TURNS, Draft, Room, Task, by_rule

LEAD = "Each question below is followed by the type of its answer.\n\n"

FORMS: dict[str, tuple[str, ...]] = {
    "person": (
        "Who invented the {0}?", "Who painted the first {0}?", "Whose idea was the {0}?",
        "Which engineer built the {0} in {1}?", "Who was the first to own a {0} in {1}?",
        "What is the name of the man who sold the {0}?", "Who brought the {0} to {1}?",
        "Which queen asked for a {0}?", "Who wrote the book about the {0}?",
    ),
    "place": (
        "Where was the {0} found?", "In which city does the {0} stand?",
        "Which country makes the most of every {0}?", "Where can one buy a {0} in {1}?",
        "What river runs past the {0} of {1}?", "In what part of {1} is the old {0}?",
        "Which island is known for its {0}?", "Where do they keep the {0}?",
        "What is the capital of the land where the {0} was made?",
    ),
    "number": (
        "How many parts does a {0} have?", "How much does a {0} weigh?",
        "How many people in {1} own a {0}?", "What does a {0} cost in {1}?",
        "How far is the {0} from {1}?", "How tall is the {0}?",
        "What percentage of {1} has seen a {0}?", "How many miles did the {0} go?",
        "What is the speed of a {0}?",
    ),
    "date": (
        "When was the {0} invented?", "In what year did the {0} come to {1}?",
        "When did {1} get its first {0}?", "What day was the {0} sold?",
        "In which century was the {0} lost?", "When does the {0} open in {1}?",
        "What month is best for the {0}?", "When was the last {0} seen?",
        "On what date did the {0} burn down?",
    ),
    "reason": (
        "Why is the {0} red?", "Why did {1} forbid the {0}?", "Why does a {0} make a sound?",
        "What causes a {0} to break?", "Why do people in {1} fear the {0}?",
        "What is the reason for the name of the {0}?", "Why was the {0} moved from {1}?",
        "What made the {0} so dear?", "Why is there no {0} in {1}?",
    ),
}  # fmt: skip
"""Forms of question by the type of the answer; {0} is a thing, {1} a place."""

THINGS = (
    "clock", "bridge", "piano", "statue", "engine", "lamp", "boat", "mill", "tower", "wheel",
    "garden", "mirror", "camera", "radio", "balloon", "printing press", "flag", "bell", "ferry",
    "carpet", "crown", "sword", "library", "theatre", "market", "steam train", "telegraph", "map",
    "organ", "well", "kite", "globe", "wagon", "barometer", "plough", "loom", "furnace", "gate",
    "fountain pen", "typewriter", "sewing machine", "tent", "ladle", "sundial", "treadmill",
)  # fmt: skip
PLACES = (
    "Norway", "Peru", "Vienna", "Ghana", "Lisbon", "Ohio", "Japan", "Cairo", "Texas", "Prague",
    "Chile", "Dublin", "Kenya", "Madrid", "Quebec", "Nepal", "Boston", "Malta", "Oslo", "Naples",
)  # fmt: skip
LABELS = tuple(FORMS)


def _of_split(split: Split) -> dict[str, list[str]]:
    """Every question that can be made of a split's things, by label."""
    things = [thing for thing in THINGS if belongs(thing, split)]
    return {
        label: [
            form.format(thing, place)
            for form in forms
            for thing in things
            for place in (PLACES if "{1}" in form else PLACES[:1])
        ]
        for label, forms in FORMS.items()
    }


def _labels(room: Room) -> Draft:
    by_label = {label: list(asked) for label, asked in _of_split(room.split).items()}
    for asked in by_label.values():
        room.draw.shuffle(asked)
    wanted = [room.draw.choice(LABELS) for _ in range(room.turns)]
    questions = tuple(
        Question(
            text=f"Question: {by_label[label].pop()}\nType:",
            answers=(label,),
            metric="classification",
            classes=LABELS,
            first_line=True,
            max_new_tokens=4,
        )
        for label in wanted
    )
    shots: list[tuple[str, str]] = []
    while len(shots) < room.n_tokens // 8 and all(by_label.values()):
        # Every label once in each round, so that a prompt of any length has them all.
        for label in room.draw.sample(LABELS, len(LABELS)):
            shots.append((by_label[label].pop(), label))

    def make(size: int) -> Example:
        lines = "\n\n".join(f"Question: {q}\nType: {label}" for q, label in shots[:size])
        return Example(
            context=f"{LEAD}{lines}", questions=questions, source="questions by rule", chat=False
        )

    return Draft(make=make, least=len(LABELS), most=len(shots))


LABELS_TASK = Task(
    name="labels",
    summary="the type of a question, after labelled ones (few-shot classification)",
    build=by_rule("labels", _labels),
    most_turns=MOST_TURNS,
)
