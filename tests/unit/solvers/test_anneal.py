"""Search: feasible always, any objective, any constraint, the clock."""

import dataclasses

import numpy as np
import pytest
from factories import concave_values, make_problem

from kvalloc.allocation.decision import solve_problem
from kvalloc.errors import InputError, SolverError
from kvalloc.problem import MaxDistinct, RankBalance, SideConstraint, Termination, dual_bound
from kvalloc.problem.registry import get_solver
from kvalloc.solvers._placement import place
from kvalloc.testing import brute_force, larger_problem, tiny_problem, tiny_problems

VALUES = concave_values(np.random.default_rng(2), 6, 9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlyEven(SideConstraint):
    """A kind that kvalloc does not know."""

    def fault(self, problem, choice, ranks):
        odd = problem.chosen_tokens(choice) % 2
        return f"unit {int(np.argmax(odd))} has an odd budget" if odd.any() else None


def test_it_finds_small_optima():
    missed = 0
    for name, problem in tiny_problems(60, seed=7):
        optimum = brute_force(problem)
        if optimum is None:
            continue
        answer = solve_problem(problem, get_solver("anneal", steps=300))
        assert answer.termination is Termination.HEURISTIC, name
        missed += abs(answer.objective - optimum.objective) > 1e-9
    assert missed <= 6


def test_an_objective_that_can_only_be_evaluated():
    # Unequal budgets are punished: nothing that a value per unit could say.
    def evaluate(choice):
        return -float(np.var(choice)) + 0.01 * float(choice.sum())

    problem = make_problem(VALUES, capacity=24)
    answer = solve_problem(problem, get_solver("anneal", evaluate=evaluate, steps=3000))
    assert answer.choice.tolist() == [4] * 6
    assert answer.objective == problem.objective(answer.choice)
    assert "evaluated at 0.24" in answer.detail


def test_evaluate_with_a_target_keeps_the_target():
    problem = make_problem(VALUES, target=0.7 * float(VALUES[:, -1].sum()))
    solver = get_solver("anneal", evaluate=lambda choice: -float(choice.max()), steps=2000)
    answer = solve_problem(problem, solver)
    assert problem.meets_target(answer.value)
    plain = solve_problem(problem, get_solver("greedy"))
    assert answer.choice.max() <= plain.choice.max()


def test_a_constraint_that_nobody_knows():
    problem = make_problem(VALUES, capacity=25, constraints=(OnlyEven(),))
    with pytest.raises(SolverError, match="does not handle OnlyEven"):
        solve_problem(problem, get_solver("greedy"))
    answer = solve_problem(problem, get_solver("anneal", steps=2000))
    assert not np.any(answer.choice % 2)


def test_ranks_are_placed():
    problem = larger_problem("concave+rank_balance", n_layers=4, n_heads=4, n_options=20)
    balance = next(c for c in problem.constraints if isinstance(c, RankBalance))
    answer = get_solver("anneal", steps=500).solve(problem)
    assert answer.ranks is not None
    assert balance.fault(problem, answer.choice, answer.ranks) is None
    solve_problem(problem, get_solver("anneal", steps=500))


def test_placing_spreads_layers_and_bytes():
    rng = np.random.default_rng(0)
    problem = larger_problem("concave", n_layers=6, n_heads=8, n_options=40)
    for _ in range(10):
        choice = rng.integers(0, 40, problem.n_units)
        ranks = place(problem, choice, 4)
        assert RankBalance(n_ranks=4, tolerance=0.02).fault(problem, choice, ranks) is None


def test_few_levels():
    problem = larger_problem("concave+max_distinct", n_layers=6, n_heads=4, n_options=30, seed=1)
    most = next(c.most for c in problem.constraints if isinstance(c, MaxDistinct))
    answer = solve_problem(problem, get_solver("anneal", steps=2000))
    assert np.unique(problem.chosen_tokens(answer.choice)).size <= most
    assert answer.gap < 0.2


def test_the_seed_decides():
    problem = larger_problem("losses", n_layers=4, n_heads=2, n_options=20)
    first, again, other = (
        get_solver("anneal", steps=300, seed=seed).solve(problem) for seed in (1, 1, 2)
    )
    assert first.choice.tolist() == again.choice.tolist()
    assert first.detail == again.detail
    assert first.detail != other.detail
    assert first.bound is None


def test_it_is_not_worse_than_where_it_starts():
    problem = larger_problem("unequal_costs", seed=3, n_layers=8, n_heads=4, n_options=30)
    start = problem.objective(dual_bound(problem).choice)
    assert solve_problem(problem, get_solver("anneal", steps=1500)).objective >= start


def test_the_clock():
    problem = larger_problem("losses")
    answer = solve_problem(problem, get_solver("anneal", steps=10**9), time_limit_seconds=0.2)
    assert answer.termination is Termination.TIME_LIMIT


def test_no_choice_at_all():
    problem = tiny_problem("concave", seed=0)
    impossible = RankBalance(n_ranks=5, tolerance=0.0)
    problem = dataclasses.replace(problem, constraints=(impossible,))
    with pytest.raises(SolverError, match="found no choice that keeps every constraint in 50"):
        solve_problem(problem, get_solver("anneal", steps=50))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps 0 and seed 0, expected >= 1"),
        ({"seed": -1}, "seed -1, expected >= 1 and >= 0"),
        ({"evaluate": "value"}, "expected a function of a choice"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        get_solver("anneal", **options)


def test_an_evaluation_that_is_no_number():
    solver = get_solver("anneal", evaluate=lambda choice: float("nan"))
    with pytest.raises(SolverError, match="no number"):
        solve_problem(make_problem(VALUES, capacity=24), solver)
