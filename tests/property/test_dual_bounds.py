"""The dual bound is never beaten, and is exact where theory says so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from factories import (
    concave_values,
    make_problem,
    random_concave_problem,
    random_hard_problem,
)

from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate, AllocationProblem, Sense
from kvalloc.problem.bounds import best_response, dual_bound, steps_above
from kvalloc.testing import brute_force

SEEDS = range(2000, 2300)


def assert_valid(problem: AllocationProblem) -> tuple[float, float]:
    dual, best = dual_bound(problem), brute_force(problem).objective
    if problem.sense is Sense.MAX_VALUE:
        assert dual.bound >= best - 1e-12
        assert problem.cost(dual.choice) <= problem.capacity_bytes
    else:
        assert dual.bound <= best
        assert problem.meets_target(problem.objective_value(dual.choice))
    assert dual.multiplier >= 0
    return dual.bound, best


def test_the_bound_is_exact_on_concave_problems_with_one_step() -> None:
    for seed in SEEDS:
        problem = random_concave_problem(seed)
        bound, best = assert_valid(problem)
        assert bound == pytest.approx(best, abs=1e-12)


def test_the_bound_holds_on_any_problem() -> None:
    loose = 0
    for seed in SEEDS:
        bound, best = assert_valid(random_hard_problem(seed))
        loose += abs(bound - best) > 1e-9
    assert loose  # duality gaps exist on such problems: a bound that is always exact is suspicious


def test_the_worst_unit_bound_is_the_optimum() -> None:
    for seed in SEEDS:
        make = random_hard_problem if seed % 2 else random_concave_problem
        problem = dataclasses.replace(make(seed), aggregate=Aggregate.WORST)
        if problem.target is not None:
            problem = problem.with_target(0.7 * problem.max_value)
        best = brute_force(problem).objective
        dual = dual_bound(problem)
        assert dual.bound == pytest.approx(best, abs=1e-12)
        assert problem.objective(dual.choice) == pytest.approx(best, abs=1e-12)


def test_the_worst_unit_bound_knows_ties_weights_and_falling_values() -> None:
    """Levels that many options share, units that weigh nothing, values that rise and fall."""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        values = rng.integers(-3, 4, (3, 4)) / 4.0
        if seed % 2:
            values = np.sort(values, axis=1)
        weights = rng.choice([0.0, 0.25, 1.0], 3)
        problem = make_problem(values, capacity=int(rng.integers(0, 10)), weights=weights)
        problem = dataclasses.replace(problem, aggregate=Aggregate.WORST)
        rises = bool(np.all(np.diff(values, axis=1) >= 0))
        assert (problem.best_so_far is problem.values) == rises
        dual = dual_bound(problem)
        assert dual.bound == brute_force(problem).objective
        assert problem.objective(dual.choice) == dual.bound
        assert problem.cost(dual.choice) <= problem.spendable_bytes


def test_bisection_and_looking_at_everything_agree() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        values = concave_values(rng, 5, 40, kind=0)
        problem = make_problem(values, capacity=60, weights=rng.random(5), step=3)
        for price in [0.0, *10.0 ** rng.uniform(-4, 0, 5)]:
            net = problem.weights[:, None] * problem.values - price * problem.costs
            response = best_response(problem, float(price))
            assert response.tolist() == np.argmax(net, axis=1).tolist()


def test_steps_above_a_price_leave_out_those_that_gain_just_that() -> None:
    problem = make_problem([[0, 3, 5, 7, 8], [0, 2, 4, 4, 4]], capacity=3)
    assert steps_above(problem, 2.0).tolist() == [1, 0]
    assert steps_above(problem, np.array([1.0, -1.0])).tolist() == [3, 4]
    assert steps_above(problem, np.array([0.5]), units=np.array([1])).tolist() == [2]
    assert steps_above(problem, 100.0).tolist() == [0, 0]


def test_limits_that_are_known_do_not_change_the_response() -> None:
    rng = np.random.default_rng(7)
    problem = make_problem(concave_values(rng, 6, 50), capacity=100)
    low, high = (steps_above(problem, t) for t in (0.9, 0.1))
    free = steps_above(problem, 0.5)
    held = steps_above(problem, 0.5, low=low, high=high)
    assert free.tolist() == held.tolist()


@pytest.mark.parametrize("goal", [{"capacity": 3}, {"target": 3.5}], ids=["capacity", "target"])
def test_an_infeasible_problem_has_no_bound(goal: dict[str, float]) -> None:
    problem = make_problem([[0, 1], [0, 1]], protected_tokens=2, **goal)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError):
        dual_bound(problem)


def test_an_option_of_nothing_but_floors() -> None:
    """One option a unit: nothing to decide, and the bound says exactly that."""
    for goal in ({"capacity": 4}, {"capacity": 100}, {"target": 0.7}, {"target": 0.1}):
        problem = make_problem([[0.3], [0.4]], protected_tokens=2, **goal)  # type: ignore[arg-type]
        assert dual_bound(problem).bound == (0.7 if "capacity" in goal else 4)
        assert dual_bound(problem).choice.tolist() == [0, 0]
