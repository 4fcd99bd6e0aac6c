"""Few-shot classification: what kind of answer a question asks for.

Questions and labels are made by rule here, in the manner of TREC's coarse question types, whose
data does not ship with any small package.

References
----------
X. Li and D. Roth, Learning Question Classifiers (2002): the task.
"""

from __future__ import annotations

from kvalloc.data import words
from kvalloc.prompts.examples import Example, Question
from kvalloc.prompts.splits import Split, belongs
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, Draft, by_rule

LEAD = "Each question below is followed by the type of its answer.\n\n"

FORMS: dict[str, list[str]] = words("question_forms")
"""Forms of question by the type of the answer; {0} is a thing, {1} a place."""
LABELS = tuple(FORMS)
QUESTION = Question(
    text="Question: {question}\nType:",
    metric="classification",
    classes=LABELS,
    first_line=True,
    max_new_tokens=4,
)


def _of_split(split: Split) -> dict[str, list[str]]:
    """Return every question that can be made of a split's things, by label."""
    places = words("places")
    things = [thing for thing in words("things") if belongs(thing, split)]
    return {
        label: [
            form.format(thing, place)
            for form in forms
            for thing in things
            for place in (places if "{1}" in form else places[:1])
        ]
        for label, forms in FORMS.items()
    }


def _labels(brief: Brief) -> Draft:
    by_label = {label: list(texts) for label, texts in _of_split(brief.request.split).items()}
    for texts in by_label.values():
        brief.draw.shuffle(texts)
    wanted = [brief.draw.choice(LABELS) for _ in range(brief.request.turns)]
    questions = tuple(QUESTION.filled(label, question=by_label[label].pop()) for label in wanted)
    shots: list[tuple[str, str]] = []
    while len(shots) < brief.request.n_tokens // 8 and all(by_label.values()):
        # Every label once in each round, so that a prompt of any length has them all.
        for label in brief.draw.sample(LABELS, len(LABELS)):
            shots.append((by_label[label].pop(), label))

    def make(size: int) -> Example:
        lines = "\n\n".join(f"Question: {q}\nType: {label}" for q, label in shots[:size])
        return Example(
            context=f"{LEAD}{lines}", questions=questions, source="questions by rule", chat=False
        )

    return Draft(make=make, min_items=len(LABELS), max_items=len(shots))


TASKS = (by_rule("labels", _labels, most_turns=MOST_TURNS),)
