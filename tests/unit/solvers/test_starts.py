"""Searches by many small programs become one program after a short while."""

import numpy as np
import pytest
from factories import make_bits

from kvalloc.allocation.formulation import PosedRequest
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import (
    Aggregate,
    GroupCap,
    MaxDistinct,
    Sense,
    Termination,
)
from kvalloc.problem.registry import get_solver
from kvalloc.solvers import _ilp_search
from kvalloc.testing import brute_force, tiny_problems
from kvalloc.testing.problems import SIDES, larger_problem

LIMITED = [side for side in SIDES if side != "plain"]


def answer_of(name, problem, seconds):
    solver = get_solver(name)
    if solver.can_solve(problem) is not True:
        return None
    try:
        return solve_problem(problem, solver, time_limit_seconds=seconds)
    except (InfeasibleError, SolverError):
        return None


def crossing(problem, shares, most):
    """The problem with two caps that share units, and few budgets."""
    n, caps = problem.n_units, []
    for name, units, share in (
        ("a", range(3 * n // 4), shares[0]),
        ("b", range(n // 4, n), shares[1]),
    ):
        low, high = (int(problem.costs[list(units), at].sum()) for at in (0, -1))
        size = int(low + share * (high - low))
        caps.append(GroupCap(name=name, units=tuple(units), capacity_bytes=size))
    capped = problem.replace(constraints=(*caps, MaxDistinct(most=most)))
    room = problem.max_cost_bytes - problem.min_cost_bytes
    return capped.with_capacity(int(problem.min_cost_bytes + 0.45 * room))


def test_sets_of_budgets_under_caps_are_proven():
    """Set after set took 20 s for nothing here; one program takes a moment."""
    base = larger_problem("losses", n_layers=1, n_heads=4, n_options=46)
    problem = crossing(base, (0.4, 0.45), most=3)
    answer = answer_of("ilp", problem, 60.0)
    assert answer is not None
    assert answer.termination is Termination.OPTIMAL


def test_the_gap_that_was_asked_for_is_reached():
    """It ended heuristic where one grain of the costs is larger than the gap."""
    ended = set()
    for case, problem in tiny_problems(120, seed=3):
        if problem.aggregate is Aggregate.SUM:
            for gap in (0.01, 0.1):
                if (answer := answer_of(f"ilp:gap={gap}", problem, 30.0)) is not None:
                    best = brute_force(problem)
                    assert not problem.is_better(best.objective, answer.bound, 1e-9), case
                    ended.add(answer.termination)
    assert ended == {Termination.OPTIMAL, Termination.GAP_LIMIT}


@pytest.mark.parametrize("name", ["hull", "lagrangian", "ilp", "dp"])
def test_with_bits_nothing_ends_below_equal_budgets_and_widths(name):
    for seed in range(40):
        scores, room = make_bits(seed, n_samples=1), (0.3, 0.5, 0.75)[seed % 3]
        asked = Request.parse(budget=room, bits=(16, 8, 4))
        posed = PosedRequest(scores=scores, request=asked)
        tokens = np.arange(posed.min_loss_tokens, posed.context_tokens + 1)
        worth, cost = zip(
            *(
                (posed.values(tokens, bits)[0].sum(axis=0), posed.costs.of_head(tokens, bits))
                for bits in (16, 8, 4)
            ),
            strict=True,
        )
        fits = np.array(cost) * posed.costs.heads <= asked.target.capacity(posed.costs, 0)
        equal = np.where(fits, worth, -np.inf).max()
        answer = solve_problem(posed.problem, get_solver(name))
        assert answer.objective >= equal - 1e-12, seed


@pytest.mark.parametrize("back_end", ["highs", "cp_sat"])
@pytest.mark.parametrize("kind", ["worst:concave", "worst:losses", "worst:unequal_costs"])
def test_one_program_for_the_worst_unit_is_exact(kind, back_end, monkeypatch):
    monkeypatch.setattr(_ilp_search, "SHORT_SECONDS", 0.0)
    kinds = [kind, *(f"{kind}+{side}" for side in LIMITED)]
    for case, problem in tiny_problems(2 * len(kinds), kinds=kinds, seed=40):
        if problem.sense is not Sense.MAX_VALUE:
            continue
        best, answer = brute_force(problem), answer_of(f"ilp:backend={back_end}", problem, 30.0)
        assert (best is None) == (answer is None), case
        if best is not None and answer is not None:
            assert answer.objective == pytest.approx(best.objective, abs=1e-12), case
            assert answer.termination is Termination.OPTIMAL, case


@pytest.mark.parametrize("seconds", [1e-3, 0.5, 20.0])
def test_the_worst_unit_under_crossing_caps_is_no_worse_than_equal(seconds, monkeypatch):
    """Five layers of three heads, pages of 2: a level that bisection cannot decide ends nothing.

    It stopped at .5455 with a bound of .9455, which equal budgets reach.
    """
    curves = np.array([[10, 20, 30, 52, 55], [15, 30, 52, 54, 55], [30, 52, 53, 54, 55]]) / 55
    base = larger_problem("concave", n_layers=5, n_heads=3, n_options=5)
    pages = np.broadcast_to(2 * np.arange(1, 6), (15, 5))
    values = curves[base.units % 3]
    weights = np.ones(15)
    paged = base.replace(tokens=pages, values=values, weights=weights, aggregate=Aggregate.WORST)
    problem = crossing(paged, (0.75, 0.75), most=2)
    problem = problem.with_capacity(int(problem.costs[:, 3].sum()))
    equal, answer = answer_of("uniform", problem, 5.0), answer_of("ilp", problem, seconds)
    assert equal is not None
    assert answer is not None
    assert (equal.objective, answer.objective) == (52 / 55, 52 / 55)
    undecided = _ilp_search.Outcome(choice=None, bound=0.0)
    monkeypatch.setattr(_ilp_search.Search, "_cheapest_with", lambda self, allowed: undecided)
    answer = answer_of("ilp", problem, seconds)
    assert answer is not None
    assert answer.objective == equal.objective
    if seconds > 1:
        assert (answer.bound, answer.termination) == (equal.objective, Termination.OPTIMAL)
