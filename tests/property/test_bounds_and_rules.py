"""Searches and bounds against the published algorithm, simple rules and every choice."""

import dataclasses

import numpy as np
import pytest
from factories import algorithm_1, make_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, KVAllocError
from kvalloc.problem import Aggregate, Sense, Termination
from kvalloc.problem.bounds import dual_bound
from kvalloc.problem.registry import get_solver
from kvalloc.testing import brute_force, tiny_problems
from kvalloc.testing.problems import CURVES, SIDES

# Greedy against the published algorithm, and targets that are met within a tolerance


def test_greedy_is_algorithm_1_step_by_step():
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
def test_a_target_within_tolerance_is_met_by_every_exact_solver_at_the_same_cost(name):
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


# No solver that searches ends below the best simple rule that fits, whatever time it has


SEARCHES = ("auto", "ilp", "dp", "lagrangian", "hull", "max_min")
SCOPES = ("", "worst:")
KINDS = [
    f"{scope}{curves}" + ("" if side == "plain" else f"+{side}")
    for scope in SCOPES
    for side in SIDES
    for curves in CURVES
]


def answer_of(name, problem, seconds=None):
    try:
        return solve_problem(problem, get_solver(name), time_limit_seconds=seconds)
    except KVAllocError:
        return None


def check(problem, case, seconds):
    """Compare each search with equal and proportional budgets; return how many could be."""
    rules = [answer_of(rule, problem) for rule in ("uniform", "proportional")]
    known = [rule.objective for rule in rules if rule is not None]
    compared = 0
    for name in SEARCHES:
        if not known or get_solver(name).can_solve(problem) is not True:
            continue
        if name == "max_min" and problem.aggregate is not Aggregate.WORST:
            continue  # there it is a rule itself
        answer = answer_of(name, problem, seconds)
        assert answer is not None, (name, case)
        for other in known:
            assert not problem.is_better(other, answer.objective, 1e-9), (name, case, known)
        compared += 1
    return compared


@pytest.mark.parametrize(("seed", "seconds"), [(80, 1e-3), (81, None)], ids=["no time", "any time"])
def test_no_search_ends_below_a_simple_rule(seed, seconds):
    """For the sum and the worst unit, under each kind of limit."""
    cases = tiny_problems(len(KINDS), kinds=KINDS, seed=seed)
    assert sum(check(problem, case, seconds) for case, problem in cases) >= 100


# The dual bound is never beaten, and is exact where theory says so


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
def test_no_choice_beats_the_bound(kinds, count, exact):
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


def test_the_worst_unit_bound_knows_ties_weights_and_falling_values():
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
def test_an_infeasible_problem_has_no_bound(goal):
    problem = make_problem([[0, 1], [0, 1]], protected_tokens=2, **goal)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError):
        dual_bound(problem)


@pytest.mark.parametrize("kind", ["losses", "worst:losses"])
def test_another_capacity_has_another_bound(kind):
    """A problem remembers its bound, and what is made of it does not."""
    for _, problem in tiny_problems(4, kinds=[kind], seed=60):
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
