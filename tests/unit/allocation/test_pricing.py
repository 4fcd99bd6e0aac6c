"""Shadow prices say what solving with a little more really gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from factories import make_losses, make_problem, make_scores

from kvalloc.allocation.audit import verify
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.allocation.sensitivity import price_at
from kvalloc.allocation.verification import solve_problem
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem import AllocationProblem, GroupCap, Sense, dual_bound
from kvalloc.problem.registry import get_solver
from kvalloc.report.wording import decision_fields
from kvalloc.testing import tiny_problem

AUTO = get_solver("auto")


def value_with(problem: AllocationProblem, capacity_bytes: int) -> float:
    return solve_problem(problem.with_capacity(capacity_bytes), AUTO).value


@pytest.mark.parametrize("cap", [(), ("0=300B",), ("0-1=600B", "0=300B")], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_one_step_more_buys_what_the_price_says(seed: int, cap: tuple[str, ...]) -> None:
    request = Request.parse(budget=0.5, level="head", cap=cap)
    problem = formulate(make_scores(seed), request)
    step = problem.step_bytes
    spent = problem.spendable_bytes
    answer = solve_problem(problem.with_capacity(spent), AUTO)
    price = price_at(problem, answer.choice)
    gained = value_with(problem, spent + step) - answer.value
    assert price.value_per_byte * step == pytest.approx(gained, rel=1e-9, abs=1e-15)
    assert price.source == "the next entry"


def test_a_full_cap_makes_its_units_worth_nothing() -> None:
    values = [[0.0, 0.5, 0.9], [0.0, 0.1, 0.15]]
    cap = GroupCap(name="device 0", units=(0,), capacity_bytes=1)
    problem = make_problem(values, capacity=2, constraints=(cap,))
    choice = np.array([1, 0])
    price = price_at(problem, choice)
    assert price.value_per_byte == pytest.approx(0.1)
    free = price_at(dataclasses.replace(problem, constraints=()), choice)
    assert free.value_per_byte == pytest.approx(0.4)


def test_a_target_is_priced_by_what_it_costs() -> None:
    scores = make_scores(2, context_tokens=600)
    profile = solve(scores, target_retention=0.6)
    more = solve(scores, target_retention=0.62)
    cost = (more.retained_bytes - profile.retained_bytes) / 2**20
    assert 0.02 / profile.value_per_mib == pytest.approx(
        cost, rel=0.1
    )  # in whole entries, and each gains less


def test_what_is_not_concave_is_priced_by_its_dual() -> None:
    for sense in Sense:
        problem = tiny_problem("losses", seed=3, sense=sense)
        price = price_at(problem, solve_problem(problem, AUTO).choice)
        assert price.source == "dual"
        assert price.value_per_byte == dual_bound(problem).multiplier


@pytest.mark.parametrize("seed", range(3))
def test_the_worst_unit_is_priced_by_a_hundredth_more(seed: int) -> None:
    problem = formulate(make_scores(seed), Request.parse(target_retention=0.6, objective="worst"))
    answer = solve_problem(problem, AUTO)
    price = price_at(problem, answer.choice)
    more = solve_problem(problem.with_target(answer.value + 0.01), AUTO)
    gained = more.value - answer.value
    assert price.value_per_byte == pytest.approx(gained / (more.cost_bytes - answer.cost_bytes))


def test_without_a_formula_there_is_no_price_of_a_rule_or_an_optimum() -> None:
    scores = make_scores(1)
    rule = solve(scores, budget=0.5, solver="pyramid")
    best = solve(scores, budget=0.5)
    assert rule.price_source == "dual"
    assert rule.value_per_mib == pytest.approx(best.value_per_mib, rel=0.2)
    found = solve(scores, budget=0.5, level="head", equal_heads=True, solver="max_min")
    reason = "not computed: the limits leave no formula"
    few = solve(scores, budget=0.5, level="head", max_distinct=2)
    assert (few.termination, few.value_per_mib, few.price_source) == ("optimal", None, reason)
    assert (found.value_per_mib, found.price_source) == (None, reason)
    assert decision_fields(found)["price"] == reason


@pytest.mark.parametrize("asked", [{"budget": 0.5, "objective": "loss"}, {"target_loss": 0.05}])
def test_under_caps_the_stored_price_is_the_capacity_s(asked: dict[str, Any]) -> None:
    """It needs no second solve, and the caps' own prices are beside it."""
    for seed, caps in ((0, ("0=900B", "0-1=1500B")), (1, ("0-1=9MiB",))):
        scores = make_losses(seed)
        profile = solve(scores, **asked, level="head", cap=caps)
        assert profile.price_source == "dual"
        assert len(profile.prices) == 1 + len(caps)
        assert profile.value_per_mib == profile.prices[0] * 2**20
        assert all(check.passed for check in verify(profile, scores))


def test_nothing_more_to_be_had_is_said() -> None:
    profile = solve(make_scores(0), target_retention=1.0)
    assert decision_fields(profile.replace(value_per_mib=0.0))["price"] == "nothing more to be had"


def test_everything_kept_leaves_nothing_to_buy(tmp_path: Any) -> None:
    profile = solve(make_scores(0), budget=1.0)
    assert profile.value_per_mib == 0.0
    profile.save(tmp_path / "p.json")
    again = BudgetProfile.load(tmp_path / "p.json")
    assert (again.value_per_mib, again.price_source) == (0.0, "the next entry")
    only = make_problem([[0.5]] * 2, capacity=0)
    price = price_at(only, np.zeros(2, dtype=np.int64))
    assert price.value_per_byte == 0.0
