"""Needle questions are made by rule, and say what they are."""

from __future__ import annotations

import pytest
from letters import Letters, read

from kvalloc.errors import InputError
from kvalloc.prompts.needle import make_needle_cases
from kvalloc.prompts.splits import split_texts
from kvalloc.prompts.tasks.needles import NEEDLE, QUESTION


def test_they_are_as_long_as_asked_and_the_seed_counts():
    for n_tokens in (1200, 4000):
        cases = make_needle_cases(Letters(), 5, n_tokens, seed=3)
        assert all(n_tokens - 20 <= case.n_tokens <= n_tokens for case in cases)
    assert make_needle_cases(Letters(), 5, 4000, seed=3) == cases
    assert make_needle_cases(Letters(), 5, 4000, seed=4) != cases


def test_depths_and_texts_are_spread_evenly():
    cases = make_needle_cases(Letters(), 8, 9000)
    for index, case in enumerate(cases):
        assert case.depth == pytest.approx((index + 0.5) / 8, abs=0.06)  # half a long sentence
    names = list(split_texts("development"))
    assert [case.source for case in cases] == [names[i % len(names)] for i in range(8)]
    assert len({case.number for case in cases}) == 8


@pytest.mark.parametrize("chat", [True, False])
def test_key_and_number_stand_in_needle_and_question_only(chat):
    for case in make_needle_cases(Letters(chat=chat), 6, 3600):
        prompt = read(case.input_ids)
        needle = NEEDLE.format(key=case.key, number=case.number)
        assert prompt.count(case.number) == prompt.count(needle) == 1
        # needle, question, start of the answer
        assert prompt.casefold().count(case.key) == 3
        assert prompt.endswith(QUESTION.filled(key=case.key).prefix)
        assert len(case.number) == 7
        assert prompt.split(needle)[0].rstrip().endswith((".", "!", "?"))
        assert ("<user>Read the text" in prompt) is chat


@pytest.mark.parametrize(
    ("n_cases", "n_tokens", "said"),
    [(0, 400, "at least 1"), (1, 10, "fits into 10"), (1, 10**6, "cannot be made 1000000 tokens")],
)
def test_what_cannot_be_made_is_refused(n_cases, n_tokens, said):
    with pytest.raises(InputError, match=said):
        make_needle_cases(Letters(), n_cases, n_tokens)
