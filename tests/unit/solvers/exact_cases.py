"""What the tests of the exact solvers share: checks against every choice there is, and problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import AllocationProblem, Sense, SideConstraint, Solver, Termination
from kvalloc.solvers._ilp_search import NOTHING, Search
from kvalloc.solvers._prices import Prices
from kvalloc.testing import brute_force
from kvalloc.testing.problems import CURVES, SIDES

SLACK, PAGE_BYTES = 1e-10, 4096
ALL_KINDS = tuple(
    f"{scope}{curves}" + ("" if side == "plain" else f"+{side}")
    for scope in ("", "worst:")
    for side in SIDES
    for curves in CURVES
)


def kinds(*sides: str, curves: Sequence[str] = tuple(CURVES), worst: bool = False) -> list[str]:
    """Names of tiny problems with these side constraints."""
    scope = "worst:" if worst else ""
    return [f"{scope}{c}" + ("" if s == "plain" else f"+{s}") for s in sides for c in curves]


_OPTIMA: dict[str, Any] = {}


def optimum_of(problem: AllocationProblem) -> Any:
    """The best of all choices: looked for once, whatever solvers are held against it."""
    digest = problem.digest()
    if digest not in _OPTIMA:
        _OPTIMA[digest] = brute_force(problem)
    return _OPTIMA[digest]


def check_all(
    solver: Solver,
    cases: Iterable[tuple[str, AllocationProblem]],
    *,
    exact: bool,
    may_give_up: bool = False,
) -> Counter[str]:
    """Compare every answer with brute force; count how the solver ended.

    Whatever is said must be true: an optimal answer is the optimum, a bound is never beaten, an
    infeasible problem has no choice at all. An exact solver has to be optimal every time.
    """
    ends: Counter[str] = Counter()
    for name, problem in cases:
        able = solver.can_solve(problem)
        if able is not True:
            assert isinstance(able, str), name
            assert "; use " in able or "; give " in able, able
            ends["refused"] += 1
            continue
        optimum = optimum_of(problem)
        answer = answer_or_error(solver, problem)
        if isinstance(answer, InfeasibleError):
            assert optimum is None, f"{name}: {answer}"
            ends["infeasible"] += 1
            continue
        if isinstance(answer, SolverError):
            assert may_give_up, name
            ends["gave up"] += 1
            continue
        assert optimum is not None, name
        check_answer(name, problem, answer, optimum.objective)
        if exact:
            assert answer.termination is Termination.OPTIMAL, f"{name}: {answer.detail}"
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


def check_answer(
    name: str, problem: AllocationProblem, answer: CheckedSolution, optimum: float
) -> None:
    slack = SLACK * max(1.0, abs(optimum))
    sign = 1.0 if problem.sense is Sense.MAX_VALUE else -1.0
    assert sign * (optimum - answer.objective) >= -slack, f"{name}: better than the optimum"
    assert sign * (answer.bound - optimum) >= -slack, f"{name}: the bound is beaten"
    if answer.termination is Termination.OPTIMAL:
        assert abs(answer.objective - optimum) <= slack, f"{name}: not the optimum"


def medium_problem(
    seed: int,
    *,
    n_layers: int = 6,
    n_heads: int = 3,
    n_options: int = 24,
    concave: bool = False,
    share: float = 0.3,
    target: bool = False,
    constraints: tuple[SideConstraint, ...] = (),
) -> AllocationProblem:
    """Curves as measured ones are: falling gains, jagged unless concave; pages of one size."""
    random = np.random.default_rng(seed)
    n_units = n_layers * n_heads
    fall = random.uniform(2.0, n_options / 2, (n_units, 1))
    gains = random.exponential(1.0, (n_units, n_options - 1)) * random.exponential(1, (n_units, 1))
    gains *= np.exp(-np.arange(n_options - 1) / fall)
    if concave:
        gains = -np.sort(-gains, axis=1)
    values = np.concatenate([np.zeros((n_units, 1)), np.cumsum(gains, axis=1)], axis=1)
    values /= values[:, -1].sum()
    pages = np.arange(1, n_options + 1, dtype=np.int64)
    low, high = n_units * PAGE_BYTES, n_units * n_options * PAGE_BYTES
    goal: dict[str, Any] = {"capacity_bytes": int(low + share * (high - low))}
    if target:
        goal = {"target": 1.0 - share}
    return AllocationProblem(
        tokens=np.broadcast_to(16 * pages, values.shape),
        values=values,
        costs=np.broadcast_to(PAGE_BYTES * pages, values.shape),
        option_counts=np.full(n_units, n_options, dtype=np.int64),
        weights=np.ones(n_units),
        layers=np.repeat(np.arange(n_layers), n_heads),
        heads=np.tile(np.arange(n_heads), n_layers),
        context_tokens=16 * n_options,
        protected_tokens=8,
        constraints=constraints,
        **goal,
    )


def hand_problem(**changes: Any) -> AllocationProblem:
    """Three units of three options: small enough to solve on paper.

    With 9 bytes the best is options (1, 2, 0): 4 + 5 + 1 = 10. By gain per byte the first steps
    are unit 1's two (2.0 and 1.0 a byte), unit 0's first (1.5 a byte).
    """
    fields: dict[str, Any] = {
        "tokens": np.array([[1, 2, 3]] * 3),
        "values": np.array([[1.0, 4.0, 4.5], [0.0, 4.0, 5.0], [1.0, 1.5, 4.0]]),
        "costs": np.array([[1, 3, 5], [1, 3, 4], [1, 3, 6]]),
        "option_counts": np.array([3, 3, 3]),
        "weights": np.ones(3),
        "layers": np.array([0, 1, 2]),
        "heads": np.array([-1, -1, -1]),
        "capacity_bytes": 9,
        "context_tokens": 3,
        "protected_tokens": 0,
    }
    return AllocationProblem(**{**fields, **changes})


def put_every_option_in_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option is left out by the dual bound, no budget by the bounds of sets."""

    monkeypatch.setattr(Prices, "worth_keeping", lambda prices, room: np.isfinite(prices.loss))

    def one_program(self, sets, best):
        return self._core(sets.prices, NOTHING, self.limit)

    monkeypatch.setattr(Search, "_best_levels", one_program)
