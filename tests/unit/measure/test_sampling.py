"""Which tokens are measured."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import WordTokenizer, words

from kvalloc.errors import InputError
from kvalloc.measure.sampling import choose_samples
from kvalloc.prompts.texts import Document, Prompt

TOKENIZER = WordTokenizer()


def choose(texts, **options):
    values = {"context_tokens": 10, "least_tokens": 4, **options}
    return choose_samples(texts, values.pop("tokenizer", TOKENIZER), **values)


@pytest.mark.parametrize(("start", "step"), [([], 10), ([1], 9)])
def test_prose_is_cut_into_equal_pieces_without_overlap(start, step):
    """A start token stands before every piece."""
    ids = TOKENIZER(words(57))["input_ids"]
    tokenizer = WordTokenizer(start=bool(start))
    found = choose([words(57)], sampling_ratio=1.0, tokenizer=tokenizer)
    wanted = [[*start, *ids[at : at + step]] for at in range(0, 57 - step + 1, step)]
    assert [piece.token_ids.tolist() for piece in found.samples] == wanted
    assert found.description == f"{len(wanted)} of {len(wanted)} pieces of 10 tokens"
    assert found.samples[0].token_ids.dtype == np.int64


def test_short_texts_are_joined():
    found = choose([Document(text=words(6, seed), name=f"{seed}.txt") for seed in range(5)])
    assert found.description == "1 of 3 pieces of 10 tokens of 0.txt, 1.txt, 2.txt, 3.txt, 4.txt"


@pytest.mark.parametrize(("ratio", "expected"), [(0.1, 10), (0.101, 11), (1e-9, 1), (1, 100)])
def test_the_sampling_ratio_rounds_up(ratio, expected):
    assert len(choose([words(1000)], sampling_ratio=ratio).samples) == expected


def test_samples_are_spread_evenly_and_repeatable():
    prompts = [Prompt(text=words(9, seed=i)) for i in range(40)]
    digests = set()
    for seed in range(3):
        one, again = (choose(prompts, samples=8, seed=seed) for _ in range(2))
        assert one.digest() == again.digest()
        digests.add(one.digest())
        every = [TOKENIZER(prompt.text)["input_ids"] for prompt in prompts]
        chosen = [every.index(sample.token_ids.tolist()) for sample in one.samples]
        assert [index // 5 for index in chosen] == list(range(8))
    assert len(digests) == 3


def test_a_prompt_is_one_sample():
    """Its middle is dropped where it is too long; it may bring its tokens, or be a chat."""
    ids = TOKENIZER(words(31))["input_ids"]
    short = words(7, seed=1)
    brings = Prompt(text="not read", answer="nor this", token_ids=(5, 6, 7), answer_ids=(8, 9))
    chat = Prompt(messages=({"role": "user", "content": "one two three four"},))
    given = [Prompt(text=words(31)), Prompt(text=short), brings, chat]
    found = choose(given, samples=4, context_tokens=9, least_tokens=1)
    assert [one.token_ids.tolist() for one in found.samples] == [
        ids[:5] + ids[-4:],
        TOKENIZER(short)["input_ids"],
        [5, 6, 7],
        TOKENIZER("user one two three four")["input_ids"],
    ]
    assert found.samples[2].answer_ids.tolist() == [8, 9]


def test_the_digest_knows_where_a_sample_ends():
    def digest(*lengths):
        ids = iter(words(20).split())
        texts = [" ".join(next(ids) for _ in range(length)) for length in lengths]
        return choose([Prompt(text=text) for text in texts], samples=2).digest()

    assert digest(5, 6) != digest(6, 5)
    assert digest(5, 6) == digest(5, 6)


def test_a_prompt_that_is_too_short_is_named():
    said = "q.jsonl, line 7: the prompt has 3 tokens.*from 4 tokens on"
    with pytest.raises(InputError, match=said):
        choose([Prompt(text="a b c", name="q.jsonl", line=7)])


def test_questions_and_answers_follow_their_prompts_and_have_a_digest():
    def ids(text):
        return TOKENIZER(text)["input_ids"]

    chat = ({"role": "user", "content": "a b c d"},)
    cases = [  # a prompt, its question and its answer
        (Prompt(text="a b c d e", answer="x y"), None, ids("x y")),
        (Prompt(text="a b c d e"), None, None),
        (Prompt(messages=chat, answer="x"), None, ids("x")),
        (Prompt(text="a b c d", question=" which?", answer="b"), ids(" which?"), ids("b")),
        (Prompt(token_ids=(3, 4, 5, 6), question_ids=(9, 10), answer_ids=(11,)), [9, 10], [11]),
    ]
    prompts = [case[0] for case in cases]
    found = choose([words(10), *prompts], sampling_ratio=1.0)
    for sample, (_, *expected) in zip(found.samples[1:], cases, strict=True):
        given = (sample.question_ids, sample.answer_ids)
        assert [None if each is None else each.tolist() for each in given] == expected
    for gone in ("answer", "question"):
        less = [replace(p, **{gone: "", f"{gone}_ids": ()}) for p in prompts]
        without = choose([words(10), *less], sampling_ratio=1.0)
        assert without.digest() == found.digest()
        assert without.answers_digest() != found.answers_digest()
