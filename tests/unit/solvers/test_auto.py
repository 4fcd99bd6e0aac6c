"""Auto: which solver for which problem, why, and never worse than the others."""

import subprocess
import sys

import pytest
from factories import make_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import SolverError
from kvalloc.problem import Termination, registry
from kvalloc.testing import larger_problem, tiny_problem

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


def test_it_passes_the_time_limit_on(monkeypatch):
    limits = []
    solver = type(registry.get_solver("ilp"))
    solve = solver.solve

    def noting(self, problem, *, time_limit_seconds=None):
        limits.append(time_limit_seconds)
        return solve(self, problem, time_limit_seconds=time_limit_seconds)

    monkeypatch.setattr(solver, "solve", noting)
    answer = solve_problem(larger_problem("losses+max_distinct"), AUTO, time_limit_seconds=0.5)
    assert limits
    assert all(0 < limit <= 0.5 for limit in limits)
    assert answer.bound is not None


def test_nothing_heavy_is_imported_for_an_easy_problem():
    code = """
import sys
from kvalloc.problem.registry import get_solver
from kvalloc.testing import tiny_problem
answer = get_solver("auto").solve(tiny_problem("concave", seed=0))
heavy = [name for name in ("ortools", "scipy", "networkx", "torch") if name in sys.modules]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
