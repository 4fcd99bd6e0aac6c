"""Budget rules against their sources: hand-computed cases and the figures in METHODS."""

import itertools

import numpy as np
import pytest
from factories import concave_values, curves_of, make_problem, make_scores, make_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.accounting.costs import POSITION_BYTES
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import Termination
from kvalloc.problem.registry import get_solver
from kvalloc.solvers.pyramid import pyramid_line

# --- pyramid ---------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [20, 47, 128, 311, 640, 999])
@pytest.mark.parametrize("beta", [2.0, 20.0])
def test_the_exact_pyramid_sums_to_the_budget(budget, beta):
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


def test_the_line_by_hand():
    line = pyramid_line(128, 4, context_tokens=1000, protected_tokens=8)
    assert line.tolist() == [242, 166, 90, 14]  # c 120: 6 at the top, 234 at the bottom, plus 8
    clipped = pyramid_line(128, 3, context_tokens=208, protected_tokens=8)  # room 200 < 234
    assert clipped.tolist() == [208, 128, 48]
    assert pyramid_line(50, 1, context_tokens=100, protected_tokens=8).tolist() == [50]


def test_a_pyramid_of_two_pages():
    """With two options only, the distance between them is the page, not a token."""
    scores = make_scores(shape=make_shape(n_layers=4, n_kv_heads=1), context_tokens=32)
    profile = solve(scores, budget_tokens=24, page=16, solver="pyramid")
    assert profile.budgets[:, 0].tolist() == [32, 32, 16, 16]


# --- adaptive_head ---------------------------------------------------------------------------


def one_layer(scores):
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
def test_both_safeguards_by_hand(scores, tokens, options, budgets):
    solver = f"adaptive_head:{options}"
    profile = solve(scores, budget_tokens=tokens, solver=solver, level="head")
    assert profile.budgets[0].tolist() == budgets


# --- uniform ---------------------------------------------------------------------------------


def _entries_in(share, tokens):
    """Entries of 16 bytes and a position in a share of all; a whole cache stores no positions."""
    return tokens if share == 1 else share * tokens * 16 / (16 + POSITION_BYTES)


@pytest.mark.parametrize("level", ["layer", "head"])
def test_uniform_keeps_one_number(level):
    scores = make_scores(context_tokens=41)
    for share in (0.16, 0.3, 0.5, 0.77, 1.0):
        profile = solve(scores, budget=share, solver="uniform", level=level)
        assert np.unique(profile.budgets).tolist() == [int(_entries_in(share, 41) + 1e-9)]
    profile = solve(scores, target_retention=0.9, solver="uniform", level=level)
    (tokens,) = np.unique(profile.budgets)
    problem = formulate(scores, Request.parse(target_retention=0.9, level=level))
    less = problem.options_within(np.full(problem.n_units, tokens - 1))
    assert not problem.meets_target(problem.objective_value(less))


def test_uniform_says_the_budget_it_gives():
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


def decided(solver, seed, **arguments):
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
def test_what_is_requested_is_spent_and_not_a_byte_more(solver, goal, seed, page, context, batch):
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
def test_everything_is_optimal_only_where_it_is_proven(solver):
    everything = decided(solver, 1, budget="100%")
    assert (everything.retention, everything.gap) == (pytest.approx(1.0), 0)
    assert (everything.termination == "optimal") == (solver in ("greedy", "ilp"))


# Weights of the published rules against hand-computed cases


EQUAL = np.linspace(0.0, 1.0, 9)  # 8 entries that gain the same: entropy log 8
HALVES = np.minimum(np.linspace(0.0, 2.0, 9), 1.0)  # 4 that gain the same, 4 nothing: log 4
ONE = np.minimum(np.linspace(0.0, 8.0, 9), 1.0)  # one that gains everything: 0


def chosen(problem, **options):
    return solve_problem(problem, get_solver("proportional", **options)).choice.tolist()


