"""PrefixKV against hand-computed cases, and the worst unit against brute force."""

import dataclasses

import numpy as np
import pytest
from factories import concave_values, make_problem

from kvalloc.allocation.decision import solve_problem
from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate, GroupCap, SameBudget, Termination
from kvalloc.problem.registry import get_solver

MAX_MIN = get_solver("max_min")
STEEP = [0.0, 0.8, 0.9, 1.0]
FLAT = [0.0, 0.4, 0.7, 1.0]


def worst(values, **changes):
    return make_problem(values, aggregate=Aggregate.WORST, **changes)


@pytest.mark.parametrize(
    ("capacity", "choice"),
    [
        (2, [1, 1]),  # p = 0.4
        (3, [1, 2]),  # p = 0.7: the flat one needs 2
        (4, [1, 3]),  # p = 0.8: the flat one has no 0.8, it needs all
        (5, [2, 3]),
        (6, [3, 3]),
        (0, [0, 0]),
    ],
)
def test_the_published_rule_by_hand(capacity, choice):
    problem = make_problem([STEEP, FLAT], capacity=capacity)
    assert solve_problem(problem, MAX_MIN).choice.tolist() == choice


def test_the_rule_looks_at_shares_whatever_the_mass_and_weight():
    problem = make_problem([[0.0, 8.0, 9.0, 10.0], FLAT], capacity=3, weights=[0.1, 5.0])
    answer = solve_problem(problem, MAX_MIN)
    assert answer.choice.tolist() == [1, 2]
    assert answer.termination is Termination.HEURISTIC
    assert answer.bound_source == "dual"


def test_what_is_left_goes_to_the_lowest_that_can_use_it():
    # p = 0.5 takes 2 entries; with the third, unit 0 cannot reach the next level (it needs two
    # more), unit 1 can rise.
    problem = make_problem([[0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.6, 1.0]], capacity=3)
    assert solve_problem(problem, MAX_MIN).choice.tolist() == [1, 2]


def test_entries_that_are_worth_nothing_stay_unspent():
    problem = make_problem([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]], capacity=6)
    assert solve_problem(problem, MAX_MIN).choice.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("target", "choice"), [(1.2, [1, 1]), (1.5, [1, 2]), (1.8, [1, 3]), (2.0, [3, 3])]
)
def test_the_lowest_level_that_meets_a_target(target, choice):
    problem = make_problem([STEEP, FLAT], target=target)
    assert solve_problem(problem, MAX_MIN).choice.tolist() == choice


def test_of_the_last_rows_only_as_many_rise_as_the_target_needs():
    problem = make_problem([[0.0, 0.5, 1.0]] * 4, target=2.5)
    assert solve_problem(problem, MAX_MIN).choice.tolist() == [2, 1, 1, 1]


def test_the_worst_unit_is_solved_to_the_optimum():
    answer = solve_problem(worst([STEEP, FLAT], capacity=3), MAX_MIN)
    assert answer.choice.tolist() == [1, 2]
    assert answer.objective == answer.bound == 0.7
    assert answer.termination is Termination.OPTIMAL


def test_a_unit_that_cannot_rise_does_not_hold_the_others_back():
    answer = solve_problem(worst([[0.2, 0.2, 0.2], [0.0, 0.5, 0.9]], capacity=2), MAX_MIN)
    assert answer.choice.tolist() == [0, 2]
    assert answer.objective == 0.2


def test_the_worst_unit_under_a_target():
    answer = solve_problem(worst([STEEP, FLAT], target=0.75), MAX_MIN)
    assert answer.choice.tolist() == [1, 3]
    assert answer.cost_bytes == answer.bound == 4


def test_caps_and_shared_budgets_keep_it_exact():
    cap = GroupCap(name="device 0", units=(0, 1), capacity_bytes=3)
    values = [STEEP, FLAT, FLAT]
    answer = solve_problem(worst(values, capacity=9, constraints=(cap,)), MAX_MIN)
    # The worst of the capped two is 0.7; the third is not held back by them.
    assert answer.choice.tolist() == [1, 2, 3]
    assert answer.objective == answer.bound == 0.7
    same = SameBudget(groups=((0, 1),))
    answer = solve_problem(worst(values, capacity=5, constraints=(same,)), MAX_MIN)
    assert answer.choice.tolist() == [2, 2, 1]
    assert answer.objective == answer.bound == 0.4


def test_a_target_that_the_caps_rule_out_says_what_can_be_had():
    cap = GroupCap(name="device 0", units=(0, 1), capacity_bytes=3)
    problem = worst([STEEP, FLAT], target=0.8, constraints=(cap,))
    with pytest.raises(InfeasibleError, match=r"0\.7 within the side constraints") as caught:
        solve_problem(problem, MAX_MIN)
    assert caught.value.nearest == 0.7


def test_many_levels_are_halved_and_sorted_alike(monkeypatch):
    rng = np.random.default_rng(5)
    values = concave_values(rng, 12, 40)
    problems = [make_problem(values, capacity=n, weights=rng.random(12)) for n in (0, 7, 100, 300)]
    problems += [dataclasses.replace(p, aggregate=Aggregate.WORST) for p in problems]
    problems += [make_problem(values, target=float(values[:, -1].sum()) * s) for s in (0.2, 0.9)]
    sorted_ones = [solve_problem(problem, MAX_MIN).choice.tolist() for problem in problems]
    monkeypatch.setattr("kvalloc.solvers.max_min.MOST_LEVELS", 0)
    halved = [solve_problem(problem, MAX_MIN).choice.tolist() for problem in problems]
    assert halved == sorted_ones
