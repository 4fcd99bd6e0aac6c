"""Forged certificates and lying solvers, made by rule: none of them passes as proven."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from factories import make_bits, make_choices, make_losses, make_problem, make_scores

import kvalloc
from kvalloc.allocation.audit import verify
from kvalloc.allocation.frontier import trace_frontier
from kvalloc.allocation.verification import prove, solve_problem
from kvalloc.errors import KVAllocError, SolverError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem import (
    AllocationProblem,
    GroupCap,
    MaxDistinct,
    Sense,
    Solution,
    Solver,
    Termination,
    bound_at,
)
from kvalloc.problem.registry import get_solver
from kvalloc.report.wording import decision_fields, proof_text
from kvalloc.testing import brute_force, tiny_problem, tiny_problems

Forgery = Callable[[BudgetProfile], dict[str, Any]]


def optimal_by(source: str) -> Forgery:
    """A poor decision that is stated to be the best, and who is named for it."""

    def forged(poor: BudgetProfile) -> dict[str, Any]:
        claims = {"bound": poor.objective, "bound_source": source, "termination": "optimal"}
        return claims if source == "dual" else {**claims, "decided_by": source, "solver": source}

    return forged


def at_prices(poor: BudgetProfile) -> dict[str, Any]:
    return {
        **optimal_by("dual")(poor),
        "prices": (1.0, *(0.5 for _ in poor.requested.get("cap", ()))),
    }


def closer(poor: BudgetProfile) -> dict[str, Any]:
    assert poor.bound is not None
    return {"bound": 0.9 * poor.objective + 0.1 * poor.bound}


FORGERIES: dict[str, Forgery] = {
    "optimal by duality": optimal_by("dual"),
    "optimal by ilp": optimal_by("ilp"),
    "optimal by nobody": optimal_by(""),
    "optimal at made up prices": at_prices,
    "a tighter bound": closer,
    "a tighter bound, by a solver": lambda poor: {**closer(poor), "bound_source": "uniform"},
    "optimal beside its gap": lambda poor: {"termination": "optimal"},
    "optimal without a bound": lambda poor: {"termination": "optimal", "bound": None},
    "another price": lambda poor: {"value_per_mib": 2 * (poor.value_per_mib or 1e-3)},
}

POOR: list[tuple[Callable[[], Any], dict[str, Any]]] = [
    (make, {**goal, "level": "head", **limits})
    for (make, goals), limits in itertools.product(
        (
            (make_scores, ({"budget": "35%"}, {"target_retention": 0.7})),
            (make_losses, ({"budget": "50%", "objective": "loss"}, {"target_loss": 0.05})),
        ),
        ({}, {"cap": ("0-1=1MiB",)}, {"cap": ("0=600B", "0-1=1200B")}, {"max_distinct": 3}),
    )
    for goal in goals
]


def accepted(profile: BudgetProfile, scores: Any) -> bool:
    return all(check.passed and check.proven for check in verify(profile, scores))


def test_no_forged_certificate_is_accepted() -> None:
    """Poor decisions (equal budgets) with and without limits, stated to be better ones."""
    seen: Counter[str] = Counter()
    for make, asked in POOR:
        scores = make()
        try:
            poor = kvalloc.solve(scores, solver="uniform", **asked)
        except SolverError:
            continue  # no equal budgets reach the target within the caps
        assert all(check.passed for check in verify(poor, scores)), asked
        for name, forge in FORGERIES.items():
            checks = verify(poor.replace(**forge(poor)), scores)
            assert not all(check.passed and check.proven for check in checks), (name, asked)
            seen["forged"] += 1
            seen["refuted"] += not all(check.passed for check in checks)
    assert seen["forged"] >= 100
    assert seen["refuted"] >= 0.75 * seen["forged"]


class Liar(Solver):
    """Says of some choice that nothing is better."""

    name: ClassVar[str] = "liar"
    summary: ClassVar[str] = "says of some choice that nothing is better"

    def __init__(self, choice: Any, prices: tuple[float, ...] = ()) -> None:
        self.choice, self.prices = np.asarray(choice), prices

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        return True

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        objective = problem.objective(self.choice)
        return Solution(
            choice=self.choice,
            objective=objective,
            bound=objective,
            termination=Termination.OPTIMAL,
            prices=self.prices,
        )


SIDES = ("nested_caps", "crossing_caps", "same_budget", "max_distinct", "mixed")
LIED_ABOUT = (
    *("concave", "losses", "unequal_costs", "worst:concave", "tail:concave"),
    *(f"{curves}+{side}" for curves in ("concave", "losses") for side in SIDES),
    *("worst:losses+nested_caps", "tail:losses+nested_caps", "bits+nested_caps"),
)


def test_no_liar_is_believed() -> None:
    """What is not the best, stated to be it, is refused or stands on the liar's word alone."""
    seen: Counter[str] = Counter()
    for name, problem in tiny_problems(6 * len(LIED_ABOUT), kinds=LIED_ABOUT, seed=600):
        best, poor = brute_force(problem), worst_choice(problem)
        if best is None or poor is None:
            continue
        if not problem.is_better(best.objective, problem.objective(poor), 1e-6):
            continue
        caps = sum(isinstance(one, GroupCap) for one in problem.constraints)
        for prices in {(), (0.0,) * (1 + caps)}:
            seen["lies"] += 1
            try:
                answer = solve_problem(problem, Liar(poor, prices))
            except SolverError:
                seen["refused"] += 1
            else:
                assert (answer.bound, answer.bound_source) == (answer.objective, "liar"), name
        if problem.target is None:
            points = []
            try:
                points = trace_frontier(problem, Liar(poor), [problem.capacity_bytes or 0])
            except KVAllocError:
                seen["refused on the frontier"] += 1
            assert all(point.bound_source == "liar" for point in points), name
    assert seen["lies"] >= 100
    assert seen["refused"] >= 0.5 * seen["lies"], seen


