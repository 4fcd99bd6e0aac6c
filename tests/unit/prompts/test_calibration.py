"""Prompts that losses are measured on."""

from __future__ import annotations

import pytest
from tiny_models import WordTokenizer

from kvalloc.cli.profile import DEFAULT_KINDS, EACH_TASK
from kvalloc.errors import InputError
from kvalloc.measure.sampling import choose_samples
from kvalloc.prompts.calibration import KINDS, MEASURED_TOKENS, calibration_prompts
from kvalloc.prompts.splits import KEYS, split_texts
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


def test_the_command_makes_the_same_by_default_with_every_kind_twice():
    assert DEFAULT_KINDS == KINDS
    assert set(KINDS) <= set(TASKS)
    assert EACH_TASK == 2


def test_they_repeat_and_the_seed_counts():
    kinds = ("needle", "kl")
    assert make(seed=3, kinds=kinds) == make(seed=3, kinds=kinds)
    assert make(seed=3, kinds=kinds) != make(seed=4, kinds=kinds)


def test_prompt_and_answer_are_the_case_of_the_profiling_split():
    (prompt,) = make(1, kinds=("needle",))
    (case,) = TASKS["needle"].make(TOKENIZER, 1, 300, 0, split="profiling")
    begun = case.turns[0].begun_tokens
    assert begun > 0
    assert prompt.token_ids + prompt.answer_ids[:begun] == case.input_ids
    assert prompt.answer_ids[begun:] == tuple(
        TOKENIZER(f" {case.turns[0].answers[0]}")["input_ids"]
    )


@pytest.mark.parametrize("kind", ["needle", "kl", "pairs"])
def test_with_the_question_after_the_prompt_is_the_context_alone(kind):
    made = make(2, kinds=(kind,), question="after")
    cases = TASKS[kind].make(TOKENIZER, 2, 300, 0, split="profiling", after=True)
    for prompt, case in zip(made, cases, strict=True):
        turn = case.turns[0]
        begun = turn.begun_tokens
        assert prompt.token_ids == case.input_ids
        assert prompt.question_ids
        assert prompt.question_ids + prompt.answer_ids[:begun] == turn.question_ids
        wanted = turn.continuation_ids or tuple(TOKENIZER(f" {turn.answers[0]}")["input_ids"])
        assert prompt.answer_ids[begun:] == wanted[:MEASURED_TOKENS]
        assert prompt.name.endswith("question after")


def test_every_kind_comes_in_every_form_with_text_of_its_own():
    made = make(8, n_tokens=(200, 300), question="both")
    whole = [len(prompt.token_ids) + len(prompt.question_ids) for prompt in made]
    forms = {
        (prompt.task, bool(prompt.question_ids), n_tokens > 200)
        for prompt, n_tokens in zip(made, whole, strict=True)
    }
    assert len(forms) == len(made)
    assert len({prompt.token_ids[20:60] for prompt in made}) == len(made)


def test_no_text_or_key_is_one_of_an_evaluation():
    names = {prompt.name.split(" in ")[1] for prompt in make(8, kinds=("needle", "kl"))}
    assert names <= set(split_texts("profiling"))
    for split in ("development", "held-out"):
        assert not names & set(split_texts(split))
        assert not set(KEYS["profiling"]) & set(KEYS[split])


def test_they_can_be_profiled():
    made = make(4, kinds=("needle", "kl"))
    found = choose_samples(made, TOKENIZER, context_tokens=300, least_tokens=37, samples=len(made))
    assert [one.token_ids.size for one in found.samples] == [
        len(prompt.token_ids) for prompt in made
    ]
    assert all(one.answer_ids is not None and one.answer_ids.size for one in found.samples)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_prompts": 0}, "0 prompts of 2 kinds and 1 lengths"),
        ({"kinds": ()}, "of 0 kinds"),
        ({"kinds": ("nothing",)}, "no task 'nothing'"),
        ({"n_tokens": 10}, "ask for a longer"),
        ({"n_tokens": ()}, "0 lengths"),
        ({"question": "before"}, "choose from: inside, after, both"),
        ({"split": "held-out"}, "for the last evaluation"),
        ({"split": "test"}, "no split 'test'"),
    ],
)
def test_what_cannot_be_made(options, said):
    with pytest.raises(InputError, match=said):
        make(**options)
