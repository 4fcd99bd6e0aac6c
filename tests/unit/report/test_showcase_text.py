"""The demo's tables say what was measured, in 80 columns."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from demo_cases import CASE, make_outcome
from factories import make_scores

from kvalloc.allocation.decision import Attempt, solve
from kvalloc.evaluate.showcase import Asked, Experiment, Ladder, decide
from kvalloc.report.showcase import (
    decision_table,
    harm_at_bytes,
    ladder_table,
    lessons,
    question_tables,
    summary_table,
)

QUESTIONS = SimpleNamespace(cases=(CASE,), full=(make_outcome(kl=0.0),))
SHARES = (0.125, 0.2, 0.3, 0.4, 0.6, 0.8)


@pytest.fixture(scope="module")
def scores():
    return make_scores()


@pytest.fixture(scope="module")
def ask(scores):
    def make(solver: str, answer: str, kl: float | None, same_as=None, share=0.3) -> Asked:
        # greedy retains most whatever the curves
        rule = "greedy" if solver in ("greedy", "ilp") else "uniform"
        profile = solve(scores, budget=0.5, solver=rule)
        known = {"solver": solver, "share": share, "profile": profile, "same_as": same_as}
        return Asked(**known, outcomes=(make_outcome(answer, kl),))

    return make


def test_decisions_of_all_kinds(scores):
    decisions = decide(scores, target_retention=0.9)
    refused = Attempt(solver="never", profile=None, reason="no such luck", seconds=0.0)
    lines = decision_table([*decisions, refused])
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:3] == ["solver", "level", "retention"]
    text = "\n".join(lines)
    assert "* adaptive_head" not in text
    assert "* never: no such luck" in text
    greedy = next(line for line in lines if line.startswith("greedy "))
    assert greedy.split()[-2] == "0.0%"


def test_answers_are_shown_as_they_are(ask):
    asked = [
        ask("uniform", "1234567.", 0.1),
        ask("greedy", "7\n\x1b[31m and then some more words", 0.2),
        ask("pyramid", "", None),
    ]
    lines = question_tables(QUESTIONS, asked)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "1,500 tokens of polk_1845, needle at 42%" in text
    assert "\x1b" not in text
    rows = {line.split()[0]: line for line in lines if line}
    assert " yes " in rows["full"]
    assert " yes " in rows["uniform"]
    assert " no " in rows["greedy"]
    assert "(nothing)" in rows["pyramid"]
    assert "?" in rows["pyramid"]  # an unknown KL is not 0


def test_solvers_with_the_same_budgets_share_a_row(ask):
    twins = [ask(f"a_long_name_{i}", "7", 0.2, same_as="greedy") for i in range(9)]
    asked = [ask("uniform", "1234567.", 0.1), ask("greedy", "7", 0.2), *twins]
    assert "a_long_name" not in "\n".join(question_tables(QUESTIONS, asked))
    lines = summary_table(asked)
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert rows[2][0] == "uniform"
    assert rows[2][2:6] == ["1", "of", "1", "0.100"]
    assert rows[3][2:6] == ["0", "of", "1", "0.200"]
    note = " ".join(lines[4:])
    assert note.startswith("a_long_name_0, ")
    assert note.endswith("the same budgets as greedy, measured once")


def make_ladder(ask, cells: dict[tuple[str, float], str], skipped=()) -> Ladder:
    asked = {(n, s): ask(n, answer, 0.5, share=s) for (n, s), answer in cells.items()}
    return Ladder(shares=SHARES, asked=asked, skipped=list(skipped))


@pytest.mark.parametrize(
    ("found", "missed", "first"),
    [
        ((0.4, 0.6, 0.8), (0.125, 0.2, 0.3), "40%"),
        ((), SHARES, "none"),
        ((0.4,), (), "<=40%"),
        ((), (0.4,), "?"),
        ((0.6, 0.8), (0.4,), "60%"),  # certain once the next smaller share missed some
    ],
)
def test_the_ladder_names_the_first_share_and_what_was_not_asked(ask, found, missed, first):
    cells = {("uniform", s): "1234567" for s in found} | {("uniform", s): "7" for s in missed}
    skipped = [("uniform", s) for s in SHARES if s not in (*found, *missed)]
    lines = ladder_table(make_ladder(ask, cells, skipped), ["uniform"])
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["kept", "12.5%", "20%", "30%", "40%", "60%", "80%", "all", "from"]
    assert lines[2].split()[-1] == first
    assert f"{int(bool(found))}/1 0.50" in lines[2]
    assert len(lines) == 3 + bool(skipped)
    if skipped:
        assert lines[-1].startswith(f"{len(skipped)} of 6 cells were not asked")


def test_a_ladder_without_time_says_so(ask):
    skipped = [("uniform", share) for share in SHARES]
    (line,) = ladder_table(make_ladder(ask, {}, skipped), ["uniform"])
    assert line.startswith("Nothing was asked")


def test_the_ladder_merges_solvers_that_always_agree(ask):
    cells = {("greedy", s): "7" for s in SHARES}
    ladder = make_ladder(ask, cells, [("ilp", 0.8), ("greedy", 0.8)])
    asked = dict(ladder.asked)
    del asked["greedy", 0.8]
    for share in SHARES[:-1]:
        asked["ilp", share] = replace(asked["greedy", share], solver="ilp", same_as="greedy")
    lines = ladder_table(replace(ladder, asked=asked), ["greedy", "ilp"])
    assert lines[3] == "ilp: the same budgets as greedy wherever asked"
    assert lines[4].startswith("1 of 6 cells were not asked")


def an_experiment(asked, by_loss=(), cells=None) -> Experiment:
    cells = cells or {}
    shares = tuple(sorted({share for _, share in cells}))
    return Experiment(
        cases=QUESTIONS.cases,
        full=QUESTIONS.full,
        capacity_bytes=1,
        decisions=(),
        asked=tuple(asked),
        by_loss=tuple(by_loss),
        ladder=Ladder(shares=shares, asked=cells, skipped=[]),
    )


@pytest.mark.parametrize(
    ("uniform", "greedy", "counted", "said"),
    [
        (("1234567", 0.1), ("7", 0.9), "uniform 1, greedy 0", "uniform does least harm"),
        (("7", 0.9), ("1234567", 0.1), "uniform 0, greedy 1", "and here also does least harm"),
    ],
)
def test_lessons_of_harm(ask, uniform, greedy, counted, said):
    asked = [ask("uniform", *uniform), ask("greedy", *greedy)]
    first, second, last = lessons(an_experiment(asked))
    assert first == f"Of 1 needle the full cache found 1; with 30% of the entries: {counted}."
    assert second.startswith("greedy retains most of the attention")
    assert said in second
    assert "weak guide to harm" in second
    assert "--loss" in last


def test_lessons_without_kl(ask):
    first, second, _ = lessons(an_experiment([ask("greedy", "1234567", None)]))
    assert "greedy 1" in first
    assert "KL ?" in second


def test_lessons_of_measured_loss_name_the_best_other_at_every_share(ask):
    asked = [ask("uniform", "7", 0.4), ask("greedy", "7", 0.9)]
    by_loss = [ask("measured loss", "1234567", 0.01), ask("uniform, w32", "7", 0.3)]
    cells = {
        ("measured loss", 0.4): ask("measured loss", "1234567", 0.002, share=0.4),
        ("uniform", 0.4): ask("uniform", "1234567", 0.2, share=0.4),
        ("greedy", 0.4): ask("greedy", "7", 0.5, share=0.4),
        ("greedy", 0.8): ask("greedy", "7", 0.1, share=0.8),
    }
    _, _, at_bytes, at_share, _ = lessons(an_experiment(asked, by_loss, cells))
    assert at_bytes == (
        "Budgets of measured loss at the same bytes find 1 of 1 (KL 0.010); uniform 0 (KL "
        "0.400), uniform, w32 0 (KL 0.300)."
    )
    assert at_share == (
        "At 40%: measured loss 1 of 1 (KL 0.002), the best other uniform 1 (KL 0.200)."
    )


def test_measured_loss_that_does_worse_is_said_too(ask):
    by_loss = [ask("measured loss", "7", 0.8)]
    lines = lessons(an_experiment([ask("uniform", "1234567", 0.1)], by_loss))
    assert "find 0 of 1 (KL 0.800); uniform 1 (KL 0.100)." in lines[2]


def test_harm_of_solvers_that_always_agree_is_one_row(ask):
    at_bytes = tuple(
        ask(name, "7", 0.7, same_as=twin)
        for name, twin in (("uniform", None), ("greedy", None), ("ilp", "greedy"))
    )
    found = harm_at_bytes(an_experiment(at_bytes, [ask("measured loss", "1234567", 0.1)]))
    assert list(found) == ["uniform", "greedy = ilp", "measured loss"]
    assert (found["greedy = ilp"].kl, found["measured loss"].all_found) == (0.7, True)
