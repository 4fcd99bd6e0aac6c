"""Tasks made by rule: the answers are there, the lengths are met, the same seed gives the same."""

import itertools
import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import Letters, read
from tiny_models import WordTokenizer

from kvalloc.prompts.calibration import MEASURED_TOKENS, calibration_prompts
from kvalloc.prompts.cases import LONG_ANSWER_TOKENS
from kvalloc.prompts.examples import OPENING
from kvalloc.prompts.splits import KEYS, SPLITS, belongs, split_texts
from kvalloc.prompts.tasks import TASKS, find_tasks
from kvalloc.prompts.tasks.needles import FACTS
from kvalloc.prompts.tasks.pairs import SHOWN, plain_words

# Tasks made by rule: the answers are there, the lengths are met, the same seed gives the same


IN_CONTEXT = ("needle", "needle-keys", "facts", "pairs", "qa")
N_CHARACTERS = 5000


def make(name, seed=0, n_cases=3, n_tokens=N_CHARACTERS, *, chat=True, **options):
    return TASKS[name].make(Letters(chat=chat), n_cases, n_tokens, seed, **options)


def for_seeds(test):
    return settings(max_examples=4)(given(seed=st.integers(0, 10**6))(test))


def read_all(name, split):
    return "\n".join(read(case.input_ids) for case in make(name, split=split))


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=3)
@given(
    seed=st.integers(0, 10**6),
    n_tokens=st.integers(4000, 8000),
    split=st.sampled_from(SPLITS),
    after=st.booleans(),
    chat=st.booleans(),
)
def test_lengths_are_met_and_the_same_seed_gives_the_same(name, seed, n_tokens, split, after, chat):
    asked = {"split": split, "after": after, "chat": chat}
    cases = make(name, seed, 2, n_tokens, **asked)
    assert cases == make(name, seed, 2, n_tokens, **asked)
    assert cases != make(name, seed + 1, 2, n_tokens, **asked)
    for case in cases:
        assert 0.9 * n_tokens <= case.n_tokens <= n_tokens
        assert bool(case.turns[0].question_ids) is after


@pytest.mark.parametrize("name", [name for name in TASKS if name != "kl"])
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6), chat=st.booleans())
def test_the_question_after_is_the_rest_of_the_prompt(name, seed, chat):
    inside, after = (make(name, seed, chat=chat, after=after) for after in (False, True))
    for one, other in zip(inside, after, strict=True):
        assert one.input_ids == other.input_ids + other.turns[0].question_ids
        assert one.turns[0].answers == other.turns[0].answers


@pytest.mark.parametrize("name", IN_CONTEXT)
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6), split=st.sampled_from(SPLITS))
def test_every_answer_is_in_what_is_compressed(name, seed, split):
    turns = min(3, TASKS[name].most_turns)
    for case in make(name, seed, split=split, after=True, turns=turns):
        context = read(case.input_ids)
        assert len(case.turns) == turns
        for turn in case.turns:
            assert turn.answers
            assert all(answer in context for answer in turn.answers)
            assert turn.is_found(f"it is {', '.join(turn.answers)}.")
            assert turn.score(f"{', '.join(turn.answers)}") == pytest.approx(1.0)
            assert turn.score("?") == 0.0


@for_seeds
def test_needles_belong_to_the_key_that_is_asked_for(seed):
    for name, hidden in (("needle", 1), ("needle-keys", 8)):
        for case in make(name, seed, after=True):
            told = dict(
                re.findall(r"The secret number of the (\w+) is (\d{7})\.", read(case.input_ids))
            )
            assert len(told) == hidden
            key = re.search(r"number of the (\w+)\?", read(case.turns[0].question_ids))[1]
            assert case.turns[0].answers == (told[key],)


