"""Searches and bounds of single solvers, beyond what brute force says of all (test_contract.py)."""

import numpy as np
import pytest
from exact_cases import hand_problem, medium_problem
from factories import make_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import SolverError
from kvalloc.problem import Termination, dual_bound, registry
from kvalloc.solvers.dp import DP
from kvalloc.solvers.hull import Hull
from kvalloc.solvers.lagrangian import Lagrangian
from kvalloc.testing import tiny_problem

# Auto: which solver for which problem, why, and never worse than the others


AUTO = registry.get_solver("auto")


@pytest.mark.parametrize(
    ("kind", "picked"),
    [
        ("concave", "greedy"),
        ("tied", "greedy"),
        ("paged", "greedy"),
        ("worst:non_concave", "max_min"),
        ("worst:losses+nested_caps", "max_min"),
        ("worst:concave+max_distinct", "ilp"),
        ("concave+nested_caps", "flow"),
        ("losses", "dp"),
        ("unequal_costs", "dp"),
        ("losses+nested_caps", "ilp"),
        ("concave+max_distinct", "ilp"),
    ],
)
def test_it_picks_the_cheapest_exact_solver(kind, picked):
    answer = solve_problem(tiny_problem(kind, seed=4), AUTO)
    assert answer.detail.startswith(f"{picked}: ")
    assert answer.termination is Termination.OPTIMAL


def test_it_goes_on_where_one_gives_up(monkeypatch):
    def gives_up(self, problem, *, time_limit_seconds=None):
        raise SolverError("greedy gave up")

    monkeypatch.setattr(type(registry.get_solver("greedy")), "solve", gives_up)
    answer = solve_problem(make_problem([[0.0, 0.5, 0.75]] * 2, capacity=2), AUTO)
    assert "greedy gave up" in answer.detail
    assert not answer.detail.startswith("greedy")
    assert answer.choice.tolist() in ([1, 1], [2, 0], [0, 2])


# Dynamic programming over pages


def test_a_table_beyond_memory_is_refused_before_anything_is_done():
    problem = medium_problem(0)
    able = DP(memory_bytes=1000).can_solve(problem)
    assert isinstance(able, str)
    assert "2,250 bytes and may use 1,000" in able
    assert "use larger pages (page), or lagrangian, or ilp" in able
    with pytest.raises(SolverError, match="could need a table"):
        solve_problem(problem, DP(memory_bytes=1000))
    costs = np.array([[1, 3, 5], [1, 3, 4], [1, 3, 10**12]])
    odd = hand_problem(costs=costs, capacity=10**12)  # one byte is the grain
    assert isinstance(DP().can_solve(odd), str)


# Convex hull and marginal greedy


def test_what_is_not_needed_for_a_target_goes_back():
    """The last segment needed is large, and makes an earlier one of another unit superfluous."""
    problem = hand_problem(
        values=np.array([[0.0, 1.0, 1.0], [0.0, 9.0, 9.0], [0.0, 0.1, 0.2]]),
        costs=np.array([[1, 2, 3], [1, 11, 12], [1, 21, 41]]),
        capacity=None,
        target=9.0,
    )
    assert Hull().solve(problem).choice.tolist() == [0, 1, 0]


# The Lagrangian solver: its bound, its repair, caps, and what it claims


@pytest.mark.parametrize("concave", [False, True])
@pytest.mark.parametrize("target", [False, True])
def test_the_gap_is_tiny_on_many_units(concave, target):
    problem = medium_problem(
        0, n_layers=80, n_heads=8, n_options=64, concave=concave, target=target
    )
    answer = solve_problem(problem, Lagrangian())
    assert answer.gap <= 1e-5
    assert answer.termination in (Termination.OPTIMAL, Termination.HEURISTIC)
    # Its own bound is as tight as the one that is computed without it.
    assert answer.bound == pytest.approx(dual_bound(problem).bound, rel=1e-9)