SHORT = [0.0, 0.25, 0.5, 0.75, 1.0] + [1.0] * 4  # all of its 4 entries gain the same
LINE = np.linspace(0, 1, 41)
ERRORS = {"weights": [5, 5, 90], "floor_tokens": 10}
SIMILAR = {"weight": "two_groups", "weights": [0.2, 0.3, 0.9, 0.8], "small_share": 0.4}
UNEQUAL = {"counts": [9, 5]}
PAGES = np.broadcast_to(np.arange(0, 144, 16), (2, 9))
HEADS = {"layers": [0, 0, 1, 1], "heads": [0, 1, 0, 1]}


@pytest.mark.parametrize(
    ("values", "capacity", "more", "options", "choice"),
    [
        # CAKE: log 8 : log 4 : 0 = 3 : 2 : 0 of 10 entries
        ([EQUAL, HALVES, ONE], 10, {}, {}, [6, 4, 0]),
        # squared 9 : 4 of 6 = 4.2 : 1.8; to the power 0 they are equal
        ([EQUAL, HALVES], 6, {}, {"power": 2.0}, [4, 2]),
        ([EQUAL, HALVES], 6, {}, {"power": 0.0}, [3, 3]),
        # LAVa divides by the most possible; without that 3 : 2 of 6 = 3.6 : 2.4
        ([EQUAL, SHORT], 6, UNEQUAL, {"weight": "normalized_entropy"}, [3, 3]),
        ([EQUAL, SHORT], 6, UNEQUAL, {"weight": "entropy"}, [4, 2]),
        # pages of 16: the gain of a page is spread over its entries, log 128 : log 16 = 7 : 4
        ([EQUAL, ONE], 176, {"tokens": PAGES}, {}, [7, 4]),
        # ZigZagKV: 90% takes 8, 4 and 1 entries
        ([EQUAL, HALVES, ONE], 13, {}, {"weight": "threshold", "threshold": 0.9}, [8, 4, 1]),
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
        ([EQUAL] * 3, 6, {}, {"floor_tokens": 8}, [2, 2, 2]),
        ([ONE, ONE], 6, {}, {}, [3, 3]),
    ],
)
def test_the_published_rules_by_hand(values, capacity, more, options, choice):
    assert chosen(make_problem(values, capacity=capacity, **more), **options) == choice


def test_a_target_takes_the_fewest_entries():
    problem = make_problem([EQUAL, HALVES], target=1.5)
    answer = solve_problem(problem, get_solver("proportional"))
    assert answer.value >= 1.5
    fewer = make_problem([EQUAL, HALVES], capacity=answer.cost_bytes - 1)
    assert solve_problem(fewer, get_solver("proportional")).value < 1.5
    assert answer.termination is Termination.HEURISTIC


def test_weights_of_another_problem():
    with pytest.raises(SolverError, match=r"got 3 weights, expected 2 \(units\)"):
        chosen(make_problem([EQUAL, HALVES], capacity=4), weights=[1, 2, 3])


def test_weighing_ends_at_the_time_limit():
    """It took twice the limit where there are a hundred million options."""
    problem = make_problem([EQUAL, HALVES, ONE], capacity=10)
    with pytest.raises(SolverError, match=r"weighed 1 of 3 units .* give it more"):
        solve_problem(problem, get_solver("proportional"), time_limit_seconds=1e-9)


# DuoAttention and RazorAttention: two classes of heads


# Ten tokens; a streaming head keeps 4: 2 recent and 2 sinks.
LOCAL = np.minimum(np.linspace(0.0, 2.0, 11), 0.8 + np.linspace(0, 0.2, 11))
FAR = np.linspace(0.0, 1.0, 11)


def of_heads(values, **changes):
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
    answer = solve_problem(of_heads(values, **goal), streaming())
    assert answer.choice.tolist() == choice
    assert answer.termination is Termination.HEURISTIC
    n = choice.count(10)
    assert answer.detail.startswith(f"{n} retrieval heads of {len(choice)}, the others keep 4")
    assert "best of all two-class choices" in answer.detail


def test_the_sort_is_the_best_choice_of_two_classes():
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = concave_values(rng, 6, 11)
        problem = of_heads(values, capacity=24 + int(rng.integers(0, 37)))
        answer = solve_problem(problem, streaming())
        best = max(
            problem.objective_value(np.array(classes))
            for classes in itertools.product((4, 10), repeat=6)
            if problem.cost(np.array(classes)) <= problem.capacity_bytes
        )
        assert answer.value == pytest.approx(best)


