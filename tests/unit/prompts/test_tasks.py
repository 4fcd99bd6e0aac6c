"""Tasks made by rule: the answers are there, the lengths are met, the same seed gives the same."""

import itertools
import json
import re
import sysconfig
from collections import Counter
from pathlib import Path
from string import ascii_lowercase
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import Letters, read
from tiny_models import WordTokenizer

from kvalloc.cli.eval import EvalOptions
from kvalloc.prompts.calibration import MEASURED_TOKENS, calibration_prompts
from kvalloc.prompts.cases import LONG_ANSWER_TOKENS
from kvalloc.prompts.examples import OPENING
from kvalloc.prompts.metrics import METRICS
from kvalloc.prompts.splits import KEYS, SPLITS, belongs, coded_words, split_texts, stream
from kvalloc.prompts.tasks import TASKS, find_tasks
from kvalloc.prompts.tasks.needles import FACTS
from kvalloc.prompts.tasks.pairs import SHOWN, plain_words
from kvalloc.prompts.tasks.tool_calls import TOOLS
from kvalloc.units import field_texts

# Tasks made by rule: the answers are there, the lengths are met, the same seed gives the same


NIAH = ("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery")
IN_CONTEXT = (
    *("needle", "needle-keys", "facts", "pairs", "qa"),
    *(*NIAH, "vt", "cwe", "fwe", "kv_retrieval"),
)
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
        assert 0.9 * n_tokens <= len(case.input_ids + case.turns[0].question_ids) <= n_tokens
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


@pytest.mark.parametrize("name", NIAH)
def test_magic_numbers_are_all_those_of_the_keys_asked_for(name):
    n_keys, n_values = 1 + 3 * (name == "niah_multiquery"), 1 + 3 * (name == "niah_multivalue")
    for case in make(name, after=True, turns=2):
        told = re.findall(r"magic numbers for (\w+) is: (\d{7})\.", read(case.input_ids))
        assert len(told) > 30 if name == "niah_multikey" else len(told) == 2 * n_keys * n_values
        asked = [
            re.findall(r"\w+", read(turn.question_ids).split(" for ")[1].split(" mentioned")[0])
            for turn in case.turns
        ]
        for keys, turn in zip(asked, case.turns, strict=True):
            named = set(keys) - {"and"}
            assert len(named) == n_keys
            assert sorted(turn.answers) == sorted(number for key, number in told if key in named)
            assert len(turn.answers) == n_keys * n_values


@for_seeds
def test_variables_have_the_value_asked_for_by_their_chain(seed):
    for case in make("vt", seed, after=True, turns=3):
        values = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", read(case.input_ids)):
            values[name] = values.get(source, source)
        assert all(value.isdigit() for value in values.values())  # none is read before it is set
        for turn in case.turns:
            asked = re.search(r"the value (\d+) in", read(turn.question_ids))[1]
            assert set(turn.answers) == {name for name, value in values.items() if value == asked}


@pytest.mark.parametrize(("n_tokens", "often", "seldom"), [(5000, 6, 1), (9000, 30, 3)])
def test_common_words_occur_more_often_than_all_others(n_tokens, often, seldom):
    for case in make("cwe", n_tokens=n_tokens, after=True):
        listed = re.findall(r"\d+\. ([a-z ]+)", read(case.input_ids).rpartition("\n\n")[2])
        counts = Counter(word.strip() for word in listed)
        assert {word for word, n in counts.items() if n == often} == set(case.turns[0].answers)
        assert sorted(set(counts.values())) == [seldom, often]
        assert len(set(case.turns[0].answers)) == 10


@for_seeds
def test_frequent_words_are_the_first_three_but_for_the_dots(seed):
    for n_tokens in (1200, N_CHARACTERS):
        for case in make("fwe", seed, n_tokens=n_tokens, after=True):
            counts = Counter(read(case.input_ids).rpartition("\n\n")[2].split()).most_common(5)
            assert [word for word, _ in counts[:4]] == ["...", *case.turns[0].answers]
            assert counts[3][1] > counts[4][1]


