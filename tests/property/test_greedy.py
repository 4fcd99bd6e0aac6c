"""Greedy against the published algorithm, and targets that are met within a tolerance."""

from __future__ import annotations

import numpy as np
import pytest
from factories import algorithm_1, make_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.problem import Termination
from kvalloc.problem.registry import get_solver
from kvalloc.testing import tiny_problems


def test_greedy_is_algorithm_1_step_by_step() -> None:
    """The threshold takes the same steps as the heap, up to the order of equal gains."""
    kinds = ("concave", "paged", "tied", "weighted")
    for name, problem in tiny_problems(250, kinds=kinds, seed=1000):
        answer = solve_problem(problem, get_solver("greedy"))
        literal = algorithm_1(problem)
        # Zero gains are taken by both while there is room, so even the costs agree.
        assert answer.cost_bytes == problem.cost(literal), name
        assert answer.value == pytest.approx(problem.objective_value(literal), abs=1e-12)


def test_greedy_and_algorithm_1_choose_the_same_units_without_ties() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        gains = -np.sort(-rng.random((6, 30)), axis=1)
        values = np.concatenate([np.zeros((6, 1)), np.cumsum(gains, axis=1)], axis=1)
        goal = {"capacity": 70} if seed % 2 else {"target": 0.7 * float(values[:, -1].sum())}
        problem = make_problem(values, **goal)  # type: ignore[arg-type]
        answer = solve_problem(problem, get_solver("greedy"))
        assert answer.choice.tolist() == algorithm_1(problem).tolist()


@pytest.mark.parametrize("name", ["greedy", "ilp"])
def test_a_target_within_tolerance_is_met_by_every_exact_solver_at_the_same_cost(
    name: str,
) -> None:
    """A target of 1 with a tail of gains below the tolerance: the bound must not exceed the cost.

    Values within 1e-12 of a target meet it, so bound and integer program have to aim there too.
    """
    gains = np.concatenate([np.linspace(1, 0.1, 50), np.full(50, 1e-12)])
    curve = np.concatenate([[0.0], np.cumsum(gains)])
    problem = make_problem(np.stack([curve / curve[-1]] * 4), weights=[0.25] * 4, target=1.0)
    answer = solve_problem(problem, get_solver(name))
    assert answer.termination is Termination.OPTIMAL
    assert answer.objective == problem.cost(algorithm_1(problem)) < 400
    assert answer.bound == answer.objective
