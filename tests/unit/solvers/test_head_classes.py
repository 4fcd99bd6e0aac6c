"""DuoAttention and RazorAttention: two classes of heads."""

import itertools

import numpy as np
import pytest
from factories import concave_values, make_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, InputError, SolverError
from kvalloc.problem import Termination
from kvalloc.problem.registry import get_solver

# Ten tokens; a streaming head keeps 4: 2 recent and 2 sinks.
LOCAL = np.minimum(np.linspace(0.0, 2.0, 11), 0.8 + np.linspace(0, 0.2, 11))
FAR = np.linspace(0.0, 1.0, 11)


def heads(values, **changes):
    n = len(values)
    return make_problem(values, layers=[0] * n, heads=list(range(n)), **changes)


def streaming(**options):
    return get_solver("head_classes", recent_tokens=2, sink_tokens=2, **options)


@pytest.mark.parametrize(
    ("values", "goal", "choice"),
    [
        ([LOCAL, FAR, LOCAL, FAR], {"capacity": 4 * 4 + 6}, [4, 10, 4, 4]),  # who loses most
        ([LOCAL, FAR, LOCAL, FAR], {"target": 3.3}, [4, 10, 4, 10]),  # as many as it needs
        ([LOCAL, FAR], {"capacity": 20}, [10, 10]),
        ([LOCAL, FAR], {"capacity": 8}, [4, 4]),
    ],
)
def test_the_heads_that_lose_most_keep_everything(values, goal, choice):
    answer = solve_problem(heads(values, **goal), streaming())
    assert answer.choice.tolist() == choice
    assert answer.termination is Termination.HEURISTIC
    n = choice.count(10)
    assert answer.detail.startswith(f"{n} retrieval heads of {len(choice)}, the others keep 4")
    assert "best of all two-class choices" in answer.detail


def test_the_sort_is_the_best_choice_of_two_classes():
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = concave_values(rng, 6, 11)
        problem = heads(values, capacity=24 + int(rng.integers(0, 37)))
        answer = solve_problem(problem, streaming())
        best = max(
            problem.objective_value(np.array(classes))
            for classes in itertools.product((4, 10), repeat=6)
            if problem.cost(np.array(classes)) <= problem.capacity_bytes
        )
        assert answer.value == pytest.approx(best)


def test_importance_takes_the_place_of_the_value_lost():
    problem = heads([LOCAL, FAR, LOCAL, FAR], capacity=22)
    answer = solve_problem(problem, streaming(importance="0.9,0.1,0.2,0.3"))
    assert answer.choice.tolist() == [10, 4, 4, 4]
    assert "best of" not in answer.detail


def test_heads_of_unequal_cost_go_by_value_per_byte():
    problem = heads([[0.0, 1.0], [0.0, 0.9]], costs=[[1, 11], [1, 3]], counts=[2, 2], capacity=12)
    solver = get_solver("head_classes", recent_tokens=0, sink_tokens=0)
    assert solve_problem(problem, solver).choice.tolist() == [0, 1]


def test_refusals():
    with pytest.raises(SolverError, match="use level='head', or greedy"):
        solve_problem(make_problem([FAR, FAR], capacity=10), streaming())
    with pytest.raises(SolverError, match=r"132 tokens in every head, more than fits"):
        solve_problem(heads([FAR, FAR], capacity=19), get_solver("head_classes"))
    with pytest.raises(SolverError, match="got 1 numbers as importance, expected 2"):
        solve_problem(heads([FAR, FAR], capacity=10), streaming(importance=[1.0]))
    with pytest.raises(InputError, match="must be >= 0"):
        get_solver("head_classes", recent_tokens=-1)


def test_a_target_above_what_keeping_everything_gives():
    falling = np.array([0.0, 0.5, 0.4])
    problem = heads([falling, falling], target=1.0)
    solver = get_solver("head_classes", recent_tokens=0, sink_tokens=0)
    with pytest.raises(InfeasibleError, match=r"head_classes reaches 0\.8 at most"):
        solve_problem(problem, solver)