def test_needles_are_spread_evenly_over_depths_and_texts():
    cases, names = make("needle", 0, 8, 9000), list(split_texts("development"))
    assert [case.source for case in cases] == [names[i % len(names)] for i in range(8)]
    for index, case in enumerate(cases):
        context, depth = read(case.input_ids), (index + 0.5) / 8
        before, _, _ = context.partition("The secret number of the")
        assert before.rstrip().endswith((".", "!", "?"))
        assert context.count(case.turns[0].answers[0]) == 1
        assert len(before) / len(context) == pytest.approx(depth, abs=0.06)  # half a long sentence


def test_one_answer_asks_for_all_facts_and_nothing_is_right_in_ones_own_words():
    for case in make("facts", after=True):
        told = dict(re.findall(r"number of the (\w+) is (\d{7})\.", read(case.input_ids)))
        [turn] = case.turns
        asked = re.search(r"numbers of (.+)\? Answer", read(turn.question_ids))[1]
        keys = re.findall(r"the (\w+)", asked)
        assert (len(keys), set(keys)) == (FACTS, set(told))
        assert turn.answers == tuple(told[key] for key in keys)
        assert turn.score(f"{turn.answers[0]}, {turn.answers[2]}") == 0.5
        assert not turn.is_found(turn.answers[0])
    [own] = [case.turns[0] for case in make("own", n_cases=1)]
    assert (own.answers, own.score("anything")) == ((), None)
    for name in ("facts", "own"):
        assert make(name, n_cases=1)[0].turns[0].max_new_tokens == LONG_ANSWER_TOKENS
        assert make(name, n_cases=1, answer_tokens=5)[0].turns[0].max_new_tokens == 5


def test_a_second_turn_follows_an_opening_that_is_not_measured():
    [case] = make("facts", n_cases=1, opened=True)
    [plain] = make("facts", n_cases=1)
    opening, turn = case.turns
    assert (opening.measured, turn.measured) == (False, True)
    assert OPENING.text in read(case.input_ids)
    assert opening.question_ids == ()
    assert read(turn.question_ids).startswith("</><user>What are the secret numbers")
    assert turn.answers == plain.turns[0].answers


@settings(max_examples=4)
@given(seed=st.integers(0, 10**6), split=st.sampled_from(SPLITS))
def test_pairs_belong_to_the_key_that_is_asked_for(seed, split):
    for case in make("pairs", seed, split=split, after=True, turns=4):
        pairs = re.findall(r"^([a-z ]+): (\d{5})$", read(case.input_ids), re.MULTILINE)
        held = dict(pairs)
        assert len(held) == len(pairs) == len(set(held.values())) > 100
        asked = [read(turn.question_ids).rpartition("\n")[2].rstrip(":") for turn in case.turns]
        assert [turn.answers for turn in case.turns] == [(held[key],) for key in asked]
        assert len(set(asked)) == 4
        shown = re.findall(r"^([a-z ]+): (\d{5})$", read(case.turns[0].question_ids), re.MULTILINE)
        assert len(dict(shown)) == SHOWN
        assert set(shown) <= set(pairs)
        assert not set(asked) & set(dict(shown))


@for_seeds
def test_facts_are_those_of_the_person_asked_for(seed):
    for case in make("qa", seed, after=True, turns=3):
        context = read(case.input_ids)
        for turn in case.turns:
            asked = read(turn.question_ids)
            name = re.search(r"[A-Z]\w+ [A-Z]\w+(?=\?| born| own)", asked)[0]
            told = [s for s in re.findall(rf"{name} [^.]*\.", context) if turn.answers[0] in s]
            assert len(told) == 1


@for_seeds
def test_code_goes_on_as_the_file_does(seed):
    for case in make("code", seed):
        whole = Path(sysconfig.get_paths()["stdlib"], case.source).read_text("utf-8")
        whole = whole.expandtabs(4)
        piece = read(case.input_ids)[1:]  # after the tokenizer's own first token
        at = whole.index(piece) + len(piece)
        assert whole[at:].lstrip("\n").split("\n")[0].strip() == case.turns[0].answers[0]
        assert case.turns[0].score(f"\n    {case.turns[0].answers[0]}\nand more") == 1.0


