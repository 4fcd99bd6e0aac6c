"""Pools of several members against every choice of all of them."""

import itertools
import re

import numpy as np
import pytest
from factories import make_losses, make_scores, make_shape

from kvalloc import solve, solve_pool
from kvalloc.allocation.audit import verify
from kvalloc.allocation.formulation import PosedRequest, formulate
from kvalloc.allocation.pool import verify_pool
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError, InputError

SLACK = 1e-9


def members_of(random, count, **shape):
    """Score profiles of different models and lengths, two or three layers each."""
    return [
        make_scores(
            int(random.integers(1000)),
            shape=make_shape(n_layers=int(random.integers(2, 4)), n_kv_heads=2, **shape),
            context_tokens=int(random.integers(6, 9)),
            sinks=1,
            window=1,
        )
        for _ in range(count)
    ]


def costs_of(scores, request):
    return PosedRequest(scores=scores, request=request).costs


def every_choice(problem):
    """Cost and value of every choice that keeps the side constraints."""
    options = itertools.product(*map(range, problem.option_counts.tolist()))
    kept = [c for c in map(np.array, options) if problem.side_fault(c) is None]
    costs = np.array([problem.cost(choice) for choice in kept])
    return costs, np.array([problem.objective_value(choice) for choice in kept])


def best_of_all(problems, peak_of, memory, weights, floors, fairness):
    """The best value of all choices of all members together; None where none fits."""
    together, start = (np.minimum, np.inf) if fairness == "worst" else (np.add, 0.0)
    spent, worth = np.array([0]), np.array([start])
    for problem, peak, weight, floor in zip(problems, peak_of, weights, floors, strict=True):
        costs, values = every_choice(problem)
        costs = np.array([peak(cost) for cost in costs.tolist()])
        costs, values = costs[values >= floor - 1e-12], weight * values[values >= floor - 1e-12]
        spent = (spent[:, None] + costs).ravel()
        worth = together(worth[:, None], values).ravel()
        spent, worth = spent[spent <= memory], worth[spent <= memory]
        order = np.lexsort((-worth, spent))  # only what is worth more than all that takes less
        higher = np.maximum.accumulate(worth[order])
        first = order[np.diff(higher, prepend=-np.inf) > 0]
        spent, worth = spent[first], worth[first]
    return float(worth.max()) if worth.size else None


