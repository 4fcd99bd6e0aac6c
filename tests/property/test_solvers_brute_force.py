"""Every solver against every choice there is, on problems small enough to try them all."""

from __future__ import annotations

import numpy as np
import pytest
from factories import (
    algorithm_1,
    make_problem,
    random_concave_problem,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.problem import AllocationProblem, Sense, Termination
from kvalloc.problem.registry import get_solver
from kvalloc.testing import brute_force

CONCAVE = 250


def assert_optimal(problem: AllocationProblem, answer: CheckedSolution, best: float) -> None:
    slack = 1e-12 if problem.sense is Sense.MAX_VALUE else 0.0
    assert abs(answer.objective - best) <= slack
    assert answer.bound == answer.objective
    assert answer.gap == 0
    assert answer.termination is Termination.OPTIMAL


def known_best(problem: AllocationProblem) -> float:
    best = brute_force(problem)
    assert best is not None  # the factory only poses problems that have an answer
    return best.objective


def test_greedy_is_algorithm_1_step_by_step() -> None:
    """The threshold takes the same steps as the heap, up to the order of equal gains."""
    for seed in range(1000, 1000 + CONCAVE):
        problem = random_concave_problem(seed)
        answer = solve_problem(problem, get_solver("greedy"))
        literal = algorithm_1(problem)
        # Zero gains are taken by both while there is room, so even the costs agree.
        assert answer.cost_bytes == problem.cost(literal)
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


@settings(max_examples=60, deadline=None)
@given(
    units=st.lists(
        st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    share=st.floats(0, 1),
)
def test_ilp_takes_ragged_options_and_unequal_costs(
    units: list[list[tuple[float, int]]], share: float
) -> None:
    width = max(len(unit) for unit in units)
    values, costs = np.zeros((len(units), width)), np.zeros((len(units), width), dtype=np.int64)
    for u, unit in enumerate(units):
        values[u, : len(unit)] = [value for value, _ in unit]
        costs[u, : len(unit)] = np.cumsum([cost for _, cost in unit])
    probe = {"costs": costs, "tokens": costs, "counts": [len(unit) for unit in units]}
    low = int(costs[:, 0].sum())
    high = int(sum(costs[u, len(unit) - 1] for u, unit in enumerate(units)))
    problem = make_problem(values, capacity=low + int(share * (high - low)), **probe)
    assert_optimal(problem, solve_problem(problem, get_solver("ilp")), known_best(problem))


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
