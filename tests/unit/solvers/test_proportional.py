"""Weights of the published rules against hand-computed cases."""

import math

import numpy as np
import pytest
from factories import make_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InputError, SolverError
from kvalloc.problem import Termination
from kvalloc.problem.registry import get_solver

EVEN = np.linspace(0.0, 1.0, 9)  # 8 entries that gain the same: entropy log 8
HALF = np.minimum(np.linspace(0.0, 2.0, 9), 1.0)  # 4 that gain the same, 4 nothing: log 4
ONE = np.minimum(np.linspace(0.0, 8.0, 9), 1.0)  # one that gains everything: 0


def chosen(problem, **options):
    return solve_problem(problem, get_solver("proportional", **options)).choice.tolist()


SHORT = [0.0, 0.25, 0.5, 0.75, 1.0] + [1.0] * 4  # all of its 4 entries gain the same
LINE = np.linspace(0, 1, 41)
ERRORS = {"weights": [5, 5, 90], "floor_tokens": 10}
SIMILAR = {"weight": "two_groups", "weights": [0.2, 0.3, 0.9, 0.8], "small_share": 0.4}
UNEQUAL = {"counts": [9, 5]}
HEADS = {"layers": [0, 0, 1, 1], "heads": [0, 1, 0, 1]}


@pytest.mark.parametrize(
    ("values", "capacity", "more", "options", "choice"),
    [
        # CAKE: log 8 : log 4 : 0 = 3 : 2 : 0 of 10 entries
        ([EVEN, HALF, ONE], 10, {}, {}, [6, 4, 0]),
        # squared 9 : 4 of 6 = 4.2 : 1.8; to the power 0 they are equal
        ([EVEN, HALF], 6, {}, {"power": 2.0}, [4, 2]),
        ([EVEN, HALF], 6, {}, {"power": 0.0}, [3, 3]),
        # LAVa divides by the most possible; without that 3 : 2 of 6 = 3.6 : 2.4
        ([EVEN, SHORT], 6, UNEQUAL, {"weight": "normalized_entropy"}, [3, 3]),
        ([EVEN, SHORT], 6, UNEQUAL, {"weight": "entropy"}, [4, 2]),
        # ZigZagKV: 90% takes 8, 4 and 1 entries
        ([EVEN, HALF, ONE], 13, {}, {"weight": "threshold", "threshold": 0.9}, [8, 4, 1]),
        # HeadKV: mean 10; beta 2 gives 5 to each and shares out 20 by importance
        ([LINE] * 4, 40, {}, {"weights": [1, 1, 1, 7], "beta": 2.0}, [7, 7, 7, 19]),
        ([LINE] * 4, 40, {}, {"weights": "1,1,1,7", "beta": 2.0}, [7, 7, 7, 19]),
        # CompressKV: mean 50; 10 each, then 120 by error; at most twice the mean, 100
        ([np.linspace(0, 1, 201)] * 3, 150, {}, ERRORS, [16, 16, 118]),
        ([np.linspace(0, 1, 201)] * 3, 150, {}, {**ERRORS, "max_multiple": 2.0}, [25, 25, 100]),
        ([np.linspace(0, 1, 201)] * 3, 150, {}, {**ERRORS, "max_multiple": "2"}, [25, 25, 100]),
        # SqueezeAttention: the similar ones keep 0.4 of the mean, the others share the rest
        ([LINE] * 4, 40, {}, SIMILAR, [16, 16, 4, 4]),
        ([LINE] * 4, 40, {}, {**SIMILAR, "weights": [0.5] * 4}, [10, 10, 10, 10]),
        # weights of layers serve their heads
        ([np.linspace(0, 1, 21)] * 4, 20, HEADS, {"weights": [1, 3]}, [3, 3, 7, 7]),
        ([np.linspace(0, 1, 21)] * 4, 20, HEADS, {"weights": [1, 1, 3, 5]}, [2, 2, 6, 10]),
        # a floor that does not fit is shared out; weights that are all zero count as equal
        ([EVEN] * 3, 6, {}, {"floor_tokens": 8}, [2, 2, 2]),
        ([ONE, ONE], 6, {}, {}, [3, 3]),
    ],
)
def test_the_published_rules_by_hand(values, capacity, more, options, choice):
    assert chosen(make_problem(values, capacity=capacity, **more), **options) == choice


def test_pages_spread_their_gain_over_their_entries():
    tokens = np.broadcast_to(np.array([0, 16, 32], dtype=np.int64), (2, 3))
    problem = make_problem([[0.0, 0.5, 1.0], [0.0, 1.0, 1.0]], tokens=tokens, capacity=32)
    solver = get_solver("proportional")
    shares = solver._shares(problem, math.inf)
    assert shares[0] / shares[1] == pytest.approx(math.log(32) / math.log(16))


def test_a_target_takes_the_fewest_entries():
    problem = make_problem([EVEN, HALF], target=1.5)
    answer = solve_problem(problem, get_solver("proportional"))
    assert answer.value >= 1.5
    fewer = make_problem([EVEN, HALF], capacity=answer.cost_bytes - 1)
    assert solve_problem(fewer, get_solver("proportional")).value < 1.5
    assert answer.termination is Termination.HEURISTIC


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": "variance"}, "expected one of entropy"),
        ({"weight": "given"}, "needs weights, and none are given"),
        ({"weight": "entropy", "weights": [1.0]}, "takes no weights, and some given"),
        ({"weights": [1.0, float("nan")]}, "finite numbers >= 0"),
        ({"weights": "1;2"}, "expected numbers such as"),
        ({"weights": []}, "at least one"),
        ({"beta": 0.5}, "beta is 0.5, expected 1..inf"),
        ({"max_multiple": "much"}, "max_multiple is 'much', expected a valid number"),
        ({"power": float("nan")}, "power is nan"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        get_solver("proportional", **options)


def test_weights_of_another_problem():
    with pytest.raises(SolverError, match=r"got 3 weights, expected 2 \(units\)"):
        chosen(make_problem([EVEN, HALF], capacity=4), weights=[1, 2, 3])


def test_weighing_ends_at_the_time_limit() -> None:
    """It took twice the limit where there are a hundred million options."""
    problem = make_problem([EVEN, HALF, ONE], capacity=10)
    with pytest.raises(SolverError, match=r"weighed 1 of 3 units .* give it more"):
        solve_problem(problem, get_solver("proportional"), time_limit_seconds=1e-9)