@pytest.mark.parametrize(("fairness", "floored"), [("sum", False), ("sum", True), ("worst", False)])
@pytest.mark.parametrize("limits", [{}, {"cap": ["0-1=280B"]}, {"page": 2}, {"float32": True}])
def test_a_pool_is_what_every_choice_of_all_members_says(fairness, floored, limits):
    met = 0
    wide, limits = "float32" in limits, {k: v for k, v in limits.items() if k != "float32"}
    for seed in range(6):
        random = np.random.default_rng(seed)
        members = members_of(random, 2 + seed % 2, **({"dtype_bytes": 4} if wide else {}))
        drawn = np.ones(3) if fairness == "worst" else random.uniform(0.2, 2, 3)
        weights = drawn.tolist()[: len(members)]
        asked = [dict(limits) for _ in members]
        whole = [Request.parse(memory="1MiB", **one) for one in asked]
        problems = [formulate(s, one) for s, one in zip(members, whole, strict=True)]
        peak_of = [
            lambda cost, s=s, one=one: int(one.target.nearest(cost, costs_of(s, one))[0])
            for s, one in zip(members, whole, strict=True)
        ]
        least, most = (
            sum(peak(getattr(p, name)) for p, peak in zip(problems, peak_of, strict=True))
            for name in ("min_cost_bytes", "max_cost_bytes")
        )
        share = random.uniform(0.4, 1.1) if wide else random.uniform(0.2, 0.7)
        memory = int(least + share * (most - least))
        floors = [-np.inf] * len(members)
        if floored:
            floors[0], weights[0] = 1.0 if wide else 0.6, 0.02  # nobody else would give it so much
            asked[0]["target_retention"] = floors[0]
        best = best_of_all(problems, peak_of, memory, weights, floors, fairness)
        try:
            parts = list(zip(members, asked, weights, strict=True))
            pool = solve_pool(parts, memory=memory, fairness=fairness)
        except InfeasibleError as error:
            assert best is None
            memory = error.nearest
            best = best_of_all(problems, peak_of, memory, weights, floors, fairness)
            pool = solve_pool(parts, memory=memory, fairness=fairness)
        assert best is not None
        assert pool.objective <= best + SLACK
        assert pool.bound >= best - SLACK
        assert pool.objective == pytest.approx(best, abs=0.01 if floored else SLACK)
        met += 1
        assert sum(one.requested["value"] for one in pool) <= memory
        for profile, scores, floor in zip(pool, members, floors, strict=True):
            assert profile.peak_bytes_at(scores.context_tokens) <= profile.requested["value"]
            assert profile.retention >= floor - SLACK
            assert all(check.passed and check.proven for check in verify(profile, scores))
            assert profile.requested["pool"]["bound"] == pool.bound
        checks = verify_pool(pool[::-1], members[::-1])
        assert all(check.passed for check in checks), checks
        assert checks[-1].proven == (pool.bound_source == "dual")
        lies = {"objective": best + 0.01, "bound": best - 0.01, "weights": [0.3] * len(members)}
        if pool.bound_source == "dual" and pool.gap > 1e-6:  # nothing is known to beat it
            if pool[0].retention < 0.99:
                lies["floors"] = [0.99, *[None] * (len(members) - 1)]
            checks = verify_pool(stating(pool, bound=pool.objective), members)
            assert [check.name for check in checks if not check.passed] == ["bound"]
        for name, lie in lies.items():
            checks = verify_pool(stating(pool, **{name: lie}), members)
            assert not all(check.passed for check in checks), (name, checks)
    assert met >= 3


def stating(pool, **lies):
    """The same budgets, with other statements about the pool."""
    return [
        one.replace(requested={**one.requested, "pool": {**one.requested["pool"], **lies}})
        for one in pool
    ]


def test_what_is_not_one_pool_is_refused():
    pool = solve_pool([(A, {}, 1.0), (make_scores(2), {}, 2.0)], memory="8000B")
    scores = [A, make_scores(2)]
    assert all(check.passed for check in verify_pool(pool, scores))
    for profiles in (pool[:1], [pool[0], pool[0]], [pool[0], solve(A, budget="50%")]):
        with pytest.raises(InputError, match="are not one pool"):
            verify_pool(profiles, scores[: len(profiles)])
    for lies in (
        {"weights": "many"},
        {"scales": None},
        {"scales": [1, 2]},
        {"memory": "inf"},
        {"floors": [[], []]},
    ):
        with pytest.raises(InputError, match="are not one pool"):
            verify_pool(stating(pool, **lies), scores)


A, LOSSES = make_scores(1), make_losses(1)


@pytest.mark.parametrize(("memory", "floor"), [(100, 0.5), ("3000B", 0.5), ("5200B", 0.99)])
def test_a_memory_that_is_too_small_names_one_that_does(memory, floor):
    members = [(A, {"target_retention": floor}, 1.0), (make_scores(2), {}, 1.0)]
    with pytest.raises(InfeasibleError, match="is too small for 2 members") as raised:
        solve_pool(members, memory=memory)
    assert raised.value.nearest is not None
    said = re.search(r"ask for at least memory=(\d+)$", str(raised.value))
    assert int(said[1]) == raised.value.nearest
    assert solve_pool(members, memory=said[1])[0].retention >= floor
    with pytest.raises(InfeasibleError):
        solve_pool(members, memory=raised.value.nearest - 1)


def test_a_floor_above_what_a_member_can_reach_names_the_member():
    with pytest.raises(InfeasibleError, match=r"the floor of member 1 of the pool: .* the most is"):
        solve_pool([(A, {"target_retention": 0.99, "max_tokens": 10}, 1.0)], memory="1MiB")
