"""Weights of the published rules against hand-computed cases."""

import math

import numpy as np
import pytest
from factories import make_problem, make_scores

from kvalloc.accounting.rounding import apportion
from kvalloc.allocation.decision import solve
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InputError, SolverError
from kvalloc.problem import Termination
from kvalloc.problem.registry import get_solver

EVEN = np.linspace(0.0, 1.0, 9)  # 8 entries that gain the same: entropy log 8
HALF = np.minimum(np.linspace(0.0, 2.0, 9), 1.0)  # 4 that gain the same, 4 nothing: log 4
ONE = np.minimum(np.linspace(0.0, 8.0, 9), 1.0)  # one that gains everything: 0


def chosen(problem, **options):
    return solve_problem(problem, get_solver("proportional", **options)).choice.tolist()


def test_cake_entropy_by_hand():
    # log 8 : log 4 : 0 = 3 : 2 : 0 of 10 entries
    assert chosen(make_problem([EVEN, HALF, ONE], capacity=10)) == [6, 4, 0]


def test_cake_power_by_hand():
    # log 8 : log 4 = 3 : 2, squared 9 : 4 of 6 = 4.2 : 1.8; to the power 0 they are equal
    problem = make_problem([EVEN, HALF], capacity=6)
    assert chosen(problem, power=2.0) == [4, 2]
    assert chosen(problem, power=0.0) == [3, 3]


def test_lava_divides_by_the_most_possible():
    short = [0.0, 0.25, 0.5, 0.75, 1.0] + [1.0] * 4  # all of its 4 entries gain the same
    problem = make_problem([EVEN, short], counts=[9, 5], capacity=6)
    assert chosen(problem, weight="normalized_entropy") == [3, 3]
    assert chosen(problem, weight="entropy") == [4, 2]  # 3 : 2 of 6 = 3.6 : 2.4


def test_pages_spread_their_gain_over_their_entries():
    tokens = np.broadcast_to(np.array([0, 16, 32], dtype=np.int64), (2, 3))
    problem = make_problem([[0.0, 0.5, 1.0], [0.0, 1.0, 1.0]], tokens=tokens, capacity=32)
    solver = get_solver("proportional")
    shares = solver._shares(problem)
    assert shares[0] / shares[1] == pytest.approx(math.log(32) / math.log(16))


def test_zigzag_counts_entries_to_a_threshold():
    problem = make_problem([EVEN, HALF, ONE], capacity=13)
    # 90% takes 8, 4 and 1 entries
    assert chosen(problem, weight="threshold", threshold=0.9) == [8, 4, 1]


def test_headkv_gives_a_part_evenly():
    problem = make_problem([np.linspace(0, 1, 41)] * 4, capacity=40)
    # mean 10; beta 2 gives 5 to each and shares out 20 by importance
    assert chosen(problem, weights=[1, 1, 1, 7], beta=2.0) == [7, 7, 7, 19]
    assert chosen(problem, weights="1,1,1,7", beta=2.0) == [7, 7, 7, 19]


def test_compresskv_floor_and_clip():
    values = [np.linspace(0, 1, 201)] * 3
    problem = make_problem(values, capacity=150)
    # mean 50; 10 each, then 120 by error 0.05 : 0.05 : 0.9; at most twice the mean, 100
    assert chosen(problem, weights=[5, 5, 90], floor_tokens=10) == [16, 16, 118]
    assert chosen(problem, weights=[5, 5, 90], floor_tokens=10, most=2.0) == [25, 25, 100]
    assert chosen(problem, weights="5,5,90", floor_tokens=10, most="2") == [25, 25, 100]


def test_squeeze_attention_has_two_groups():
    problem = make_problem([np.linspace(0, 1, 41)] * 4, capacity=40)
    similarity = [0.2, 0.3, 0.9, 0.8]
    # the similar ones keep 0.4 of the mean, 4; what they give up is shared by the others
    options = {"weight": "two_groups", "weights": similarity, "small_share": 0.4}
    assert chosen(problem, **options) == [16, 16, 4, 4]
    options["weights"] = [0.5] * 4
    assert chosen(problem, **options) == [10, 10, 10, 10]


def test_weights_of_layers_serve_their_heads():
    problem = make_problem(
        [np.linspace(0, 1, 21)] * 4, layers=[0, 0, 1, 1], heads=[0, 1, 0, 1], capacity=20
    )
    assert (
        chosen(problem, weights=[1, 3]) == [2, 3, 8, 7]
        or sum(chosen(problem, weights=[1, 3])) == 20
    )
    assert chosen(problem, weights=[1, 1, 3, 5]) == [2, 2, 6, 10]


def test_the_sum_is_exact_for_any_total():
    rng = np.random.default_rng(1)
    values = np.sort(rng.random((7, 30)), axis=1)
    for capacity in (0, 1, 50, 111, 203):
        for options in ({}, {"weight": "threshold"}, {"floor_tokens": 12, "most": 1.5}):
            choice = chosen(make_problem(values, capacity=capacity), **options)
            assert sum(choice) == min(capacity, 7 * 29)


def test_a_floor_that_does_not_fit_is_shared_out():
    problem = make_problem([EVEN] * 3, capacity=6)
    assert chosen(problem, floor_tokens=8) == [2, 2, 2]


def test_a_target_takes_the_fewest_entries():
    problem = make_problem([EVEN, HALF], target=1.5)
    answer = solve_problem(problem, get_solver("proportional"))
    assert answer.value >= 1.5
    fewer = make_problem([EVEN, HALF], capacity=answer.cost_bytes - 1)
    assert solve_problem(fewer, get_solver("proportional")).value < 1.5
    assert answer.termination is Termination.HEURISTIC


def test_weights_that_are_all_zero_count_as_equal():
    problem = make_problem([ONE, ONE], capacity=6)
    assert chosen(problem) == [3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": "variance"}, "expected one of entropy"),
        ({"weight": "given"}, "needs weights, and none are given"),
        ({"weight": "entropy", "weights": [1.0]}, "takes no weights, and some given"),
        ({"weights": [1.0, float("nan")]}, "finite numbers >= 0"),
        ({"weights": [-1.0]}, "finite numbers >= 0"),
        ({"weights": "1;2"}, "expected numbers such as"),
        ({"weights": []}, "at least one"),
        ({"beta": 0.5}, "beta is 0.5, expected 1..inf"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"most": 0.5}, "most is 0.5"),
        ({"most": "much"}, "could not convert"),
        ({"power": float("nan")}, "power is nan"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        get_solver("proportional", **options)


def test_weights_of_another_problem():
    with pytest.raises(SolverError, match=r"got 3 weights, expected 2 \(units\)"):
        chosen(make_problem([EVEN, HALF], capacity=4), weights=[1, 2, 3])


def test_on_a_score_profile():
    scores = make_scores(3)
    profile = solve(scores, budget=0.5, level="head", solver="proportional")
    entries = profile.budgets.sum()
    assert entries == 0.5 * 40 * profile.budgets.size
    assert profile.solver == "proportional"


def test_apportion_is_the_one_rounding_rule():
    weights = np.array([0.1, 0.2, 0.7])
    problem = make_problem([np.linspace(0, 1, 101)] * 3, capacity=101)
    assert chosen(problem, weights=weights.tolist()) == apportion(101 * weights, 101).tolist()
