"""Every solver against every choice there is, on problems small enough to try them all."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from factories import (
    algorithm_1,
    make_problem,
    random_concave_problem,
    random_hard_problem,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError
from kvalloc.problem import AllocationProblem, Sense, Solver, Termination
from kvalloc.problem.registry import get_solver
from kvalloc.testing import brute_force

CONCAVE = 250
HARD = 150

RULES: list[tuple[str, dict[str, object]]] = [
    ("uniform", {}),
    ("pyramid", {}),
    ("pyramid", {"beta": 3.0}),
    ("adaptive_head", {}),
    ("adaptive_head", {"alpha": 0.5, "safeguard": "floor"}),
]


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


@functools.cache
def concave(seed: int) -> tuple[AllocationProblem, float]:
    """A problem and its optimum, which several tests share."""
    problem = random_concave_problem(seed)
    return problem, known_best(problem)


@functools.cache
def hard(seed: int) -> tuple[AllocationProblem, float]:
    problem = random_hard_problem(seed)
    return problem, known_best(problem)


@pytest.mark.parametrize(
    ("name", "posed", "count"),
    [("greedy", concave, CONCAVE), ("ilp", concave, CONCAVE), ("ilp", hard, HARD)],
)
def test_exact_solvers_reach_the_optimum(name: str, posed: Any, count: int) -> None:
    solver, non_concave = get_solver(name), 0
    for seed in range(count):
        problem, best = posed(seed)
        non_concave += not problem.is_concave
        assert_optimal(problem, solve_problem(problem, solver), best)
    assert posed is concave or non_concave > HARD // 2  # else this test tests nothing


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


def one_head_each(problem: AllocationProblem, seed: int) -> AllocationProblem:
    """The same units as KV heads of one or several layers, which adaptive_head needs."""
    rng = np.random.default_rng(seed)
    layers = np.sort(rng.integers(0, max(1, problem.n_units // 2) + 1, problem.n_units))
    return problem.replace(layers=layers, heads=np.arange(problem.n_units, dtype=np.int64))


@pytest.mark.parametrize(("name", "options"), RULES)
def test_rules_are_never_better_than_the_optimum(name: str, options: dict[str, object]) -> None:
    solver = get_solver(name, **options)
    posed = ((one_head_each(concave(seed)[0], seed), concave(seed)[1]) for seed in range(CONCAVE))
    assert sum(check_rule(problem, solver, best) for problem, best in posed) > 0.9 * CONCAVE
    if name == "uniform":  # takes any problem
        solved = (check_rule(hard(seed)[0], solver, hard(seed)[1]) for seed in range(HARD))
        assert sum(solved) > HARD // 2


def check_rule(problem: AllocationProblem, solver: Solver, best: float) -> bool:
    try:
        answer = solve_problem(problem, solver)
    except InfeasibleError as error:
        # A rule may not be able to meet a target that a free choice meets: it says what it can.
        assert problem.sense is Sense.MIN_COST
        nearest = float("nan" if error.nearest is None else error.nearest)
        assert nearest < problem.lowest_accepted_value
        return False
    assert answer.termination is Termination.HEURISTIC
    assert answer.bound_source == "dual"
    if problem.sense is Sense.MAX_VALUE:
        assert answer.objective <= best + 1e-12
        assert best <= answer.bound + 1e-12
    else:
        assert answer.objective >= best >= answer.bound
    return True


@settings(max_examples=60)
@given(
    gains=st.lists(
        st.lists(st.sampled_from([0.0, 1e-9, 0.25, 0.5, 1.0]), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    share=st.floats(0, 1),
    target=st.booleans(),
)
def test_ties_and_flat_curves_are_solved_exactly(
    gains: list[list[float]], share: float, target: bool
) -> None:
    ordered = -np.sort(-np.array(gains), axis=1)
    values = np.concatenate([np.zeros((len(gains), 1)), np.cumsum(ordered, axis=1)], axis=1)
    if target:
        problem = make_problem(values, target=share * float(values[:, -1].sum()))
    else:
        problem = make_problem(values, capacity=int(share * 3 * len(gains)))
    best = known_best(problem)
    for name in ("greedy", "ilp"):
        assert_optimal(problem, solve_problem(problem, get_solver(name)), best)


@settings(max_examples=60)
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
