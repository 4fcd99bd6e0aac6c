"""Which limits bind, what they are worth, and where that holds, beside solving again."""

from __future__ import annotations

from typing import Any

import pytest
from factories import make_losses, make_scores

import kvalloc
from kvalloc.allocation.audit import verify
from kvalloc.allocation.sensitivity import HOLDS_WITHIN, limits_of
from kvalloc.allocation.verification import solve_problem
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem import AllocationProblem, GroupCap, dual_bound
from kvalloc.problem.registry import get_solver
from kvalloc.report.wording import decision_fields
from kvalloc.testing.problems import larger_problem


def crossing(seed: int, shares: tuple[float, float]) -> AllocationProblem:
    """Concave units of which two groups that overlap have caps, and half of the bytes."""
    base = larger_problem("concave", seed=seed, n_layers=6, n_heads=3, n_options=40)
    caps = []
    for name, units, share in (("a", range(12), shares[0]), ("b", range(6, 18), shares[1])):
        low, high = (int(base.costs[list(units), at].sum()) for at in (0, -1))
        size = int(low + share * (high - low))
        caps.append(GroupCap(name=name, units=tuple(units), capacity_bytes=size))
    room = base.max_cost_bytes - base.min_cost_bytes
    capped = base.replace(constraints=tuple(caps))
    return capped.with_capacity(int(base.min_cost_bytes + 0.5 * room))


@pytest.mark.parametrize("shares", [(0.15, 0.5), (0.2, 0.25), (0.9, 0.95)])
def test_a_cap_s_price_is_what_a_little_more_of_it_gains(shares: tuple[float, float]) -> None:
    """Solved again with a twentieth more of one cap: the price is the most that it can gain."""
    problem = crossing(3, shares)
    solver = get_solver("ilp")
    answer = solve_problem(problem, solver, time_limit_seconds=20.0)
    prices = answer.prices or (answer.multiplier,)
    limits = {one.name: one for one in limits_of(problem, answer.choice, prices)}
    assert list(limits) == ["capacity", "cap of a", "cap of b"]
    gained = {}
    for place, cap in enumerate(problem.constraints):
        assert isinstance(cap, GroupCap)
        limit = limits[f"cap of {cap.name}"]
        assert (limit.used, limit.most) == (
            int(problem.costs[list(cap.units), answer.choice[list(cap.units)]].sum()),
            cap.capacity_bytes,
        )
        more = cap.capacity_bytes // 20
        other = list(problem.constraints)
        other[place] = GroupCap(
            name=cap.name, units=cap.units, capacity_bytes=cap.capacity_bytes + more
        )
        then = solve_problem(problem.replace(constraints=tuple(other)), solver)
        gained[cap.name] = then.value - answer.value
        most = (limit.value_per_mib or 0.0) / 2**20 * more
        slack = answer.bound - answer.value
        assert gained[cap.name] <= most + slack + 1e-12
        assert limit.binds or not limit.value_per_mib
        if limit.value_per_mib:
            assert gained[cap.name] >= 0.2 * most
            assert limit.holds_from is not None
            assert limit.holds_to is not None
            assert limit.holds_from <= cap.capacity_bytes <= limit.holds_to
    if shares[0] >= 0.9:  # caps beyond what the capacity lets anybody have
        assert not any(limits[name].binds for name in ("cap of a", "cap of b"))
        assert limits["capacity"].binds


@pytest.mark.parametrize("curves", ["concave", "losses", "unequal_costs"])
def test_a_price_holds_between_the_sizes_that_are_stated(curves: str) -> None:
    base = larger_problem(curves, seed=1, n_layers=6, n_heads=3, n_options=40)
    room = base.max_cost_bytes - base.min_cost_bytes
    problem = base.with_capacity(base.min_cost_bytes + room // 3)
    choice, price = dual_bound(problem).choice, dual_bound(problem).multiplier
    [limit] = limits_of(problem, choice, (price,))
    low, high = limit.holds_from, limit.holds_to
    assert low is not None
    assert high is not None
    assert low <= problem.spendable_bytes <= high
    for size in (low, (low + high) // 2, high - problem.lattice_bytes):
        there = dual_bound(problem.with_capacity(size)).multiplier
        assert price / HOLDS_WITHIN * (1 - 1e-9) <= there <= price * HOLDS_WITHIN * (1 + 1e-9)
    for size, is_higher in ((low - problem.lattice_bytes, True), (high, False)):
        there = dual_bound(problem.with_capacity(size)).multiplier
        assert there > price * HOLDS_WITHIN if is_higher else there < price / HOLDS_WITHIN


ASKED: list[tuple[Any, dict[str, Any], list[str]]] = [
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
def test_limits_are_stated_shown_and_verified(
    make: Any, asked: dict[str, Any], words: list[str], tmp_path: Any
) -> None:
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
