"""Convex hull and marginal greedy."""

from __future__ import annotations

import numpy as np
import pytest
from exact_cases import hand_problem, medium_problem
from scipy.optimize import linprog

from kvalloc.problem import AllocationProblem, Sense, Termination
from kvalloc.solvers.hull import Hull


def test_a_target_on_paper() -> None:
    """For 10 the first three segments are needed, and they reach it exactly: 8 bytes."""
    solution = Hull().solve(hand_problem(capacity_bytes=None, target=10.0, sense=Sense.MIN_COST))
    assert solution.choice.tolist() == [1, 2, 0]
    assert solution.objective == solution.bound == 8.0
    assert solution.termination is Termination.OPTIMAL


def test_what_is_not_needed_for_a_target_goes_back() -> None:
    """The last segment needed is large, and makes an earlier one of another unit superfluous."""
    problem = hand_problem(
        values=np.array([[0.0, 1.0, 1.0], [0.0, 9.0, 9.0], [0.0, 0.1, 0.2]]),
        costs=np.array([[1, 2, 3], [1, 11, 12], [1, 21, 41]]),
        capacity_bytes=None,
        target=9.0,
        sense=Sense.MIN_COST,
    )
    assert Hull().solve(problem).choice.tolist() == [0, 1, 0]


def relaxation(problem: AllocationProblem) -> float:
    """The linear relaxation, solved by a library."""
    n, k = problem.values.shape
    worth, costs = problem.values.ravel(), problem.costs.ravel().astype(float)
    one = np.kron(np.eye(n), np.ones(k))
    if problem.target is None:
        room = [problem.spendable_bytes]  # what whole pages can use of the capacity
        answer = linprog(-worth, A_ub=costs[None], b_ub=room, A_eq=one, b_eq=np.ones(n))
        return float(-answer.fun)
    answer = linprog(costs, A_ub=-worth[None], b_ub=[-problem.target], A_eq=one, b_eq=np.ones(n))
    return float(answer.fun)


@pytest.mark.parametrize("target", [False, True])
def test_the_bound_is_the_linear_relaxation(target: bool) -> None:
    for seed in range(10):
        problem = medium_problem(seed, n_layers=3, target=target, share=0.2 + 0.05 * seed)
        solution = Hull().solve(problem)
        exact = relaxation(problem)
        if target:  # rounded up to whole pages
            assert 0 <= solution.bound - exact < problem.lattice_bytes + 1
        else:
            assert solution.bound == pytest.approx(exact, rel=1e-9)