@pytest.mark.parametrize("tokens", [None, 30])
def test_texts_are_cut_where_they_go_on(tokens):
    texts = split_texts("held-out")
    asked = {} if tokens is None else {"answer_tokens": tokens}
    for case in make("kl", 1, 5, 3000, split="held-out", after=True, **asked):
        [turn] = case.turns
        assert len(turn.continuation_ids) == (tokens or LONG_ANSWER_TOKENS)
        joined = read(case.input_ids + turn.question_ids + turn.continuation_ids)
        assert joined in texts[case.source]
        assert len(case.input_ids + turn.question_ids) == 3000


def test_later_turns_stand_between_the_answer_before_and_their_own():
    [case] = make("needle", n_cases=1, turns=2)
    first, second = case.turns
    assert first.question_ids == ()
    asked = read(second.question_ids)
    assert asked.startswith("</><user>What is the secret number of the")
    assert re.search(r"<assistant>The secret number of the \w+ is$", asked)
    [plain] = make("needle", n_cases=1, turns=2, chat=False)
    assert read(plain.turns[1].question_ids).startswith("\n\nWhat is the secret number")


def test_no_split_shares_texts_keys_words_or_prompts():
    texts = {split: split_texts(split) for split in SPLITS}
    of_split = {
        split: [
            {name.rsplit("_", 1)[0] for name in texts[split]},
            set(KEYS[split]),
            set(plain_words(split)),
            {case.input_ids for name in TASKS for case in make(name, split=split)},
            {part for text in texts[split].values() for part in text.split(". ") if part[80:]},
            set(re.findall(r"^([a-z]+): \d{5}$", read_all("pairs", split), re.MULTILINE)),
        ]
        for split in SPLITS
    }
    for one, other in itertools.combinations(of_split.values(), 2):
        assert all(mine and not mine & theirs for mine, theirs in zip(one, other, strict=True))
    assert all(sum(belongs(f"w{n}", split) for split in SPLITS) == 1 for n in range(50))
    assert len(texts["held-out"]) >= 4


def test_tasks_are_found_once():
    assert [task.name for task in find_tasks(["kl", "needle", "kl"])] == ["kl", "needle"]


# Prompts that losses are measured on


TOKENIZER = WordTokenizer()


def calibrated(n_prompts=6, n_tokens=300, **options):
    # Prose only: a tokenizer of whole words makes lists of pairs too short, and most code too.
    return calibration_prompts(
        TOKENIZER, n_prompts, n_tokens, **{"kinds": ("needle", "kl"), **options}
    )


def test_the_kinds_take_turns():
    made = calibrated(6, kinds=("needle", "kl", "code"))
    assert [prompt.task for prompt in made] == [*("needle", "kl", "code") * 2]
    assert [prompt.task for prompt in calibrated(5, kinds=("needle", "kl"))] == [
        *("needle", "kl", "needle", "kl", "needle")
    ]


@pytest.mark.parametrize("question", ["inside", "after"])
@pytest.mark.parametrize("kind", ["needle", "kl", "pairs"])
def test_prompt_and_answer_are_the_case_of_the_profiling_split(kind, question):
    made = calibrated(2, kinds=(kind,), question=question)
    assert made == calibrated(2, kinds=(kind,), question=question)
    assert made != calibrated(2, kinds=(kind,), question=question, seed=1)
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
    made = calibrated(8, n_tokens=(200, 300), question="both")
    whole = [len(prompt.token_ids) + len(prompt.question_ids) for prompt in made]
    forms = {
        (prompt.task, bool(prompt.question_ids), n_tokens > 200)
        for prompt, n_tokens in zip(made, whole, strict=True)
    }
    assert len(forms) == len(made)
    assert len({prompt.token_ids[20:60] for prompt in made}) == len(made)
