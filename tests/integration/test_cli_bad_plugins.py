"""Solvers that lie, overspend, raise, hang or mumble: one line, exit code 2, nothing written."""

from __future__ import annotations

import time
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import numpy as np
import pytest
from cli_tools import refused, run
from factories import make_scores

from kvalloc.allocation import verification as checking
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem import Solution, Solver, Termination, registry


class Honest(Solver):
    """Floors only, and says so: what the others below are measured against."""

    name: ClassVar[str] = "honest"
    summary: ClassVar[str] = "keeps the floors"

    def solve(self, problem: Any, *, time_limit_seconds: float | None = None) -> Any:
        choice = np.zeros(problem.n_units, dtype=np.int64)
        return self.answer(problem, choice)

    def answer(self, problem: Any, choice: Any) -> Any:
        return Solution(
            choice=choice,
            objective=problem.objective(choice),
            bound=None,
            termination=Termination.HEURISTIC,
            detail="two\nlines",
        )


class Liar(Honest):
    """Claims more than its choice is worth."""

    name: ClassVar[str] = "liar"

    def answer(self, problem: Any, choice: Any) -> Any:
        return Solution(choice=choice, objective=1.0, bound=1.0, termination=Termination.OPTIMAL)


class Raiser(Honest):
    """Fails."""

    name: ClassVar[str] = "raiser"

    def solve(self, problem: Any, *, time_limit_seconds: float | None = None) -> Any:
        raise IndexError("first line\nsecond line")


class Hanger(Honest):
    """Does not come back in time."""

    name: ClassVar[str] = "hanger"

    def solve(self, problem: Any, *, time_limit_seconds: float | None = None) -> Any:
        time.sleep(5.0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_scores(0).save(tmp_path / "s.safetensors")
    ours = dict(registry._group(registry.SOLVERS))
    own = {
        cls.name: EntryPoint(cls.name, f"{__name__}:{cls.__name__}", registry.SOLVERS)
        for cls in (Honest, Liar, Raiser, Hanger)
    }
    monkeypatch.setattr(registry, "_group", lambda group: {**ours, **own})
    monkeypatch.setattr(checking, "GRACE_SECONDS", 0.1)
    return tmp_path


CASES = [
    ("liar", [], ["liar reports an objective of 1; it is"]),
    ("raiser", [], ["raiser failed: IndexError: first line second line", "try another one"]),
    ("hanger", ["--time-limit", "0.1"], ["hanger ignores its time limit", "try another one"]),
]


@pytest.mark.parametrize(("name", "options", "words"), CASES, ids=[case[0] for case in CASES])
def test_solve_refuses_what_it_says(folder, name, options, words):
    asked = ["--budget", "40%", "--solver", name, *options, "-o", folder / "p.json"]
    refused(folder, "solve", folder / "s.safetensors", *asked, words=words)


@pytest.mark.parametrize(("name", "options", "words"), CASES, ids=[case[0] for case in CASES])
def test_compare_goes_on_with_the_others(folder, name, options, words):
    asked = ["--budget", "40%", "--solver", name, "--solver", "ilp", *options, "--json"]
    ran = run("compare", folder / "s.safetensors", *asked)
    assert ran.code == 0, ran.err
    rows = {row["solver"]: row for row in ran.json}
    assert rows["ilp"]["reason"] is None
    for word in words:
        assert word in rows[name]["reason"]


@pytest.mark.parametrize("name", ["liar", "raiser"])
def test_frontier_believes_them_no_more(folder, name):
    asked = ["frontier", folder / "s.safetensors", "--points", "4", "--solver", name]
    assert f"the solver {name} " in refused(folder, *asked)


def test_an_honest_one_is_used_where_it_is_named_and_its_words_are_one_line(folder):
    asked = ["--budget", "40%", "--solver", "honest", "-o", folder / "p.json"]
    assert run("solve", folder / "s.safetensors", *asked).code == 0
    profile = BudgetProfile.load(folder / "p.json")
    assert (profile.solver, profile.decided_by, profile.detail) == ("honest", "honest", "two lines")
    assert profile.termination == "heuristic"
    assert profile.bound is not None
    assert profile.bound > profile.objective
    asked = ["--budget", "40%", "--level", "head", "--max-distinct", "2", "--json"]
    assert run("solve", folder / "s.safetensors", *asked).json["decided_by"] == "ilp"