def test_importance_takes_the_place_of_the_value_lost():
    problem = of_heads([LOCAL, FAR, LOCAL, FAR], capacity=22)
    answer = solve_problem(problem, streaming(importance="0.9,0.1,0.2,0.3"))
    assert answer.choice.tolist() == [10, 4, 4, 4]
    assert "best of" not in answer.detail


def test_heads_of_unequal_cost_go_by_value_per_byte():
    problem = of_heads(
        [[0.0, 1.0], [0.0, 0.9]], costs=[[1, 11], [1, 3]], counts=[2, 2], capacity=12
    )
    solver = get_solver("head_classes", recent_tokens=0, sink_tokens=0)
    assert solve_problem(problem, solver).choice.tolist() == [0, 1]


def test_refusals():
    with pytest.raises(SolverError, match="use level='head', or greedy"):
        solve_problem(make_problem([FAR, FAR], capacity=10), streaming())
    with pytest.raises(SolverError, match=r"132 tokens in every head, more than fits"):
        solve_problem(of_heads([FAR, FAR], capacity=19), get_solver("head_classes"))
    with pytest.raises(SolverError, match="got 1 numbers as importance, expected 2"):
        solve_problem(of_heads([FAR, FAR], capacity=10), streaming(importance=[1.0]))


def test_a_target_above_what_keeping_everything_gives():
    falling = np.array([0.0, 0.5, 0.4])
    problem = of_heads([falling, falling], target=1.0)
    solver = get_solver("head_classes", recent_tokens=0, sink_tokens=0)
    with pytest.raises(InfeasibleError, match=r"head_classes reaches 0\.8 at most"):
        solve_problem(problem, solver)


# PrefixKV against hand-computed cases


MAX_MIN = get_solver("max_min")
STEEP = [0.0, 0.8, 0.9, 1.0]
FLAT = [0.0, 0.4, 0.7, 1.0]


@pytest.mark.parametrize(
    ("values", "goal", "choice"),
    [
        ([STEEP, FLAT], {"capacity": 2}, [1, 1]),  # p = 0.4
        ([STEEP, FLAT], {"capacity": 3}, [1, 2]),  # p = 0.7: the flat one needs 2
        ([STEEP, FLAT], {"capacity": 4}, [1, 3]),  # p = 0.8: the flat one has no 0.8, it needs all
        ([STEEP, FLAT], {"capacity": 5}, [2, 3]),
        ([STEEP, FLAT], {"capacity": 6}, [3, 3]),
        ([STEEP, FLAT], {"capacity": 0}, [0, 0]),
        # The lowest level that meets a target.
        ([STEEP, FLAT], {"target": 1.2}, [1, 1]),
        ([STEEP, FLAT], {"target": 1.5}, [1, 2]),
        ([STEEP, FLAT], {"target": 1.8}, [1, 3]),
        ([STEEP, FLAT], {"target": 2.0}, [3, 3]),
        # Of the last rows only as many rise as the target needs.
        ([[0.0, 0.5, 1.0]] * 4, {"target": 2.5}, [2, 1, 1, 1]),
        # p = 0.5 takes 2 entries; with the third, unit 0 cannot reach the next level (it needs
        # two more), unit 1 can rise.
        ([[0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.6, 1.0]], {"capacity": 3}, [1, 2]),
        # Entries that are worth nothing stay unspent.
        ([[0.0, 1.0, 1.0, 1.0]] * 2, {"capacity": 6}, [1, 1]),
    ],
)
def test_the_published_rule_by_hand(values, goal, choice):
    assert solve_problem(make_problem(values, **goal), MAX_MIN).choice.tolist() == choice


def test_the_rule_looks_at_shares_whatever_the_mass_and_weight():
    problem = make_problem([[0.0, 8.0, 9.0, 10.0], FLAT], capacity=3, weights=[0.1, 5.0])
    answer = solve_problem(problem, MAX_MIN)
    assert answer.choice.tolist() == [1, 2]
    assert answer.termination is Termination.HEURISTIC
    assert answer.bound_source == "dual"
