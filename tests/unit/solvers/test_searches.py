"""Searches and bounds of single solvers, beyond what brute force says of all (test_contract.py)."""

import numpy as np
import pytest
from exact_cases import (
    hand_problem,
    medium_problem,
)
from factories import make_problem
from scipy.optimize import linprog

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, InputError, SolverError
from kvalloc.problem import (
    GroupCap,
    Termination,
    dual_bound,
    registry,
)
from kvalloc.solvers.dp import DP
from kvalloc.solvers.flow import Flow
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
    odd = hand_problem(costs=costs, capacity_bytes=10**12)  # one byte is the grain
    assert isinstance(DP().can_solve(odd), str)
    with pytest.raises(InputError, match="holds no table"):
        DP(memory_bytes=0)


# Convex hull and marginal greedy


def test_what_is_not_needed_for_a_target_goes_back():
    """The last segment needed is large, and makes an earlier one of another unit superfluous."""
    problem = hand_problem(
        values=np.array([[0.0, 1.0, 1.0], [0.0, 9.0, 9.0], [0.0, 0.1, 0.2]]),
        costs=np.array([[1, 2, 3], [1, 11, 12], [1, 21, 41]]),
        capacity_bytes=None,
        target=9.0,
    )
    assert Hull().solve(problem).choice.tolist() == [0, 1, 0]


def relaxation(problem):
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
def test_the_bound_is_the_linear_relaxation(target):
    for seed in range(10):
        problem = medium_problem(seed, n_layers=3, target=target, share=0.2 + 0.05 * seed)
        solution = Hull().solve(problem)
        exact = relaxation(problem)
        if target:  # rounded up to whole pages
            assert 0 <= solution.bound - exact < problem.lattice_bytes + 1
        else:
            assert solution.bound == pytest.approx(exact, rel=1e-9)


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


def test_a_target_beyond_the_caps_names_them_and_what_can_be_met():
    cap = GroupCap(name="device 7", units=tuple(range(9)), capacity_bytes=40_000)
    problem = medium_problem(1, target=True, share=0.05, constraints=(cap,))
    with pytest.raises(InfeasibleError, match=r"device 7.*can; raise the caps") as raised:
        solve_problem(problem, Lagrangian())
    nearest = float(raised.value.nearest or 0.0)
    assert 0.0 < nearest < 0.95
    assert solve_problem(problem.with_target(nearest), Lagrangian()).value >= nearest - 1e-12


# Nested caps on concave curves


def tree_problem(seed, *, tight=0.5, target=False):
    """A model of 6 layers of 3 heads on 2 devices: a cap for each layer and each device."""
    random = np.random.default_rng(seed)
    base = medium_problem(seed, concave=True)

    def cap(name, units, share):
        most = int(base.costs[list(units), -1].sum())
        return GroupCap(name=name, units=tuple(units), capacity_bytes=int(most * share))

    layers = [cap(f"layer {n}", range(3 * n, 3 * n + 3), random.uniform(0.2, 1)) for n in range(6)]
    devices = [cap(f"device {n}", range(9 * n, 9 * n + 9), tight) for n in range(2)]
    caps = (*layers, *devices)
    return medium_problem(seed, concave=True, constraints=caps, share=0.4, target=target)


def test_the_line_says_which_cap_lies_in_which():
    detail = Flow().solve(tree_problem(4)).detail
    assert detail.startswith("8 caps; layer 0 in device 0; layer 1 in device 0; ")
    assert detail.count(" in ") == 5  # not all six


def test_a_target_beyond_the_caps_says_what_can_be_met():
    problem = tree_problem(4, tight=0.3, target=True)
    most = solve_problem(problem.with_capacity(problem.max_cost_bytes), Flow()).value
    with pytest.raises(InfeasibleError, match="within the caps") as raised:
        solve_problem(problem.with_target(most + 1e-6), Flow())
    assert raised.value.nearest == pytest.approx(most)
    assert solve_problem(problem.with_target(most), Flow()).value == pytest.approx(most)
