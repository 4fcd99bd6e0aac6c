"""What the tests of the exact solvers share: checks against every choice there is, and problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from factories import make_problem

from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import AllocationProblem, SideConstraint, Solver, Termination
from kvalloc.solvers._ilp_search import NOTHING, Search
from kvalloc.solvers._prices import Prices
from kvalloc.testing import brute_force
from kvalloc.testing.problems import CURVES, SIDES, larger_problem

SLACK = 1e-10


def kinds(*sides: str, curves: Sequence[str] = tuple(CURVES), worst: bool = False) -> list[str]:
    """Names of tiny problems with these side constraints."""
    scope = "worst:" if worst else ""
    return [f"{scope}{c}" + ("" if s == "plain" else f"+{s}") for s in sides for c in curves]


ALL_KINDS = (*kinds(*SIDES), *kinds(*SIDES, worst=True))


_OPTIMA: dict[str, Any] = {}


def optimum_of(problem: AllocationProblem) -> Any:
    """The best of all choices: looked for once, whatever solvers are held against it."""
    digest = problem.digest()
    if digest not in _OPTIMA:
        _OPTIMA[digest] = brute_force(problem)
    return _OPTIMA[digest]


def check_all(
    solver: Solver, cases: Iterable[tuple[str, AllocationProblem]], *, exact: bool
) -> Counter[str]:
    """Compare each answer with brute force; count how the solver ended.

    An optimal answer must be the optimum, a bound is never beaten, an infeasible problem has no
    choice at all. An exact solver must be optimal every time.
    """
    ends: Counter[str] = Counter()
    for name, problem in cases:
        if solver.can_solve(problem) is not True:
            ends["refused"] += 1
            continue
        optimum, answer = optimum_of(problem), answer_or_error(solver, problem)
        if not isinstance(answer, CheckedSolution):
            infeasible = isinstance(answer, InfeasibleError)
            assert infeasible or not exact, f"{name}: {answer}"
            assert optimum is None or not infeasible, f"{name}: {answer}"
            ends["infeasible" if infeasible else "gave up"] += 1
            continue
        assert optimum is not None, name
        best = optimum.objective
        assert not problem.is_better(answer.objective, best, SLACK), f"{name}: beats the optimum"
        assert not problem.is_better(best, answer.bound, SLACK), f"{name}: the bound is beaten"
        optimal = answer.termination is Termination.OPTIMAL
        assert optimal or not exact, f"{name}: {answer.detail}"
        assert not (optimal and problem.is_better(best, answer.objective, SLACK)), name
        ends[answer.termination.value] += 1
    return ends


def answer_or_error(
    solver: Solver, problem: AllocationProblem, **options: Any
) -> CheckedSolution | InfeasibleError | SolverError:
    """What the solver says, be it that it cannot."""
    try:
        return solve_problem(problem, solver, **options)
    except (InfeasibleError, SolverError) as error:
        return error


def medium_problem(
    seed: int,
    *,
    concave: bool = False,
    share: float = 0.3,
    target: bool = False,
    constraints: tuple[SideConstraint, ...] = (),
    **sizes: int,
) -> AllocationProblem:
    """Return losses, or concave curves, of 8 bytes an entry, and a share of all that can be had."""
    sizes = {"n_layers": 6, "n_heads": 3, "n_options": 24, **sizes}
    problem = larger_problem("concave" if concave else "losses", seed=seed, **sizes)
    problem = problem.replace(constraints=constraints)
    low, high = problem.min_cost_bytes, problem.max_cost_bytes
    if target:
        floor = problem.objective_value(0 * problem.last_options)
        return problem.with_target(problem.max_value - share * (problem.max_value - floor))
    return problem.with_capacity(int(low + share * (high - low)))


def hand_problem(**changes: Any) -> AllocationProblem:
    """Three units of three options: small enough to solve on paper.

    With 9 bytes the best is options (1, 2, 0): 4 + 5 + 1 = 10. By gain per byte the first steps
    are unit 1's two (2.0 and 1.0 a byte), unit 0's first (1.5 a byte).
    """
    fields: dict[str, Any] = {
        "tokens": np.array([[1, 2, 3]] * 3),
        "values": [[1.0, 4.0, 4.5], [0.0, 4.0, 5.0], [1.0, 1.5, 4.0]],
        "costs": [[1, 3, 5], [1, 3, 4], [1, 3, 6]],
        "capacity": 9,
    }
    return make_problem(**{**fields, **changes})


def put_every_option_in_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option is left out by the dual bound, no budget by the bounds of sets."""

    monkeypatch.setattr(Prices, "worth_keeping", lambda prices, room: np.isfinite(prices.loss))

    def one_program(self, sets, best):
        return self._core(sets.prices, NOTHING, self.limit)

    monkeypatch.setattr(Search, "_best_levels", one_program)
