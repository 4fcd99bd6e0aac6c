"""Metrics against values worked out by hand, and their intervals against SciPy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap

from kvalloc.errors import InputError
from kvalloc.prompts.cases import Turn
from kvalloc.prompts.intervals import CONFIDENCE, RESAMPLES, interval
from kvalloc.prompts.metrics import METRICS, classification, contained

# Metrics against values worked out by hand


CALL_A = '{"name": "a", "arguments": {"x": 1, "y": "u"}}'
CALL_B = '{"name": "b", "arguments": {}}'
LABELS = ("date", "place", "name", "place name")


@pytest.mark.parametrize(
    ("metric", "said", "answers", "expected"),
    [
        # 2 common words of 3 said (the article is dropped) and of 4 right ones: 2*(2/3)(2/4)/(7/6)
        ("f1", "The quick fox ran", ["quick red fox jumps"], 4 / 7),
        # a word counts as often as it stands in both: 1 of 3 and 1 of 1
        ("f1", "no no no", ["No!"], 0.5),
        ("f1", "yes", ["no", "yes"], 1.0),
        ("f1", "", ["no"], 0.0),
        # longest common subsequence "the cat on mat": 4 of 5 and 4 of 6
        ("rouge-l", "the cat was on mat", ["the cat sat on the mat"], 2 * 4 / (5 + 6)),
        ("rouge-l", "b a", ["a b"], 0.5),
        ("rouge-l", "", ["a b"], 0.0),
        # 2 M / T with M = 6 ("return" and a blank and so on): "x = 1" against "x = 2", 2*4/10
        ("edit", "\n\n# a note\nx = 1\nx = 2", ["x = 2"], 0.8),
        ("edit", "`x`", ["x"], 0.0),
        ("retrieval", "Paragraph 3", ["Paragraph 3"], 1.0),
        ("retrieval", "3 or 13 or 3 or 4", ["Paragraph 3"], 0.5),
        ("retrieval", "none", ["Paragraph 3"], 0.0),
        ("count", "5 of 9", ["5"], 0.5),
        ("exact", "The  Answer.", ["answer"], 1.0),
        ("exact", "answers", ["answer"], 0.0),
        ("contains", "it is 1 234 567.", ["1234567"], 1.0),
        ("contains", "it is 91234567, 12345678, 1.234567 or 123456.", ["1234567"], 0.0),
        ("contains", "", ["1234567"], 0.0),
        ("all", "ABC and XYZ", ["ABC", "DEF", "xyz", "GHI"], 0.5),
        # the order of arguments and of calls, other fields and the text around do not count
        ("call", f"So: [{CALL_B}, {CALL_A}] done {{", [f"[{CALL_A}, {CALL_B}]"], 1.0),
        ("call", '{"c": [{"arguments": {"y": "u", "x": 1}, "i": 7, "name": "a"}]}', [CALL_A], 1.0),
        # a call that is missing, too many, or has another type, value, name or argument does
        ("call", CALL_A, [f"[{CALL_A}, {CALL_B}]"], 0.0),
        ("call", f"{CALL_A} {CALL_A}", [CALL_A], 0.0),
        ("call", CALL_A.replace("1", '"1"'), [CALL_A], 0.0),
        ("call", CALL_A.replace("u", "U"), [CALL_A], 0.0),
        ("call", CALL_A.replace('"a"', '"c"'), [CALL_A], 0.0),
        ("call", CALL_A.replace("}}", ', "z": 0}}'), [CALL_A], 0.0),
        ("call", CALL_A[:-1], [CALL_A], 0.0),
        ("call", '{"a":' * 5000, [CALL_A], 0.0),
    ],
)  # fmt: skip
def test_by_hand(metric, said, answers, expected):
    assert METRICS[metric].score(said, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("said", "right", "expected"),
    [
        ("date", "date", 1.0),
        ("date or place", "date", 0.5),
        ("place name", "place name", 1.0),  # "place" and "name" are parts of the right label
        ("place name", "place", 1 / 3),  # "name" and "place name" were said too
        ("nothing", "date", 0.0),
    ],
)
def test_classification_counts_the_labels_that_were_said(said, right, expected):
    assert classification(said, right, LABELS) == pytest.approx(expected)


@settings(max_examples=30)
@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4))
def test_scores_are_shares_and_a_right_answer_is_right(said, answers):
    for name in ("contains", "exact", "f1", "rouge-l", "edit", "all"):
        assert 0.0 <= METRICS[name].score(said, answers) <= 1.0
    assert METRICS["exact"].score(answers[0], answers) == 1.0
    assert contained(f"x {answers[0]} x", answers[0])


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(InputError, match="no metric 'bleu'; choose from: contains"):
        Turn(answers=("date",), metric="bleu").score("date")
    with pytest.raises(InputError, match="'three' is not 'Paragraph N'"):
        METRICS["retrieval"].score("3", ["three"])
    with pytest.raises(InputError, match="'add 1' holds no JSON object"):
        METRICS["call"].score("", ["add 1"])


def test_only_the_first_line_counts_where_that_is_so():
    turn = Turn(answers=("date",), metric="contains", first_line=True)
    assert turn.score("place\nType: date") == 0.0
    assert turn.score("\ndate\nplace") == 1.0
    assert Turn().score("date") is None
    assert Turn(answers=("a", "b"), metric="all").is_found("a b")
    assert not Turn(answers=("a", "b"), metric="all").is_found("a")


# Bootstrap intervals against SciPy's, and against the normal approximation


VALUES = np.random.default_rng(0).gamma(1.0, size=400)


def test_it_is_that_of_scipy():
    found = bootstrap(
        (VALUES,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, batch=50,
        method="percentile", rng=np.random.default_rng(7),
    ).confidence_interval  # fmt: skip
    ends = interval([VALUES], seed=7)
    assert ends == pytest.approx([found.low, found.high], abs=1e-12)


def test_prompts_are_drawn_within_their_task_and_columns_together():
    tasks = [np.array([1.0, 1.0]), np.array([4.0, 4.0, 4.0])]
    assert interval(tasks) == [2.5, 2.5]
    pairs = [np.column_stack([VALUES, 2 * VALUES])]
    assert interval(pairs, lambda means: means[:, 0] / means[:, 1]) == pytest.approx([0.5, 0.5])


def test_what_is_not_known_has_none():
    assert interval([]) is None
    assert interval([VALUES, VALUES[:1]]) is None
    zero = np.zeros((3, 2))
    assert interval([zero], lambda means: means[:, 0] / means[:, 1]) is None
