"""Prompts that losses are measured on."""

from __future__ import annotations

import pytest
from tiny_models import WordTokenizer

from kvalloc.errors import InputError
from kvalloc.prompts.calibration import MEASURED_TOKENS, calibration_prompts
from kvalloc.prompts.tasks import TASKS

TOKENIZER = WordTokenizer()


def make(n_prompts=6, n_tokens=300, **options):
    # Prose only: a tokenizer of whole words makes lists of pairs too short, and most code too.
    return calibration_prompts(
        TOKENIZER, n_prompts, n_tokens, **{"kinds": ("needle", "kl"), **options}
    )


def test_the_kinds_take_turns():
    made = make(6, kinds=("needle", "kl", "code"))
    assert [prompt.task for prompt in made] == [*("needle", "kl", "code") * 2]
    assert [prompt.task for prompt in make(5, kinds=("needle", "kl"))] == [
        *("needle", "kl", "needle", "kl", "needle")
    ]


@pytest.mark.parametrize("question", ["inside", "after"])
@pytest.mark.parametrize("kind", ["needle", "kl", "pairs"])
def test_prompt_and_answer_are_the_case_of_the_profiling_split(kind, question):
    made = make(2, kinds=(kind,), question=question)
    assert made == make(2, kinds=(kind,), question=question)
    assert made != make(2, kinds=(kind,), question=question, seed=1)
    after = question == "after"
    cases = TASKS[kind].make(TOKENIZER, 2, 300, 0, split="profiling", after=after)
    for prompt, case in zip(made, cases, strict=True):
        turn = case.turns[0]
        begun = turn.begun_tokens
        asked = prompt.question_ids if after else prompt.token_ids
        assert asked + prompt.answer_ids[:begun] == (turn.question_ids or case.input_ids)
        wanted = turn.continuation_ids or tuple(TOKENIZER(f" {turn.answers[0]}")["input_ids"])
        assert prompt.answer_ids[begun:] == wanted[:MEASURED_TOKENS]
        if after:  # the prompt is the context alone
            assert prompt.token_ids == case.input_ids
        assert prompt.name.endswith("question after") is after
        assert prompt.name.split(" in ")[1].removesuffix(", question after") == case.source


def test_every_kind_comes_in_every_form_with_text_of_its_own():
    made = make(8, n_tokens=(200, 300), question="both")
    whole = [len(prompt.token_ids) + len(prompt.question_ids) for prompt in made]
    forms = {
        (prompt.task, bool(prompt.question_ids), n_tokens > 200)
        for prompt, n_tokens in zip(made, whole, strict=True)
    }
    assert len(forms) == len(made)
    assert len({prompt.token_ids[20:60] for prompt in made}) == len(made)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_prompts": 0}, "0 prompts of 2 kinds and 1 lengths"),
        ({"kinds": ()}, "of 0 kinds"),
        ({"kinds": ("nothing",)}, "no task 'nothing'"),
        ({"n_tokens": 10}, "ask for a longer"),
        ({"n_tokens": ()}, "0 lengths"),
        ({"question": "before"}, "choose from: inside, after, both"),
    ],
)
def test_what_cannot_be_made(options, said):
    with pytest.raises(InputError, match=said):
        make(**options)
