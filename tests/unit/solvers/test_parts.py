"""Problems of too many options: solved by parts, with what that can cost inside the bound."""

import itertools

import numpy as np
import pytest

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap, MaxDistinct, Sense, Termination
from kvalloc.problem.registry import get_solver
from kvalloc.solvers import _coarse
from kvalloc.testing import brute_force, tiny_problems
from kvalloc.testing.problems import larger_problem

N = 4096


def large(sense=Sense.MAX_VALUE, *sides):
    """64 units of 4,096 smooth concave options, of which a fifth fits."""
    random, n = np.random.default_rng(0), 64
    bends = random.uniform(0.02, 0.5, (n, 1))
    values = -np.expm1(-np.arange(N) / (N - 1) / bends) / -np.expm1(-1 / bends)
    tokens = np.broadcast_to(np.arange(N) + 8, (n, N))
    problem = AllocationProblem(
        tokens=tokens,
        values=values,
        costs=tokens * 512,
        option_counts=np.full(n, N),
        weights=np.full(n, 1 / n),
        layers=np.repeat(np.arange(n // 4), 4),
        heads=np.tile(np.arange(4), n // 4),
        capacity_bytes=n * N * 512 // 5,
        context_tokens=N + 8,
        protected_tokens=8,
        constraints=sides,
    )
    return problem if sense is Sense.MAX_VALUE else problem.with_target(0.6)


def cap(units, share):
    size = int(share * len(units) * N * 512)
    return GroupCap(name=f"units {units}", units=tuple(units), capacity_bytes=size)


@pytest.mark.parametrize("sense", Sense)
@pytest.mark.parametrize("name", ["lagrangian", "hull", "ilp"])
def test_parts_end_at_the_optimum_of_smooth_curves(name, sense):
    problem = large(sense)
    answer, best = (solve_problem(problem, get_solver(one)) for one in (name, "greedy"))
    assert answer.detail.endswith("of 262,144, some at a time")
    assert answer.bound_source == "dual"
    assert answer.objective == pytest.approx(best.objective, rel=1e-9)


CROSSING = (cap(range(40), 0.19), cap(range(20, 64), 0.18))
NESTED = (cap(range(40), 0.15), cap(range(10), 0.1))


@pytest.mark.parametrize(
    ("name", "sides", "gap"),
    [
        ("lagrangian", CROSSING, 1e-3),
        ("lagrangian", NESTED, 1e-5),
        ("ilp", CROSSING, 0.25),
        ("ilp", (MaxDistinct(maximum=4),), 0.25),
    ],
    ids=["crossing", "nested", "ilp crossing", "ilp few"],
)
def test_limits_hold_and_the_gap_is_that_of_the_whole_problem(name, sides, gap):
    problem = large(Sense.MAX_VALUE, *sides)
    limit = 0.7 if name == "ilp" else None
    answer = solve_problem(problem, get_solver(name), time_limit_seconds=limit)
    assert problem.side_fault(answer.choice) is None
    assert answer.bound_source == "dual"
    assert 0 <= answer.gap <= gap
    if sides is NESTED:
        best = solve_problem(problem, get_solver("flow"))
        assert best.termination is Termination.OPTIMAL
        assert answer.objective <= best.objective <= answer.bound + 1e-12


WORST = ("worst:concave", "worst:losses")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(
            ("lagrangian", "hull", "ilp"),
            ("concave", "losses", "unequal_costs", "unequal_options"),
        ),
        *(("max_min", kind) for kind in WORST),
    ],
)
def test_the_bound_of_parts_is_never_beaten(kind, name, monkeypatch):
    """Of five options at a time, against the optimum over all of them.

    The level of the worst unit is known without a search, so without limits it is exact.
    """
    sides = ("", "+nested_caps", "+crossing_caps", "+max_distinct")
    wide = [] if kind in WORST else range(4)
    wide = [larger_problem(kind, seed=n, n_layers=4, n_heads=2, n_options=40) for n in wide]
    tiny = [one for _, one in tiny_problems(20, kinds=[f"{kind}{side}" for side in sides], seed=3)]
    cases = [(one, solve_problem(one, get_solver("dp")).objective) for one in wide]
    cases += [(one, best.objective) for one in tiny if (best := brute_force(one)) is not None]
    for limit in ("MOST_OPTIONS", "MOST_LIMITED", "PART_OPTIONS", "PART_CAPPED"):
        monkeypatch.setattr(_coarse, limit, 0)
    solved = 0
    for problem, best in cases:
        solver = get_solver(name)
        if solver.can_solve(problem) is True:
            answer = solve_problem(problem, solver)
            assert not problem.is_better(best, answer.bound, 1e-10)
            assert not problem.is_better(answer.objective, best, 1e-10)
            if kind in WORST and not problem.constraints:
                assert answer.termination is Termination.OPTIMAL
            solved += 1
    assert solved >= 8


def test_parts_are_no_worse_than_equal_budgets_and_know_what_is_impossible():
    worst = large(Sense.MAX_VALUE, MaxDistinct(maximum=4)).replace(aggregate=Aggregate.WORST)
    answer, equal = (
        solve_problem(worst, get_solver(one), time_limit_seconds=1.0) for one in ("ilp", "uniform")
    )
    assert answer.objective >= equal.objective
    tight = large(Sense.MIN_COST, cap(range(40), 0.01), cap(range(20, 64), 0.01))
    for name in ("lagrangian", "ilp"):
        with pytest.raises(InfeasibleError, match="raise the caps or ask for that") as error:
            solve_problem(tight, get_solver(name))
        assert 0 < (error.value.nearest or 0.0) < 0.6
