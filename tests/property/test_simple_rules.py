"""No solver that searches ends below the best simple rule that fits, whatever time it has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvalloc.accounting import IntArray
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import KVAllocError
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap
from kvalloc.problem.registry import get_solver
from kvalloc.testing import tiny_problems
from kvalloc.testing.problems import CURVES, SIDES, larger_problem

SEARCHES = ("auto", "ilp", "dp", "lagrangian", "hull", "max_min")
SCOPES = ("", "worst:")
KINDS = [
    f"{scope}{curves}" + ("" if side == "plain" else f"+{side}")
    for scope in SCOPES
    for side in SIDES
    for curves in CURVES
]


def answer_of(
    name: str, problem: AllocationProblem, seconds: float | None = None
) -> CheckedSolution | None:
    try:
        return solve_problem(problem, get_solver(name), time_limit_seconds=seconds)
    except KVAllocError:
        return None


def is_allowed(problem: AllocationProblem, choice: IntArray) -> bool:
    within = problem.capacity_bytes is None or problem.cost(choice) <= problem.capacity_bytes
    return within and problem.side_fault(choice) is None


def greedy(problem: AllocationProblem) -> float | None:
    """The option with the most value per byte, whatever still fits, until the target is met."""
    choice = np.zeros(problem.n_units, dtype=np.int64)
    while is_allowed(problem, choice):
        if problem.target is not None and problem.meets_target(problem.objective_value(choice)):
            return problem.objective(choice)
        changes = []
        for unit, count in enumerate(problem.option_counts.tolist()):
            for option in range(int(choice[unit]) + 1, count):
                changed = choice.copy()
                changed[unit] = option
                gain = float(problem.gains(choice, changed)[unit])
                if gain > 0 and is_allowed(problem, changed):
                    cost = problem.cost(changed) - problem.cost(choice)
                    changes.append((gain / cost, -unit, -option))
        if not changes:
            return problem.objective(choice) if problem.target is None else None
        _, unit, option = max(changes)
        choice[-unit] = -option
    return None


def check(problem: AllocationProblem, case: str, seconds: float | None) -> int:
    """Compare each search with equal and proportional budgets, with greedy if it has its time."""
    rules = [answer_of(rule, problem) for rule in ("uniform", "proportional")]
    known = [rule.objective for rule in rules if rule is not None]
    if seconds is None and (reached := greedy(problem)) is not None:
        known.append(reached)
    compared = 0
    for name in SEARCHES:
        if not known or get_solver(name).can_solve(problem) is not True:
            continue
        if name == "max_min" and problem.aggregate is not Aggregate.WORST:
            continue  # there it is a rule itself
        answer = answer_of(name, problem, seconds)
        assert answer is not None, (name, case)
        for other in known:
            assert not problem.is_better(other, answer.objective, 1e-9), (name, case, known)
        compared += 1
    return compared


@pytest.mark.parametrize(("seed", "seconds"), [(80, 1e-3), (81, None)], ids=["no time", "any time"])
def test_no_search_ends_below_a_simple_rule(seed: int, seconds: float | None) -> None:
    """For the sum and the worst unit, under each kind of limit."""
    cases = tiny_problems(len(KINDS), kinds=KINDS, seed=seed)
    assert sum(check(problem, case, seconds) for case, problem in cases) >= 100


def capped(seed: int) -> Iterator[AllocationProblem]:
    """Five layers of three heads, whole pages, the worst unit, two caps of groups."""
    random = np.random.default_rng(seed)
    base = larger_problem("concave", seed=seed, n_layers=5, n_heads=3, n_options=24)
    steps = int(random.integers(5, 30))
    values = np.floor(steps * base.values) / steps
    flat = base.replace(values=values, weights=np.ones(15), aggregate=Aggregate.WORST)
    for overlap in (0, 3):
        caps = []
        for name, units in (("a", range(6 + overlap)), ("b", range(6, 15))):
            low, high = (int(flat.costs[list(units), at].sum()) for at in (0, -1))
            size = int(low + random.uniform(0.1, 0.6) * (high - low))
            caps.append(GroupCap(name=name, units=tuple(units), capacity_bytes=size))
        room = flat.max_cost_bytes - flat.min_cost_bytes
        capacity = int(flat.min_cost_bytes + random.uniform(0.2, 0.5) * room)
        yield flat.replace(constraints=tuple(caps)).with_capacity(capacity)


@pytest.mark.parametrize("seconds", [1e-3, 0.2])
def test_a_level_that_is_not_decided_ends_no_search(seconds: float) -> None:
    """Bisection stopped at .5455 in such a problem, where equal budgets reach .9455."""
    cases = [problem for seed in range(6) for problem in capped(seed)]
    assert sum(check(problem, "capped", seconds) for problem in cases) >= 20
