"""What a little more is worth, which limits bind, and what stands beside a decision."""

import dataclasses

import numpy as np
import pytest
from factories import make_losses, make_problem, make_scores, with_crossing_caps

import kvalloc
from kvalloc.allocation.audit import verify
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.frontier import frontier
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import MIB, limits_of, price_at, solve_problem
from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem import GroupCap, Sense, dual_bound
from kvalloc.problem.registry import get_solver
from kvalloc.report.wording import decision_fields
from kvalloc.testing import tiny_problem
from kvalloc.testing.problems import larger_problem

# Shadow prices say what solving with a little more really gives


AUTO = get_solver("auto")


def value_with(problem, capacity_bytes):
    return solve_problem(problem.with_capacity(capacity_bytes), AUTO).value


@pytest.mark.parametrize("cap", [(), ("0=300B",), ("0-1=600B", "0=300B")], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_one_step_more_buys_what_the_price_says(seed, cap):
    request = Request.parse(budget=0.5, level="head", cap=cap)
    problem = formulate(make_scores(seed), request)
    step = problem.step_bytes
    spent = problem.spendable_bytes
    answer = solve_problem(problem.with_capacity(spent), AUTO)
    price = price_at(problem, answer.choice)
    gained = value_with(problem, spent + step) - answer.value
    assert price.value_per_mib / MIB * step == pytest.approx(gained, rel=1e-9, abs=1e-15)
    assert price.source == "the next entry"


def test_a_full_cap_makes_its_units_worth_nothing():
    values = [[0.0, 0.5, 0.9], [0.0, 0.1, 0.15]]
    cap = GroupCap(name="device 0", units=(0,), capacity_bytes=1)
    problem = make_problem(values, capacity=2, constraints=(cap,))
    choice = np.array([1, 0])
    price = price_at(problem, choice)
    assert price.value_per_mib == pytest.approx(0.1 * MIB)
    free = price_at(dataclasses.replace(problem, constraints=()), choice)
    assert free.value_per_mib == pytest.approx(0.4 * MIB)


def test_a_target_is_priced_by_what_it_costs():
    scores = make_scores(2, context_tokens=600)
    profile = solve(scores, target_retention=0.6)
    more = solve(scores, target_retention=0.62)
    cost = (more.retained_bytes - profile.retained_bytes) / 2**20
    assert 0.02 / profile.value_per_mib == pytest.approx(
        cost, rel=0.1
    )  # in whole entries, and each gains less


def test_what_is_not_concave_is_priced_by_its_dual():
    for sense in Sense:
        problem = tiny_problem("losses", seed=3, sense=sense)
        price = price_at(problem, solve_problem(problem, AUTO).choice)
        assert price.source == "dual"
        assert price.value_per_mib == dual_bound(problem).multiplier * MIB


@pytest.mark.parametrize("seed", range(3))
def test_the_worst_unit_is_priced_by_a_hundredth_more(seed):
    problem = formulate(make_scores(seed), Request.parse(target_retention=0.6, objective="worst"))
    answer = solve_problem(problem, AUTO)
    price = price_at(problem, answer.choice)
    more = solve_problem(problem.with_target(answer.value + 0.01), AUTO)
    gained = more.value - answer.value
    spent = more.cost_bytes - answer.cost_bytes
    assert price.value_per_mib == pytest.approx(gained / spent * MIB)


@pytest.mark.parametrize("context", range(20, 36))
def test_units_that_tie_but_for_the_last_bit_rise_together(context):
    random = np.random.default_rng(context)
    line = np.arange(context) / (context - 1.0)
    scores = make_scores(0, context_tokens=context, sinks=0, window=1)
    scores = scores.replace(
        curves=np.broadcast_to(line, scores.curves.shape).copy(),
        masses=random.random(scores.masses.shape) + 0.1,
    )
    profile = kvalloc.solve(scores, budget=0.3, objective="worst")
    step = formulate(scores, Request.parse(budget=0.3)).step_bytes  # of one token in each layer
    more = 1 / (context - 1.0) / (scores.shape.n_layers * step)
    assert profile.value_per_mib == pytest.approx(more * 2**20, rel=1e-6)


def test_without_a_formula_there_is_no_price_of_a_rule_or_an_optimum():
    scores = make_scores(1)
    rule = solve(scores, budget=0.5, solver="pyramid")
    best = solve(scores, budget=0.5)
    assert rule.price_source == "dual"
    assert rule.value_per_mib == pytest.approx(best.value_per_mib, rel=0.2)
    reason = "not computed: the limits leave no formula"
    few = solve(scores, budget=0.5, level="head", max_distinct=2)
    assert (few.termination, few.value_per_mib, few.price_source) == ("optimal", None, reason)
    assert decision_fields(few)["price"] == reason


@pytest.mark.parametrize("asked", [{"budget": 0.5, "objective": "loss"}, {"target_loss": 0.05}])
def test_under_caps_the_stored_price_is_the_capacity_s(asked):
    """It needs no second solve, and the caps' own prices are beside it."""
    for seed, caps in ((0, ("0=900B", "0-1=1500B")), (1, ("0-1=9MiB",))):
        scores = make_losses(seed)
        profile = solve(scores, **asked, level="head", cap=caps)
        assert profile.price_source == "dual"
        assert len(profile.prices) == 1 + len(caps)
        assert profile.value_per_mib == profile.prices[0] * 2**20
        assert all(check.passed for check in verify(profile, scores))


def test_everything_kept_leaves_nothing_to_buy(tmp_path):
    profile = solve(make_scores(0), budget=1.0)
    assert profile.value_per_mib == 0.0
    profile.save(tmp_path / "p.json")
    again = BudgetProfile.load(tmp_path / "p.json")
    assert (again.value_per_mib, again.price_source) == (0.0, "the next entry")
    only = make_problem([[0.5]] * 2, capacity=0)
    price = price_at(only, np.zeros(2, dtype=np.int64))
    assert price.value_per_mib == 0.0


# Which limits bind, what they are worth, and where that holds, beside solving again


@pytest.mark.parametrize("shares", [(0.15, 0.5), (0.2, 0.25), (0.9, 0.95)])
def test_a_cap_s_price_is_what_a_little_more_of_it_gains(shares):
    """Solved again with a twentieth more of one cap: the price is the most that it can gain."""
    base = larger_problem("concave", seed=3, n_layers=6, n_heads=3, n_options=40)
    problem = with_crossing_caps(base, shares, parts=3, room=0.5)
    solver = get_solver("ilp")
    answer = solve_problem(problem, solver, time_limit_seconds=20.0)
    prices = answer.prices or (answer.multiplier,)
    limits = {one.name: one for one in limits_of(problem, answer.choice, prices)}
    assert list(limits) == ["capacity", "cap of a", "cap of b"]
    for place, cap in enumerate(problem.constraints):
        limit = limits[f"cap of {cap.name}"]
        assert (limit.used, limit.allowed) == (
            int(problem.costs[list(cap.units), answer.choice[list(cap.units)]].sum()),
            cap.capacity_bytes,
        )
        more, other = cap.capacity_bytes // 20, list(problem.constraints)
        other[place] = dataclasses.replace(cap, capacity_bytes=cap.capacity_bytes + more)
        then = solve_problem(problem.replace(constraints=tuple(other)), solver)
        gained = then.value - answer.value
        most = (limit.value_per_mib or 0.0) / 2**20 * more
        slack = answer.bound - answer.value
        assert gained <= most + slack + 1e-12
        assert limit.binds or not limit.value_per_mib
        if limit.value_per_mib:
            assert gained >= 0.2 * most
    if shares[0] >= 0.9:  # caps beyond what the capacity lets anybody have
        assert not any(limits[name].binds for name in ("cap of a", "cap of b"))
        assert limits["capacity"].binds


ASKED = [
    (make_scores, {"budget": "40%"}, ["capacity binds"]),
    (make_scores, {"budget": "100%"}, ["capacity does not bind"]),
    (
        make_losses,
        {"budget": "50%", "objective": "loss", "cap": ("0=400B", "0-1=9MiB")},
        ["cap of layer 0 binds", "cap of layers 0-1 does not bind"],
    ),
    (make_scores, {"budget": "40%", "max_distinct": 2}, ["different budgets binds (2 of 2)"]),
    (make_scores, {"target_retention": 0.6, "cap": ("0=500B",)}, ["cap of layer 0 does not bind"]),
]


@pytest.mark.parametrize(("make", "asked", "words"), ASKED, ids=[str(case[1]) for case in ASKED])
def test_limits_are_stated_shown_and_verified(make, asked, words, tmp_path):
    scores = make(2)
    profile = kvalloc.solve(scores, **asked, level="head")
    text = decision_fields(profile)["limits"]
    for word in words:
        assert word in text
    profile.save(tmp_path / "p.json")
    assert BudgetProfile.load(tmp_path / "p.json").limits == profile.limits
    assert all(check.passed for check in verify(profile, scores))
    if "max_distinct" in asked:  # a dual that leaves a limit out has no price under it
        assert [limit.value_per_mib for limit in profile.limits] == [None, None]
    first = profile.limits[0]
    forged = first.replace(value_per_mib=2 * (first.value_per_mib or 1.0))
    lying = profile.replace(limits=(forged, *profile.limits[1:]))
    assert "limits" in {check.name for check in verify(lying, scores) if not check.passed}


# The frontier: each point is what solving at that size gives, and prices are true


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("page", [1, 4])
def test_points_are_what_solving_alone_gives_and_rise(level, page):
    scores, asked = make_scores(1), {"level": level, "page": page}
    points = frontier(scores, points=12, **asked)
    costs = [point.cost_bytes for point in points]
    assert costs == sorted(set(costs))
    for point in points:
        alone = kvalloc.solve(scores, budget=min(point.share + 1e-6, 1.0), **asked)
        assert (point.value, point.cost_bytes) == (alone.objective, alone.retained_bytes)
        assert abs(point.bound - point.value) <= 1e-12
    assert points[-1].value == pytest.approx(1.0, abs=1e-12)
    assert points[-1].share == 1.0


@pytest.mark.parametrize("least", [38, 39, 40])
def test_all_that_there_is_has_a_point_where_floors_cost_more(least):
    """Positions of kept entries are beside a cache at 16 bits, which stores none."""
    scores = make_scores(1)
    whole = kvalloc.solve(scores, budget=1.0, min_tokens=least)
    last = frontier(scores, points=5, min_tokens=least)[-1]
    assert (last.share, last.value) == (1.0, whole.objective)


def test_one_point_is_no_frontier():
    for points in (1, 2**63):
        with pytest.raises(InputError, match=f"a frontier of {points} points is no line"):
            frontier(make_scores(0), points=points)


def test_a_rule_stays_below_its_bound():
    points = frontier(make_scores(5), points=8, solver="pyramid")
    assert all(point.value <= point.bound for point in points)
    assert any(point.value < point.bound - 1e-6 for point in points)


# Several solvers beside each other, and the difference between two budget profiles
