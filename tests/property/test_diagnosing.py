"""What stands in the way of tiny problems that have no solution, against every choice there is."""

import dataclasses
import math
import time
from collections import Counter

import numpy as np

from kvalloc.allocation.infeasibility import (
    attempt,
    diagnose,
    relax,
)
from kvalloc.problem import GroupCap, Sense
from kvalloc.problem.arrays import MaxDistinct
from kvalloc.testing import brute_force, tiny_problem

KINDS = (
    *(f"{curves}+{side}" for curves in ("concave", "losses") for side in ("nested_caps", "mixed")),
    *(f"concave+{side}" for side in ("crossing_caps", "max_distinct")),
    "unequal_costs+nested_caps",
    "worst:concave+max_distinct",
    "worst:losses+nested_caps",
)
SEEDS = range(16)
LONG = 600.0
"""Seconds: each search takes milliseconds, and must be exact on a busy machine too."""


def tightened(problem, seed):
    """The same problem with less of what it needs, so that many have no solution."""
    random = np.random.default_rng(seed)

    def tighter(one):
        if isinstance(one, GroupCap):
            floors = int(problem.costs[list(one.units), 0].sum())
            share = float(random.choice([0.1, 0.6, 0.9]))
            least = floors - int(random.integers(0, 2))  # sometimes below its own floors
            return dataclasses.replace(
                one, capacity_bytes=least + int(share * (one.capacity_bytes - floors))
            )
        if isinstance(one, MaxDistinct):
            return MaxDistinct(maximum=1)
        return one

    changed = dataclasses.replace(
        problem, constraints=tuple(tighter(one) for one in problem.constraints)
    )
    if problem.sense is Sense.MAX_VALUE:
        room = problem.capacity_bytes - problem.min_cost_bytes
        return changed.with_capacity(problem.min_cost_bytes + int(0.3 * room))
    return changed.with_target(problem.target + 0.6 * (problem.max_value - problem.target))


def infeasible_problems():
    for kind in KINDS:
        for seed in SEEDS:
            for sense in Sense:
                level = ("head", "layer")[seed % 2]
                problem = tightened(tiny_problem(kind, seed=seed, sense=sense, level=level), seed)
                if brute_force(problem) is None:
                    yield f"{kind} {seed} {sense.value}", problem


def with_goal(problem, goal):
    if problem.sense is Sense.MIN_COST:
        return problem.with_target(goal)
    return problem.with_capacity(int(goal))


def check_nearest(name, problem, nearest):
    minimises = problem.sense is Sense.MIN_COST
    if nearest is None:
        everything = (
            problem.with_capacity(problem.max_cost_bytes)
            if minimises
            else problem.with_target(-1e6)
        )
        assert brute_force(everything) is None, f"{name}: there is a nearest goal"
        return
    assert brute_force(with_goal(problem, nearest)) is not None, f"{name}: {nearest}"
    beyond = nearest + 1e-9 if minimises else nearest - 1
    assert brute_force(with_goal(problem, beyond)) is None, f"{name}: {nearest} is not best"


def one_tighter(problem, one):
    if isinstance(one, GroupCap):
        return dataclasses.replace(one, capacity_bytes=one.capacity_bytes - 1)
    assert isinstance(one, MaxDistinct)
    return MaxDistinct(maximum=one.maximum - 1) if one.maximum > 1 else None


def check_relaxations(name, problem):
    seen = Counter()
    for index, constraint in enumerate(problem.constraints):
        before, after = problem.constraints[:index], problem.constraints[index + 1 :]
        left_out = dataclasses.replace(problem, constraints=before + after)
        helps = brute_force(left_out) is not None
        found = relax(problem, index, deadline=time.monotonic() + LONG)
        assert helps == (found is not None), f"{name}: {constraint}"
        if found is None:
            continue
        relaxed, exact = found
        assert exact, name
        seen[type(constraint).__name__] += 1

        def under(changed):
            return dataclasses.replace(problem, constraints=(*before, changed, *after))  # noqa: B023

        assert brute_force(under(relaxed)) is not None, f"{name}: {relaxed}"
        tighter = one_tighter(problem, relaxed)
        if tighter is not None:
            assert brute_force(under(tighter)) is None, f"{name}: {relaxed} gives way too far"
    return seen


def nearest_to(problem, seconds=LONG):
    return diagnose(problem, deadline=time.monotonic() + seconds)


def test_the_nearest_goal_and_every_relaxation_are_the_best_ones():
    checked = 0
    seen = Counter()
    for name, problem in infeasible_problems():
        found = nearest_to(problem)
        assert found is not None, f"{name}: brute force finds no choice"
        nearest, exact = found
        assert exact, name
        check_nearest(name, problem, nearest)
        seen += check_relaxations(name, problem)
        seen["no goal at all"] += nearest is None
        checked += 1
    assert checked > 80
    for kind in ("GroupCap", "MaxDistinct", "no goal at all"):
        assert seen[kind] > 2, (kind, seen)  # else this test tests nothing about it


def test_nothing_is_claimed_without_time():
    problem = tiny_problem("concave", seed=0).with_target(math.pi)
    assert attempt(lambda: problem, time.monotonic()) is None
    assert attempt(lambda: problem, time.monotonic() + 9.0) is False
    assert nearest_to(problem, seconds=0.0) is None
