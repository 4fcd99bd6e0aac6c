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
        if "'concave'" in name:  # without ties the units are the same, too
            assert answer.choice.tolist() == literal.tolist(), name


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
