"""Forged certificates and lying solvers, made by rule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from factories import make_losses, make_scores
from scripted_solver import OPTIMAL, Scripted, says

import kvalloc
from kvalloc.errors import SolverError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem import AllocationProblem, GroupCap, Sense
from kvalloc.testing import brute_force, tiny_problems

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


def forged_profiles() -> Iterator[tuple[str, BudgetProfile, Any]]:
    """Each forgery of each poor decision, with its name and its score profile."""
    for make, asked in POOR:
        scores = make()
        try:
            poor = kvalloc.solve(scores, solver="uniform", **asked)
        except SolverError:
            continue  # no equal budgets reach the target within the caps
        for name, forge in FORGERIES.items():
            yield f"{name}, {asked}", poor.replace(**forge(poor)), scores


def liar(choice: Any, prices: tuple[float, ...] = ()) -> Scripted:
    """A solver that says of some choice that nothing is better."""

    def answer(problem: AllocationProblem) -> Any:
        bound = problem.objective(choice)
        return says(choice, bound=bound, termination=OPTIMAL, prices=prices)(problem)

    return Scripted(answer)


SIDES = ("nested_caps", "crossing_caps", "max_distinct", "mixed")
LIED_ABOUT = (
    *("concave", "losses", "unequal_costs", "worst:concave"),
    *(f"{curves}+{side}" for curves in ("concave", "losses") for side in SIDES),
    *("worst:losses+nested_caps", "bits+nested_caps"),
)


def lies() -> Iterator[tuple[str, AllocationProblem, Any, tuple[float, ...]]]:
    """Tiny problems, a poor choice of each, and no prices of its limits or prices of nothing."""
    for name, problem in tiny_problems(6 * len(LIED_ABOUT), kinds=LIED_ABOUT, seed=600):
        best, poor = brute_force(problem), worst_choice(problem)
        if best is None or poor is None:
            continue
        if not problem.is_better(best.objective, problem.objective(poor), 1e-6):
            continue
        caps = sum(isinstance(one, GroupCap) for one in problem.constraints)
        for prices in ((), (0.0,) * (1 + caps)):
            yield name, problem, poor, prices


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
