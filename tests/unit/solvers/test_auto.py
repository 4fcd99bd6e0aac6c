"""Auto: which solver for which problem, why, and never worse than the others."""

import pytest
from factories import make_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import SolverError
from kvalloc.problem import Termination, registry
from kvalloc.testing import tiny_problem

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
        ("tail:concave", "ilp"),
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
