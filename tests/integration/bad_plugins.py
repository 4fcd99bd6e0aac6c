"""Solvers as nobody should write them: found by name in test_cli_bad_plugins.py."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np

from kvalloc.problem import Solution, Solver, Termination


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
