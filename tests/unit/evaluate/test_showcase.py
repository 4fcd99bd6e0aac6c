"""The demo's experiment, with cases instead of a model."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from demo_cases import CASE, make_outcome
from factories import make_scores

from kvalloc.allocation.decision import solve
from kvalloc.errors import SolverError
from kvalloc.evaluate import showcase
from kvalloc.evaluate.showcase import (
    NO_TIME,
    Asked,
    Questions,
    ask_each,
    climb,
    decide,
    rules_of,
)
from kvalloc.solvers.greedy import Greedy

SHARES = (0.2, 0.4, 0.6, 0.8)


@pytest.fixture
def scores():
    return make_scores()


class FakeQuestions(Questions):
    """Finds the needle from a certain share on, and counts."""

    def __init__(self, finds_from: float, seconds: float = 0.0) -> None:
        super().__init__(None, None, [])  # type: ignore[arg-type]
        self.finds_from = finds_from
        self.last_seconds = seconds
        self.order: list[tuple[str, float]] = []

    def ask(self, solver, share, profile):
        self.order.append((solver, share))
        answer = "1234567" if share >= self.finds_from else "7"
        return Asked(solver=solver, share=share, profile=profile, outcomes=(make_outcome(answer),))


def forever() -> float:
    return time.monotonic() + 1000


def climbed(scores, questions, names=("uniform",), *, seconds=1000, **options):
    deadline = time.monotonic() + seconds
    levels = {name: "head" if name == "adaptive_head" else "layer" for name in names}
    return climb(
        rules_of(scores, levels), questions, **{"shares": SHARES, **options}, deadline=deadline
    )


def test_a_solver_that_cannot_is_listed_with_its_reason(scores, monkeypatch):
    def refuse(*args, **options):
        raise SolverError("not today")

    monkeypatch.setattr(Greedy, "solve", refuse)
    (greedy,) = [one for one in decide(scores, budget=0.5) if one.solver == "greedy"]
    assert greedy.profile is None
    assert "not today" in greedy.reason


def test_equal_budgets_are_asked_once(scores, monkeypatch):
    calls = []

    def measured(*_):
        calls.append(1)
        return SimpleNamespace(outcome=make_outcome())

    monkeypatch.setattr(showcase, "measure", measured)
    questions = Questions(None, None, [CASE])  # type: ignore[arg-type]
    profiles = {name: solve(scores, budget=0.5, solver=name) for name in ("greedy", "uniform")}
    first = questions.ask("greedy", 0.5, profiles["greedy"])
    again = questions.ask("ilp", 0.5, profiles["greedy"])
    own = questions.ask("greedy", 0.5, profiles["greedy"])
    other = questions.ask("uniform", 0.5, profiles["uniform"])
    asked = (first, again, own, other)
    assert [one.same_as for one in asked] == [None, "greedy", None, None]
    assert again.outcomes is first.outcomes
    assert len(calls) == 1 + 2  # the full cache, and each budgets once


def test_every_solver_that_can_be_applied_is_asked(scores):
    decisions = decide(scores, budget=0.5)
    asked, missing = ask_each(decisions, 0.5, FakeQuestions(0.4), deadline=forever())
    assert {entry.solver for entry in asked} == {d.solver for d in decisions if d.profile}
    assert "adaptive_head" in {entry.solver for entry in asked}
    assert {entry.solver for entry in asked} | set(missing) == {d.solver for d in decisions}


def test_without_time_the_first_two_are_asked_all_the_same(scores):
    decisions = decide(scores, budget=0.5)
    questions = FakeQuestions(0.4, seconds=10.0)
    asked, missing = ask_each(decisions, 0.5, questions, deadline=time.monotonic())
    assert [entry.solver for entry in asked] == ["uniform", "greedy"]
    assert missing["pyramid"] == NO_TIME


@pytest.mark.parametrize("names", [["uniform", "greedy"], ["uniform", "adaptive_head"]])
def test_the_ladder_is_climbed_whole_where_there_is_time(scores, names):
    """Rules of single heads climb, too."""
    questions = FakeQuestions(finds_from=0.6)
    ladder = climbed(scores, questions, names)
    assert set(ladder.asked) == {(name, share) for name in names for share in SHARES}
    assert ladder.skipped == []
    assert ladder.first_share("uniform") == 0.6
    assert len(questions.order) == len(set(questions.order)) == 8


@pytest.mark.parametrize("finds_from", [0.1, 0.2, 0.4, 0.6, 0.8, 2.0])
def test_bisection_comes_first(scores, finds_from):
    questions = FakeQuestions(finds_from)
    climbed(scores, questions)
    asked = [share for _, share in questions.order[:3]]
    assert asked[0] == 0.6
    below = [share for share in SHARES if share < finds_from]
    above = [share for share in SHARES if share >= finds_from]
    # after three of four rungs both neighbours of the answer are known
    assert not below or below[-1] in asked
    assert not above or above[0] in asked


def test_what_there_is_no_time_for_is_said(scores):
    questions = FakeQuestions(finds_from=0.6, seconds=10.0)
    ladder = climbed(scores, questions, seconds=5)
    assert ladder.asked == {}
    assert sorted(ladder.skipped) == [("uniform", share) for share in SHARES]
    assert ladder.first_share("uniform") is None


def test_progress_counts_seconds_up_to_the_deadline(scores):
    seen = []
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    climbed(scores, FakeQuestions(0.6), seconds=100, progress=progress)
    assert {total for _, total in seen} == {100}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (100, 100)


def test_found_and_kl_are_taken_from_the_outcomes(scores):
    profile = solve(scores, budget=0.5)
    outcomes = (make_outcome("1234567", 0.25), make_outcome("12", 0.75), make_outcome("1", None))
    asked = Asked(solver="greedy", share=0.5, profile=profile, outcomes=outcomes)
    assert (asked.n_found, asked.kl, asked.all_found) == (1, 0.5, False)
    unknown = Asked(solver="greedy", share=0.5, profile=profile, outcomes=outcomes[2:])
    assert unknown.kl is None


@pytest.mark.parametrize(("limit", "prompts"), [(500, 4), (180, 2), (99, None)])
def test_losses_are_measured_on_as_many_prompts_as_fit(monkeypatch, limit, prompts):
    """A prompt takes 70 s: 280 for all four, 140 for two of them."""
    clock = [0.0]

    def measured(loaded, n_prompts, context_tokens, progress, plan):
        for done in range(1, 7 * n_prompts + 1):
            clock[0] += 10
            progress(done, 7 * n_prompts)
        return n_prompts

    monkeypatch.setattr(showcase, "_profile_losses", measured)
    monkeypatch.setattr(showcase.time, "monotonic", lambda: clock[0])
    assert showcase.profile_losses(None, 4, 100, deadline=limit) == prompts
    assert clock[0] <= limit
