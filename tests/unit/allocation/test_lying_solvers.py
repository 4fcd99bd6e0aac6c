"""A plug-in is not trusted: everything it says is computed again."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from factories import make_problem, make_scores
from scripted_solver import OPTIMAL, Answer, Scripted, says

from kvalloc.allocation.decision import solve
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import AllocationProblem, GroupCap, Solution
from kvalloc.problem.registry import get_solver

VALUES = [[0.0, 0.5, 0.75], [0.0, 0.25, 0.375]]
PROBLEM = make_problem(VALUES, capacity=2)  # the optimum is (2, 0) or (1, 1), worth 0.75
TARGET = make_problem(VALUES, target=0.6)  # the optimum costs 2


def raises(problem: AllocationProblem) -> Any:
    raise ZeroDivisionError("first line\nsecond line")


def changes_the_values(problem: AllocationProblem) -> Solution:
    problem.values[:] = 100.0
    return says(np.array([0, 0]))(problem)


def changes_a_field(problem: AllocationProblem) -> Solution:
    problem.capacity_bytes = 10**9  # type: ignore[misc]
    return says(np.array([2, 2]))(problem)


GOOD = np.array([1, 1])

LIES: dict[str, tuple[AllocationProblem, Answer, str]] = {
    "wrong objective": (PROBLEM, says(GOOD, objective=0.8), "an objective of 0.8; it is 0.75"),
    "objective NaN": (PROBLEM, says(GOOD, objective=float("nan")), "an objective of nan"),
    "objective text": (PROBLEM, says(GOOD, objective="0.75"), "no sound Solution"),
    "value given as cost": (TARGET, says(GOOD, objective=0.75), "objective of 0.75; it is 2"),
    "over capacity": (PROBLEM, says(np.array([2, 1])), "spends 3 bytes of a capacity of 2"),
    "below target": (TARGET, says(np.array([1, 0])), "reaches 0.5, below the target of 0.6"),
    "too short": (PROBLEM, says(np.array([1]), objective=0.5), r"shaped \(1,\), expected"),
    "not whole": (PROBLEM, says(np.array([1.0, 1.0]), objective=0.75), "choice of float64"),
    "negative": (PROBLEM, says(np.array([-1, 0])), "chose option -1 of unit 0, which has 3"),
    "beyond the end": (PROBLEM, says(np.array([0, 3]), objective=0.0), "option 3 of unit 1"),
    "bound beaten": (PROBLEM, says(GOOD, bound=0.7), "0.7, which its own choice of 0.75 beats"),
    "cost bound beaten": (TARGET, says(GOOD, bound=3.0), "3, which its own choice of 2 beats"),
    "bound NaN": (PROBLEM, says(GOOD, bound=float("nan")), "bound of nan"),
    "loose bound": (PROBLEM, says(GOOD, bound=0.9, termination=OPTIMAL), "to be optimal"),
    "loose cost bound": (TARGET, says(GOOD, bound=1.0, termination=OPTIMAL), "to be optimal"),
    "false bound": (
        PROBLEM,
        says(np.array([0, 0]), bound=0.0, termination=OPTIMAL),
        r"bound of 0, but a choice of 0\.\d+ exists",
    ),
    "false cost bound": (
        TARGET,
        says(np.array([2, 2]), bound=4.0, termination=OPTIMAL),
        "bound of 4, but a choice of [23] exists",
    ),
    "no bound": (PROBLEM, says(GOOD, termination=OPTIMAL), "optimal without a bound"),
    "nothing": (PROBLEM, lambda problem: None, "no sound Solution"),
    "a bare choice": (PROBLEM, lambda problem: GOOD, "no sound Solution"),
    "raises": (PROBLEM, raises, "scripted failed: ZeroDivisionError: first line second line"),
    "changes the values": (PROBLEM, changes_the_values, "scripted failed: ValueError"),
    "changes the capacity": (PROBLEM, changes_a_field, "scripted failed: FrozenInstanceError"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_in_one_line(lie: str) -> None:
    problem, answer, words = LIES[lie]
    with pytest.raises(SolverError, match=words) as caught:
        solve_problem(problem, Scripted(answer))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_same_answers_told_truly_are_accepted() -> None:
    best = solve_problem(PROBLEM, Scripted(says(GOOD, bound=0.75, termination=OPTIMAL)))
    assert (best.objective, best.bound, best.gap, best.cost_bytes) == (0.75, 0.75, 0.0, 2)
    poor = solve_problem(PROBLEM, Scripted(says(np.array([0, 0]))))
    assert (poor.objective, poor.bound, poor.bound_source) == (0.0, 0.75, "dual")
    assert poor.gap == 1.0
    loose = solve_problem(PROBLEM, Scripted(says(GOOD, bound=5.0)))
    assert (loose.bound, loose.bound_source) == (0.75, "dual")
    smaller = says(GOOD.astype(np.int32), bound=0.75, termination=OPTIMAL)
    assert solve_problem(PROBLEM, Scripted(smaller)).objective == 0.75


@pytest.mark.parametrize(
    ("able", "words"),
    [
        (False, "scripted cannot solve this problem"),
        ("", "scripted cannot solve this problem"),
        (None, "scripted cannot solve this problem"),
        ("too hard; use ilp", "^too hard; use ilp$"),
        (RuntimeError("boo"), "scripted failed: RuntimeError: boo"),
    ],
)
def test_a_refusal_is_passed_on(able: Any, words: str) -> None:
    with pytest.raises(SolverError, match=words):
        solve_problem(PROBLEM, Scripted(says(GOOD), able=able))


def test_a_solver_is_not_asked_what_cannot_be() -> None:
    never = Scripted(raises)
    with pytest.raises(InfeasibleError, match="ask for at most that") as caught:
        solve_problem(make_problem(VALUES, target=1.2), never)
    assert caught.value.nearest == 1.125
    with pytest.raises(InfeasibleError, match="below the floors") as caught:
        solve_problem(make_problem(VALUES, capacity=3, protected_tokens=2), never)
    assert caught.value.nearest == 4


def test_interrupting_is_not_failing() -> None:
    def interrupted(problem: AllocationProblem) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve_problem(PROBLEM, Scripted(interrupted))


def test_a_constraint_that_a_solver_breaks_or_does_not_know() -> None:
    cap = GroupCap(name="device 0", units=(0,), capacity_bytes=1)
    capped = dataclasses.replace(PROBLEM, constraints=(cap,))
    with pytest.raises(SolverError, match="breaks a constraint: device 0 takes 2 bytes of 1"):
        solve_problem(capped, Scripted(says(np.array([2, 0]))))
    with pytest.raises(SolverError, match="greedy does not handle cap"):
        solve_problem(capped, get_solver("greedy"))


def test_solve_checks_a_solver_object_too() -> None:
    scores = make_scores()
    floors = Scripted(lambda problem: says(np.zeros(3, dtype=np.int64), objective=9.0)(problem))
    with pytest.raises(SolverError, match="reports an objective of 9"):
        solve(scores, budget=0.5, solver=floors)