def worst_choice(problem: AllocationProblem) -> Any:
    """The feasible choice of the least value or the highest cost, of a few by chance."""
    random, found = np.random.default_rng(0), []
    for _ in range(60):
        choice = random.integers(0, problem.option_counts)
        cost, value = problem.cost(choice), problem.objective_value(choice)
        within = problem.capacity_bytes is None or cost <= problem.capacity_bytes
        if within and problem.meets_target(value) and problem.side_fault(choice) is None:
            found.append(choice)
    sign = 1.0 if problem.sense is Sense.MAX_VALUE else -1.0
    return min(found, key=lambda choice: sign * problem.objective(choice), default=None)


VALUES = [[0.0, 0.5, 0.75], [0.0, 0.25, 0.375]]


@pytest.mark.parametrize(
    "side",
    [GroupCap(name="device 0", units=(0, 1), capacity_bytes=9), MaxDistinct(most=2)],
    ids=["cap", "distinct"],
)
def test_a_limit_that_does_not_bind_hides_no_lie(side: Any) -> None:
    problem = make_problem(VALUES, capacity=2, constraints=(side,))
    with pytest.raises(SolverError, match=r"bound of 0, but a choice of 0\.[57]5? exists"):
        solve_problem(problem, Liar([0, 0]))


@pytest.mark.parametrize("prices", [(1.0,), (1.0, -1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_prices_that_are_none_are_refused(prices: tuple[float, ...]) -> None:
    cap = GroupCap(name="device 0", units=(0,), capacity_bytes=1)
    problem = make_problem(VALUES, capacity=2, constraints=(cap,))
    with pytest.raises(SolverError, match="reports prices of"):
        solve_problem(problem, Liar([1, 1], prices))


@pytest.mark.parametrize("curves", ["concave", "losses", "unequal_costs", "bits"])
def test_any_prices_of_caps_give_a_bound(curves: str) -> None:
    random = np.random.default_rng(1)
    for seed in range(12):
        for side, sense in itertools.product(("nested_caps", "crossing_caps"), Sense):
            problem = tiny_problem(f"{curves}+{side}", seed=seed, sense=sense)
            best = brute_force(problem)
            if best is None:
                continue
            for scale in 10.0 ** random.uniform(-6, 3, 3):
                bound = bound_at(problem, *(scale * random.random(3)))
                assert not problem.is_better(best.objective, bound, 1e-11)


def test_bounds_under_nested_caps_are_proven_again_from_stored_prices() -> None:
    proven = 0
    for seed in range(20):
        for sense in Sense:
            problem = tiny_problem("concave+nested_caps", seed=seed, sense=sense)
            best = brute_force(problem)
            if best is None:
                continue
            answer = solve_problem(problem, get_solver("flow"))
            assert (answer.bound_source, answer.bound) == ("dual", best.objective)
            again = prove(problem, answer.choice, answer.prices).bound
            assert again == pytest.approx(best.objective, abs=1e-10)
            proven += bool(answer.prices)
    assert proven > 5
    scores = make_scores(2)
    asked = {"budget": "40%", "level": "head", "cap": ("0=500B", "0-1=900B")}
    profile = kvalloc.solve(scores, **asked)
    assert len(profile.prices) == 3
    assert accepted(profile, scores)
    assert decision_fields(profile)["solver"].endswith("optimal")
    checks = verify(profile.replace(prices=()), scores)
    assert not all(check.passed for check in checks)


ASK_LOSS = {"budget": "40%", "level": "head", "objective": "loss"}


def test_optimal_by_word_reads_so_until_another_back_end_agrees() -> None:
    scores = make_choices(0)
    profile = kvalloc.solve(scores, solver="dp", **ASK_LOSS)
    assert (profile.termination, profile.optimal_by_word) == ("optimal", "dp")
    assert decision_fields(profile)["solver"] == (
        "dp, optimal for the sum of single losses, not proven again: dp's word"
    )
    assert proof_text(profile).startswith(
        "Optimal for the sum of single losses by dp's word, not proven again: no"
    )
    [check] = [check for check in verify(profile, scores) if check.name == "bound"]
    assert (check.passed, check.proven) == (True, False)
    assert check.found.endswith("; not proven again: dp's word")
    again = {check.name: check for check in verify(profile, scores, resolve=True)}
    assert all(check.passed for check in again.values())
    assert (again["bound"].proven, again["solved again"].proven) == (True, True)
    assert again["solved again"].found.endswith("by ilp:backend=highs, optimal")


def test_solving_again_refutes_what_nothing_else_does() -> None:
    """A choice next to the best one, stated to be the best by a solver."""
    scores = make_losses(1)
    asked = {**ASK_LOSS, "cap": ("0=700B", "0-1=1100B")}
    near = kvalloc.solve(scores, solver="lagrangian", **asked)
    best = kvalloc.solve(scores, solver="ilp", **asked)
    forged = near.replace(**optimal_by("ilp")(near))
    refuted = {c.name for c in verify(forged, scores, resolve=True) if not c.passed}
    assert ("solved again" in refuted) == (best.objective > near.objective + 1e-9)
    poor = kvalloc.solve(scores, solver="uniform", **asked)
    forged = poor.replace(**optimal_by("ilp")(poor))
    assert "solved again" in {c.name for c in verify(forged, scores, resolve=True) if not c.passed}


@pytest.mark.parametrize("used", ["highs", "cp_sat"])
def test_another_back_end_solves_again(used: str) -> None:
    scores = make_bits(3)
    asked = {"budget": "25%", "level": "head", "bits": (16, 8, 4)}
    profile = kvalloc.solve(scores, solver=f"ilp:backend={used}", **asked)
    profile = profile.replace(detail={"highs": "HiGHS optimal", "cp_sat": "CP-SAT optimal"}[used])
    [again] = [c for c in verify(profile, scores, resolve=True) if c.name == "solved again"]
    assert again.passed
    assert used not in again.found.partition(",")[0]
