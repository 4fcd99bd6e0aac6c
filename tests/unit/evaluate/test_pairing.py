"""Paired comparisons against values worked out by hand, and what pairing is for."""

import json

import pytest
from factories import make_shape

from kvalloc.errors import InputError
from kvalloc.evaluate.pairing import compare, rows
from kvalloc.evaluate.result_file import evaluation_of
from kvalloc.evaluate.scoring import ALL_TASKS, FULL, Outcome, Score, row
from kvalloc.formats.evaluation import Evaluation
from kvalloc.prompts.cases import Case, Turn


def outcome(kl, score=None):
    kls = kl if isinstance(kl, tuple) else (kl,)
    agrees = tuple(None if kl is None else kl < 2 for kl in kls)
    return Outcome(
        answers=("x",), kls=(kls,), agrees=(agrees,), nll=None, score=score, exact_match=score,
        retained_bytes=10, full_bytes=40, kept_bytes=10, bytes_at_16_bits=6,
        full_bytes_at_16_bits=20, prefill_seconds=1.0, decoded_tokens=3, decode_seconds=1.0,
    )  # fmt: skip


def score_of(name, kls, scores=None, task="t"):
    values = [None] * len(kls) if scores is None else scores
    outcomes = tuple(outcome(kl, value) for kl, value in zip(kls, values, strict=True))
    return Score(name=name, task=task, context=64, outcomes=outcomes)


def test_means_over_prompts_then_over_tasks():
    mine = [score_of("a", [1.0, 3.0], [1.0, 0.0]), score_of("a", [4.0, 4.0, 4.0], task="u")]
    other = [score_of("b", [2.0, 4.0], [0.0, 0.0]), score_of("b", [1.0, 1.0, 1.0], task="u")]
    result = compare(mine, other)
    # means a: (2 + 4) / 2 = 3; b: (3 + 1) / 2 = 2
    assert result["against"] == "b"
    assert result["kl_difference"] == pytest.approx(1.0)
    assert result["kl_ratio"] == pytest.approx(1.5)
    assert result["score_difference"] == pytest.approx(0.5)
    # every prompt differs by -1 in the first task and by 3 in the second: nothing is uncertain
    assert result["kl_difference_ci95"] == pytest.approx([1.0, 1.0])
    low, high = result["kl_ratio_ci95"]
    # the first task's means are 1, 2 or 3 and 2, 3 or 4: ratios 5/3, 6/4 and 7/5
    assert (low, high) == pytest.approx((7 / 5, 5 / 3))
    # a agrees on 1 of 2 and 0 of 3, b on 0 of 2 and 3 of 3
    assert result["top1_difference"] == pytest.approx(0.5 / 2 - 1 / 2)


def test_tails_are_pooled_over_the_tokens_of_prompts_and_tasks():
    """Of 400 tokens in two tasks 5 are lost; those before an eviction count for neither."""
    calm, lost = (None, *[0.1] * 198, 0.3), (None, *[0.1] * 194, *[4.0] * 5)
    other = (*[0.2] * 199, 9.0)
    mine = [score_of("a", [calm]), score_of("a", [lost], task="u")]
    theirs = [score_of("b", [other]), score_of("b", [other], task="u")]
    assert row(mine[:1])["p99"] is None  # 199 tokens
    whole = row(mine)
    assert (whole["n_tokens"], whole["p99"], whole["p999"]) == (398, 4.0, None)
    assert whole["top1_agreement"] == pytest.approx((1 + 194 / 199) / 2)
    assert list(whole["by_position"]) == ["0-15", "16-63", "64-255"]
    assert whole["by_position"]["64-255"]["n_tokens"] == 2 * 136
    assert whole["by_position"]["64-255"]["top1_agreement"] == pytest.approx((1 + 131 / 136) / 2)
    both = compare(mine, theirs)
    assert (both["n_tokens"], both["p99_ratio"], both["p999_ratio"]) == (398, 4.0 / 0.2, None)
    assert compare(theirs, mine)["p99_ratio"] == 0.2 / 4.0
    nothing = [score_of("c", [(0.0,) * 200]), score_of("c", [(0.0,) * 200], task="u")]
    assert compare(mine, nothing)["p99_ratio"] is None


def test_what_is_unknown_stays_unknown():
    known = compare([score_of("a", [1.0, None, 2.0])], [score_of("b", [2.0, 5.0, None])])
    assert known["kl_difference"] == -1.0  # of the one prompt that both know
    assert known["kl_difference_ci95"] is None
    assert known["score_difference"] is None
    full = compare(
        [score_of("a", [1.0, 2.0], [1.0, 0.0])], [score_of(FULL, [0.0, 0.0], [1.0, 1.0])]
    )
    assert (full["kl_ratio"], full["kl_ratio_ci95"]) == (None, None)
    assert full["score_difference"] == -0.5
    with pytest.raises(InputError, match="same prompts only"):
        compare([score_of("a", [1.0])], [score_of("b", [1.0, 2.0])])


def scores():
    return [
        score
        for task in ("t", "u")
        for score in (
            score_of(FULL, [0.0, 0.0], [1.0, 1.0], task),
            score_of("a", [1.0, 3.0], [1.0, 0.0], task),
            score_of("b", [2.0, 4.0], [0.0, 0.0], task),
        )
    ]


def test_rows_name_what_they_are_compared_to_and_end_with_all_tasks():
    result = rows(scores())
    assert [(row["task"], row["name"]) for row in result] == [
        (task, name) for task in ("t", "u", ALL_TASKS) for name in (FULL, "a", "b")
    ]
    assert [[one["against"] for one in row["paired"]] for row in result[:3]] == [
        [], [FULL], [FULL, "a"],
    ]  # fmt: skip
    assert result[2]["paired"][1]["kl_difference"] == pytest.approx(1.0)
    last = result[-1]
    assert (last["kl"], last["n"], last["retained_bytes"]) == (3.0, 4, 10)
    assert last["ci95"][0] <= 3.0 <= last["ci95"][1]
    assert len(rows(scores()[:3])) == 3
    json.dumps(result, allow_nan=False)


def test_a_file_holds_every_answer(tmp_path):
    case = Case(input_ids=(1, 2, 3), turns=(Turn(answers=("x",)),), source="text")
    cases = {"t": [case] * 2, "u": [case] * 2}
    result = evaluation_of(make_shape(), scores(), settings={"seed": 1}, profiles={}, cases=cases)
    result.save(tmp_path / "r.json")
    assert Evaluation.load(tmp_path / "r.json") == result
    assert list(result.rows) == rows(scores())
    assert len(result.prompts) == 2 * 2 * 3
    assert result.prompts[0]["prompt_tokens"] == 3
    assert result.prompts[0]["right"] == [["x"]]
