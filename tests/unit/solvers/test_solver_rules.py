"""Budget rules against their sources: hand-computed cases and the figures in METHODS."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import curves_of, make_scores, make_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.accounting.costs import POSITION_BYTES
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem import Termination
from kvalloc.problem.registry import get_solver
from kvalloc.solvers.pyramid import pyramid_line

# --- pyramid ---------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [20, 47, 128, 311, 640, 999])
@pytest.mark.parametrize("beta", [2.0, 20.0])
def test_the_exact_pyramid_sums_to_the_budget(budget: int, beta: float) -> None:
    shape = make_shape(n_layers=32, n_kv_heads=1)
    scores = make_scores(shape=shape, context_tokens=1000, sinks=4, window=8, n_samples=1)
    profile = solve(scores, budget_tokens=budget, solver=f"pyramid:beta={beta}")
    rows = profile.budgets[:, 0]
    assert rows.sum() == 32 * budget
    assert np.all(np.diff(rows) <= 0)
    assert rows.min() >= 12
    assert rows.max() <= 1000
    line = pyramid_line(budget, 32, context_tokens=1000, protected_tokens=12, beta=beta)
    assert np.all(np.abs(rows - line) < 1)
    assert profile.retained_bytes == profile.requested["bytes"]


def test_the_line_by_hand() -> None:
    line = pyramid_line(128, 4, context_tokens=1000, protected_tokens=8)
    assert line.tolist() == [242, 166, 90, 14]  # c 120: 6 at the top, 234 at the bottom, plus 8
    clipped = pyramid_line(128, 3, context_tokens=208, protected_tokens=8)  # room 200 < 234
    assert clipped.tolist() == [208, 128, 48]
    assert pyramid_line(50, 1, context_tokens=100, protected_tokens=8).tolist() == [50]


def test_a_pyramid_of_heads_gives_all_heads_of_a_layer_the_same() -> None:
    scores = make_scores(shape=make_shape(n_layers=5, n_kv_heads=3), context_tokens=100)
    profile = solve(scores, budget_tokens=50, solver="pyramid", level="head")
    assert profile.budgets.sum() == 5 * 3 * 50
    assert np.all(np.ptp(profile.budgets, axis=1) <= 1)


def test_a_pyramid_of_two_pages() -> None:
    """With two options only, the distance between them is the page, not a token."""
    scores = make_scores(shape=make_shape(n_layers=4, n_kv_heads=1), context_tokens=32)
    profile = solve(scores, budget_tokens=24, page=16, solver="pyramid")
    assert profile.budgets[:, 0].tolist() == [32, 32, 16, 16]


# --- adaptive_head ---------------------------------------------------------------------------


def one_layer(scores: list[list[float]]) -> Any:
    """One layer of heads with these scores, and no protected tokens."""
    rows = np.array(scores)
    return make_scores(
        shape=make_shape(n_layers=1, n_kv_heads=2),
        context_tokens=6,
        sinks=0,
        window=0,
        curves=curves_of(rows)[None, None],
        masses=rows.sum(axis=1)[None, None],
    )


# Together the best four are 9, 8, 7 | 6.
EVEN = one_layer([[9.0, 8, 7, 1, 1, 1], [6.0, 2, 2, 2, 2, 2]])
STARVING = one_layer([[9.0, 8, 7, 6, 5, 4], [0.6, 0.2, 0.2, 0.2, 0.2, 0.2]])


@pytest.mark.parametrize(
    ("scores", "tokens", "options", "budgets"),
    [
        # B 2, so the layer shares 4: counts are 3 and 1.
        (EVEN, 2, "alpha=0.0", [3, 1]),
        # reference: 0.8 * (3, 1) + 0.2 * 2 = (2.8, 1.2), rounded to 4
        (EVEN, 2, "alpha=0.2", [3, 1]),
        # 0.5 * (3, 1) + 0.5 * 2 = (2.5, 1.5): a tie, to the lower head
        (EVEN, 2, "alpha=0.5", [3, 1]),
        (EVEN, 2, "alpha=0.75", [2, 2]),  # (2.25, 1.75)
        (EVEN, 2, "alpha=1.0", [2, 2]),
        # kvpress: floor(0.5 * 2) = 1 each (9, 6), then the best of 8, 7, 2, ...: 8 and 7
        (EVEN, 2, "alpha=0.5:safeguard=floor", [3, 1]),
        # floor(1.0 * 2) = 2 each
        (EVEN, 2, "alpha=1.0:safeguard=floor", [2, 2]),
        (EVEN, 2, "alpha=0.2:safeguard=floor", [3, 1]),  # floor(0.4) = 0 protects nobody
        # a starved head is what the safeguard prevents
        (STARVING, 3, "alpha=0.0", [6, 0]),
        (STARVING, 3, "alpha=0.5", [5, 1]),  # 0.5 * (6, 0) + 1.5 = (4.5, 1.5): a tie
        (STARVING, 3, "alpha=0.5:safeguard=floor", [5, 1]),  # 1 each, then four more
        (STARVING, 3, "alpha=0.7:safeguard=floor", [4, 2]),  # 2 each, then two more
    ],
)
def test_both_safeguards_by_hand(
    scores: Any, tokens: int, options: str, budgets: list[int]
) -> None:
    solver = f"adaptive_head:{options}"
    profile = solve(scores, budget_tokens=tokens, solver=solver, level="head")
    assert profile.budgets[0].tolist() == budgets


@pytest.mark.parametrize("safeguard", ["reference", "floor"])
def test_every_layer_gets_the_same_and_none_is_lost(safeguard: str) -> None:
    scores = make_scores(7, shape=make_shape(n_layers=6, n_kv_heads=4), context_tokens=60)
    for tokens in (6, 17, 30, 59, 60):
        solver = f"adaptive_head:safeguard={safeguard}"
        profile = solve(scores, budget_tokens=tokens, solver=solver, level="head")
        assert profile.budgets.sum(axis=1).tolist() == [4 * tokens] * 6
        assert profile.budgets.min() >= 5


# --- uniform ---------------------------------------------------------------------------------


def _entries_in(share: float, tokens: int) -> float:
    """Entries of 16 bytes and a position in a share of all; a whole cache stores no positions."""
    return tokens if share == 1 else share * tokens * 16 / (16 + POSITION_BYTES)


@pytest.mark.parametrize("level", ["layer", "head"])
def test_uniform_keeps_one_number(level: Any) -> None:
    scores = make_scores(context_tokens=41)
    for share in (0.16, 0.3, 0.5, 0.77, 1.0):
        profile = solve(scores, budget=share, solver="uniform", level=level)
        assert np.unique(profile.budgets).tolist() == [int(_entries_in(share, 41) + 1e-9)]
    profile = solve(scores, target_retention=0.9, solver="uniform", level=level)
    (tokens,) = np.unique(profile.budgets)
    problem = formulate(scores, Request.parse(target_retention=0.9, level=level))
    less = problem.options_within(np.full(problem.n_units, tokens - 1))
    assert not problem.meets_target(problem.objective_value(less))


def test_uniform_says_the_budget_it_gives() -> None:
    problem = formulate(make_scores(), Request.parse(budget=0.5, page=16))
    answer = solve_problem(problem, get_solver("uniform"))
    assert answer.detail == "16 tokens for every unit"


# --- conservation, for all -------------------------------------------------------------------

EVERY = [
    *("greedy", "ilp", "uniform", "pyramid", "proportional", "proportional:weight=threshold"),
    *("head_classes:recent_tokens=3:sink_tokens=2", "adaptive_head"),
    "adaptive_head:safeguard=floor",
]
SPENDS_ALL = {"greedy", "pyramid", "adaptive_head", "proportional"}
GOALS = [
    *({"budget_tokens": tokens} for tokens in (4, 5, 6, 23, 41, 60, 10**9)),
    *({"budget": share} for share in (0.1, 0.333, 0.5, 0.6, 0.95, 0.999, 1.0)),
    *({"target_retention": target} for target in (1e-12, 0.8, 1.0)),
]


def decided(solver: str, seed: int, **arguments: Any) -> BudgetProfile:
    shape = make_shape(n_layers=5, n_kv_heads=3)
    scores = make_scores(seed, shape=shape, context_tokens=60)
    by_head = solver.startswith(("adaptive_head", "head_classes")) or seed % 2
    return solve(scores, solver=solver, level="head" if by_head else "layer", **arguments)


@pytest.mark.parametrize("solver", EVERY)
@settings(max_examples=60, deadline=None)
@given(
    goal=st.sampled_from(GOALS),
    seed=st.integers(0, 20),
    page=st.sampled_from([1, 1, 7, 16, 64]),
    context=st.sampled_from([30, 60, 60, 480]),
    batch=st.integers(1, 3),
)
def test_what_is_requested_is_spent_and_not_a_byte_more(
    solver: str, goal: Any, seed: int, page: int, context: int, batch: int
) -> None:
    floor = -(-5 // page) * page  # sinks and window, in whole pages
    tokens = _entries_in(goal.get("budget", 1), context)
    tokens = min(tokens, goal.get("budget_tokens", context))
    try:
        profile = decided(solver, seed, page=page, context=context, batch=batch, **goal)
    except InfeasibleError:
        assert tokens < floor
        return
    budgets = profile.budgets
    assert profile.context_tokens == context
    assert np.all((budgets >= min(context, floor)) & (budgets <= context))
    assert np.all((budgets % page == 0) | (budgets == context))
    if "target_retention" in goal:
        assert profile.retention >= goal["target_retention"] - 1e-12
        return
    left = profile.requested["bytes"] - profile.retained_bytes
    assert left >= 0
    if page == 1 and tokens == context:
        assert np.all(budgets == context)
    elif page == 1 and solver.partition(":")[0] in SPENDS_ALL:
        entry = profile.shape.bytes_per_entry + POSITION_BYTES
        assert left < batch * entry * (3 if profile.level == "layer" else 1)


@pytest.mark.parametrize("solver", EVERY)
def test_everything_is_optimal_only_where_it_is_proven(solver: str) -> None:
    everything = decided(solver, 1, budget="100%")
    assert (everything.retention, everything.gap) == (pytest.approx(1.0), 0)
    assert (everything.termination == "optimal") == (solver in ("greedy", "ilp"))


def test_the_mean_of_allocations_is_feasible_and_never_above_the_bound() -> None:
    for solver in EVERY:
        for target in ({"budget": 0.4}, {"target_retention": 0.85}):
            profile = decided(solver, 1, average="allocations", **target)
            assert profile.solver_options["average"] == "allocations"
            assert profile.termination == Termination.HEURISTIC.value
            if "budget" in target:
                assert profile.retained_bytes <= profile.requested["bytes"]
                assert profile.objective <= profile.bound + 1e-12
            else:
                assert profile.retention >= 0.85 - 1e-12
                assert profile.objective >= profile.bound
