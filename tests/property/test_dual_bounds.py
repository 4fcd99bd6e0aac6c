"""The dual bound is never beaten, and is exact where theory says so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from factories import make_problem

from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate, Sense
from kvalloc.problem.bounds import dual_bound
from kvalloc.testing import brute_force, tiny_problems

CONCAVE = ("concave", "paged", "tied", "weighted")
HARD = ("non_concave", "losses", "unequal_costs", "unequal_options")


@pytest.mark.parametrize(
    ("kinds", "count", "exact"),
    [  # a bound that is always exact is suspicious, and one that never is says little
        (CONCAVE, 300, range(300, 301)),
        (HARD, 300, range(1, 300)),
        (tuple(f"worst:{curves}" for curves in (*CONCAVE, *HARD)), 300, range(300, 301)),
    ],
)
def test_no_choice_beats_the_bound(kinds: tuple[str, ...], count: int, exact: range) -> None:
    """It is exact for concave curves with one step, and for the worst unit of any curves."""
    met = 0
    for name, problem in tiny_problems(count, kinds=kinds, seed=2000):
        optimum = brute_force(dataclasses.replace(problem, constraints=()))
        try:
            dual = dual_bound(problem)
        except InfeasibleError:
            assert optimum is None, name
            continue
        assert dual.multiplier >= 0
        if problem.sense is Sense.MAX_VALUE:
            assert problem.cost(dual.choice) <= problem.capacity_bytes
        assert optimum is not None, name
        sign = 1.0 if problem.sense is Sense.MAX_VALUE else -1.0
        slack = 1e-12 * max(1.0, abs(optimum.objective))
        assert sign * (dual.bound - optimum.objective) >= -slack, name
        met += abs(dual.bound - optimum.objective) <= slack
        if problem.sense is Sense.MIN_COST:
            assert problem.meets_target(problem.objective_value(dual.choice)), name
        if problem.aggregate is Aggregate.WORST:
            assert problem.objective(dual.choice) == pytest.approx(optimum.objective, abs=1e-12)
    assert met in exact


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


@pytest.mark.parametrize("goal", [{"capacity": 3}, {"target": 3.5}], ids=["capacity", "target"])
def test_an_infeasible_problem_has_no_bound(goal: dict[str, float]) -> None:
    problem = make_problem([[0, 1], [0, 1]], protected_tokens=2, **goal)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError):
        dual_bound(problem)


@pytest.mark.parametrize("kind", ["losses", "worst:losses"])
def test_another_capacity_has_another_bound(kind: str) -> None:
    """A problem remembers its bound, and what is made of it does not."""
    for _, problem in tiny_problems(4, kinds=[kind], seed=60, level="head"):
        if problem.sense is Sense.MAX_VALUE:
            before, after = (
                problem.with_capacity(size)
                for size in (problem.max_cost_bytes, problem.min_cost_bytes)
            )
            assert dual_bound(before) is dual_bound(before)
            assert dual_bound(before.with_capacity(after.capacity_bytes or 0)).bound == (
                dual_bound(after).bound
            )
            assert dual_bound(after).bound < dual_bound(before).bound
