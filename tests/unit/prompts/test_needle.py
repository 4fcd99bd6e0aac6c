"""Needle questions are made by rule, and say what they are."""

from __future__ import annotations

import pytest
from tiny_models import WordTokenizer

from kvalloc.errors import InputError
from kvalloc.measure import default_texts
from kvalloc.prompts.needle import KEYS, NeedleCase, haystack_texts, make_needle_cases
from kvalloc.prompts.tasks.needles import ANSWER_PREFIX, NEEDLE


class SpyTokenizer(WordTokenizer):
    """Remembers the prompts it was given; one token a word."""

    chat_template = "yes"

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[int, ...], str] = {}

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True):
        encoded = super().__call__(text, add_special_tokens, verbose)
        self.seen[tuple(encoded["input_ids"])] = text
        return encoded


@pytest.fixture
def tokenizer():
    return SpyTokenizer()


def case_with(number: str) -> NeedleCase:
    return NeedleCase(input_ids=(1,), key="anchor", number=number, depth=0.5, source="s")


def test_the_same_seed_gives_the_same_cases(tokenizer):
    first = make_needle_cases(tokenizer, 5, 400, seed=3)
    assert make_needle_cases(tokenizer, 5, 400, seed=3) == first
    assert make_needle_cases(tokenizer, 5, 400, seed=4) != first


def test_prompts_are_as_long_as_asked(tokenizer):
    for n_tokens in (120, 400, 1500):
        for case in make_needle_cases(tokenizer, 4, n_tokens):
            assert n_tokens - 3 <= case.n_tokens <= n_tokens


def test_depths_and_texts_are_spread_evenly(tokenizer):
    cases = make_needle_cases(tokenizer, 8, 1500)
    for index, case in enumerate(cases):
        assert case.depth == pytest.approx((index + 0.5) / 8, abs=0.06)  # half a long sentence
    names = list(haystack_texts())
    assert [case.source for case in cases] == [names[i % len(names)] for i in range(8)]
    assert len({case.number for case in cases}) == 8


def test_key_and_number_stand_in_needle_and_question_only(tokenizer):
    for case in make_needle_cases(tokenizer, 6, 600):
        prompt = tokenizer.seen[case.input_ids]
        needle_text = NEEDLE.format(key=case.key, number=case.number)
        assert prompt.count(case.number) == 1
        assert prompt.count(needle_text) == 1
        # needle, question, start of the answer
        assert prompt.casefold().count(case.key) == 3
        assert prompt.endswith(ANSWER_PREFIX.format(key=case.key))
        assert len(case.number) == 7
        assert case.number.isdigit()
        before = prompt.split(needle_text)[0].rstrip()
        assert before.endswith((".", "!", "?"))


def test_no_shipped_text_is_both_measured_on_and_asked_about():
    haystacks = haystack_texts()
    assert len(haystacks) >= 3
    measured = [document.text for document in default_texts()]
    for text in haystacks.values():
        sentences = [part.strip() for part in text.split(". ") if len(part) > 80]
        assert len(sentences) > 30
        for other in measured:
            assert not any(sentence in other for sentence in sentences)


def test_a_tokenizer_without_a_chat_template_gets_plain_text():
    plain = SpyTokenizer()
    plain.chat_template = None  # type: ignore[assignment]
    (case,) = make_needle_cases(plain, 1, 200)
    assert plain.seen[case.input_ids].startswith("Read the text")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("1234567", True),
        ("1234567.", True),
        ("it is 1,234,567, I think", True),
        ("12 34 567", True),
        ("123456", False),
        ("12345678", False),
        ("91234567", False),
        ("1234568", False),
        ("1.234567", False),
        ("", False),
    ],
)
def test_found_means_digit_for_digit(answer, found):
    assert case_with("1234567").is_found(answer) is found


def test_no_questions_and_no_texts_are_refused(tokenizer):
    with pytest.raises(InputError, match="at least 1"):
        make_needle_cases(tokenizer, 0, 400)
    with pytest.raises(InputError, match="no text"):
        make_needle_cases(tokenizer, 1, 400, texts={})


def test_lengths_that_cannot_be_met_are_refused(tokenizer):
    with pytest.raises(InputError, match="needle fits into 10 tokens"):
        make_needle_cases(tokenizer, 1, 10)
    with pytest.raises(InputError, match="cannot be made 400 tokens long from short"):
        make_needle_cases(tokenizer, 1, 400, texts={"short": "One two three four five."})


def test_a_text_that_holds_every_key_is_refused(tokenizer):
    with pytest.raises(InputError, match="holds every key"):
        make_needle_cases(tokenizer, 1, 100, texts={"all": " ".join(KEYS) * 20})