@for_seeds
def test_identifiers_have_the_value_of_the_object(seed):
    for case in make("kv_retrieval", seed, after=True, turns=3):
        held = json.loads(re.search(r"\{.*\}", read(case.input_ids))[0])
        for turn in case.turns:
            asked = re.search(r'Key: "(.*)"', read(turn.question_ids))[1]
            assert turn.answers == (held[asked],)
            assert str(UUID(asked)) == asked


@pytest.mark.parametrize("after", [False, True])
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6), answer_tokens=st.integers(100, 4000))
def test_the_walk_goes_depth_first_to_the_path_asked_for(after, seed, answer_tokens):
    for case in make("dfs", seed, after=after, turns=3, answer_tokens=answer_tokens):
        walk, path_turn, *below_turns = case.turns
        whole = read(case.input_ids + walk.question_ids)
        tree = whole.rpartition("The tree:\n")[2].split("\n\n")[0].split("\n")
        below = {name: some.split(", ") for name, some in (line.split(": ") for line in tree)}
        root = next(iter(below))
        steps = read(walk.continuation_ids).strip().split("\n")
        path, entered = [root], {root: 0}
        for step in steps:  # the rule, stated on its own
            nodes = below.get(path[-1], [])
            if entered[path[-1]] < len(nodes):
                path.append(nodes[entered[path[-1]]])
                entered[path[-2]] += 1
                entered[path[-1]] = 0
                assert step == f"down to {path[-1]}"
            else:
                path.pop()
                assert step == f"up to {path[-1]}"
                if len(path) == 1 and entered[root] == len(below[root]):
                    entered[root] = 0
        assert path_turn.answers == tuple(path[1:])
        assert len(walk.continuation_ids) <= answer_tokens
        assert len(walk.continuation_ids) > answer_tokens - 20 * len("\ndown to a word word")
        assert (walk.measured, walk.score("anything")) == (True, None)
        assert read(path_turn.question_ids).endswith(f"The path is now: {root} >")
        assert path_turn.score("nowhere") == 0.0
        assert path_turn.is_found(" > ".join(path[1:]))
        for turn in below_turns:
            asked = re.search(r"directly below (.+)\?", read(turn.question_ids))[1]
            assert turn.answers == tuple(below[asked])
    [short] = make("dfs", seed, 1, answer_tokens=5)
    assert len(read(short.turns[0].continuation_ids).split("\n")) == 2  # one step at least


@settings(max_examples=3)
@given(seed=st.integers(0, 10**6), split=st.sampled_from(SPLITS))
def test_the_calls_are_those_of_the_request(seed, split):
    turns = [
        (read(case.input_ids), turn)
        for case in make("tools", seed, 4, split=split, after=True, turns=6)
        for turn in case.turns
    ]
    for context, turn in turns:
        tools = [json.loads(line) for line in context.split("\n") if line.startswith("{")]
        types = {tool["name"]: tool["parameters"]["properties"] for tool in tools}
        assert len(types) == 12
        request = re.search(r"Request: (.*)\nCalls:$", read(turn.question_ids))[1]
        [right] = turn.answers
        calls = json.loads(right)
        said = "".join(TOOLS[one["name"]].format(**one["arguments"]) + " " for one in calls)
        assert said.strip() == request
        for call in calls:
            kinds = {name: value["type"] for name, value in types[call["name"]].items()}
            made = {name: type(value).__name__ for name, value in call["arguments"].items()}
            names = {"int": "integer", "str": "string"}
            assert {name: names[kind] for name, kind in made.items()} == kinds
        assert turn.is_found(f"{right}\nRequest: more")
        assert not turn.is_found(right.replace('"name": "', '"name": "x'))
    assert {len(json.loads(turn.answers[0])) for _, turn in turns} == {1, 2}


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
            set(coded_words(stream(split, "", 0), split, 200, letters=ascii_lowercase, length=2)),
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


def test_the_help_names_all_tasks_and_metrics():
    texts = field_texts(EvalOptions)
    for name, known in (("tasks", TASKS), ("metric", METRICS)):
        assert set(known) <= set(re.findall(r"[\w-]+", texts[name]))


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
