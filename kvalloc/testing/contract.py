"""The contract of a solver as a pytest suite: subclass it and give one fixture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import pytest

from kvalloc.allocation.request import RequestOptions
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, KVAllocError, SolverError
from kvalloc.problem import AllocationProblem, Solution, Solver, Termination
from kvalloc.problem.registry import solver_names
from kvalloc.testing.oracle import Optimum, brute_force
from kvalloc.testing.problems import KINDS, larger_problem, tiny_problem, tiny_problems

TOLERANCE = 1e-9
"""Objectives this close, relative to the larger of 1 and the objective, are equal."""


class SolverContract:
    """What kvalloc and its users rely on, for any solver.

    Every test runs on tiny problems of all kinds that the solver accepts; those that it refuses
    must be refused with a reason. `kvalloc.solve_problem` checks every answer on the way.

    Attributes
    ----------
    kinds : sequence of str
        Kinds of tiny problems, as in `kvalloc.testing.KINDS`.
    problems_per_kind : int
        Problems of each kind for each test, half of them with a capacity, half with a target.
    seed : int
        Of the first problem.
    exact : bool
        Set it True for a solver that must always prove its answer optimal where it is given time.
    may_give_up : bool
        Set it True for a rule that may fail to meet a target, or to keep side constraints, where
        another choice could. It must say so with a SolverError or an InfeasibleError.
    monotone : bool
        Set it False for a rule whose value may fall when there is more to spend. What claims to
        be optimal must be monotone in any case.
    time_limit_seconds : float
        Limit for the larger problems.

    Examples
    --------
    ::

        class TestMySolver(SolverContract):
            exact = True

            @pytest.fixture
            def solver(self):
                return MySolver()
    """

    kinds: ClassVar[Sequence[str]] = KINDS
    problems_per_kind: ClassVar[int] = 4
    seed: ClassVar[int] = 0
    exact: ClassVar[bool] = False
    may_give_up: ClassVar[bool] = False
    monotone: ClassVar[bool] = True
    time_limit_seconds: ClassVar[float] = 0.5

    @pytest.fixture
    def solver(self) -> Solver:
        """Return the solver under test: override this."""
        raise NotImplementedError("override the fixture 'solver' to return yours")

    def test_it_declares_itself(self, solver: Solver) -> None:
        """A name and a line for people; names are what ``--solver`` takes."""
        assert isinstance(solver, Solver)
        assert isinstance(solver.name, str)
        assert solver.name
        assert solver.name == solver.name.strip().lower().replace(" ", "_")
        assert isinstance(solver.summary, str)
        assert solver.summary
        assert "\n" not in solver.summary

    def test_it_refuses_with_a_reason(self, solver: Solver) -> None:
        """What it cannot solve it says early, in a sentence with the way out.

        That is another solver, or an option of `kvalloc.solve`, as `kvalloc.errors.option` names
        it to whoever asks: ``level='head'``, ``--level head``.
        """
        for name, problem in self._all_problems():
            answer = solver.can_solve(problem)
            if answer is True:
                continue
            assert isinstance(answer, str), f"{name}: can_solve says {answer!r}, not why"
            ways_out = ["--", *(f"{option}=" for option in RequestOptions.__annotations__)]
            ways_out += [other for other in solver_names() if other != solver.name]
            assert any(way in answer for way in ways_out), (
                f"{name}: the refusal names no solver to use instead: {answer}"
            )
            with pytest.raises(SolverError):
                solve_problem(problem, solver)

    def test_it_accepts_something(self, solver: Solver) -> None:
        """A suite that only ever skips proves nothing."""
        assert any(solver.can_solve(problem) is True for _, problem in self._all_problems())

    def test_its_choices_are_feasible(self, solver: Solver) -> None:
        """Capacity, target and side constraints hold, and the problem stays as it was.

        Budgets are options of their units, bytes those of the options: nothing is lost or added.
        """
        for name, problem in self._problems(solver):
            before = problem.digest()
            answer = self._solved(name, problem, solver)
            assert problem.digest() == before, f"{name}: the problem was changed"
            if answer is None:
                continue
            assert answer.choice.dtype.kind == "i", name
            tokens = problem.chosen_tokens(answer.choice)
            for unit, chosen in enumerate(tokens.tolist()):
                assert chosen in problem.tokens[unit, : problem.option_counts[unit]], name
            costs = [int(problem.costs[u, k]) for u, k in enumerate(answer.choice.tolist())]
            assert answer.cost_bytes == sum(costs), name
            if problem.capacity_bytes is not None:
                assert sum(costs) <= problem.capacity_bytes, name

    def test_its_claims_hold_against_brute_force(self, solver: Solver) -> None:
        """Optimal is optimal, a bound is a bound, and nothing beats the oracle."""
        for name, problem in self._problems(solver):
            optimum = brute_force(problem)
            answer = self._solved(name, problem, solver, optimum)
            if answer is None:
                continue
            assert optimum is not None, f"{name}: solved, and brute force finds no choice"
            best = optimum.objective
            assert not problem.is_better(answer.objective, best, TOLERANCE), f"{name}: beats brute"
            if self.exact:
                assert answer.termination is Termination.OPTIMAL, f"{name}: {answer.detail}"
            if answer.termination is Termination.OPTIMAL:
                assert not problem.is_better(best, answer.objective, TOLERANCE), (
                    f"{name}: claims {answer.objective} is optimal, brute force finds {best}"
                )
            # The tighter of the solver's bound and kvalloc's own.
            assert not problem.is_better(best, answer.bound, TOLERANCE), (
                f"{name}: the bound {answer.bound} is beaten by {best}"
            )

    def test_more_is_never_worse(self, solver: Solver) -> None:
        """More to spend gives at least as much value, a higher target costs at least as much.

        A rule owes that only where an entry more is never worth less.
        """
        for name, problem in self._problems(solver):
            goals = _goals(problem)
            owed = self.monotone and bool(np.all(np.diff(problem.values, axis=1) >= 0))
            answers = [self._solved(f"{name} at {goal!r}", goal, solver) for goal in goals]
            solved = [answer for answer in answers if answer is not None]
            for first, second in zip(solved, solved[1:], strict=False):
                both = (first.termination, second.termination)
                if owed or both == (Termination.OPTIMAL, Termination.OPTIMAL):
                    slack = TOLERANCE * max(1.0, abs(first.objective))
                    assert second.objective >= first.objective - slack, (
                        f"{name}: {first.objective} and with more {second.objective}"
                    )

    def test_it_answers_the_same_twice(self, solver: Solver) -> None:
        """Deterministic, and without a memory of the problems before."""
        first: dict[str, list[int] | None] = {}
        problems = list(self._problems(solver))
        for name, problem in [*problems, *reversed(problems)]:
            answer = self._solved(name, problem, solver)
            choice = None if answer is None else answer.choice.tolist()
            assert first.setdefault(name, choice) == choice, name

    def test_it_keeps_a_time_limit(self, solver: Solver) -> None:
        """On larger problems, too, it ends with a true answer or says that it found none.

        `kvalloc.solve` gives up a solver of another package that goes on long after its limit.
        """
        for kind in ("concave", "losses", "unequal_costs", "losses+max_distinct"):
            problem = larger_problem(kind, seed=self.seed)
            if solver.can_solve(problem) is not True:
                continue
            try:
                solve_problem(problem, solver, time_limit_seconds=self.time_limit_seconds)
            except (InfeasibleError, SolverError) as error:
                if error.__cause__ is not None:  # it crashed, or was given up
                    pytest.fail(f"{kind}: {error}")

    def test_it_says_why_it_stopped(self, solver: Solver) -> None:
        """Out of time only where there was a limit; optimal only with a bound that meets it."""
        for name, problem in self._problems(solver):
            try:
                solution = solver.solve(problem)
            except KVAllocError:
                continue
            assert isinstance(solution, Solution), name
            assert solution.termination is not Termination.TIME_LIMIT, f"{name}: had no limit"
            assert isinstance(solution.detail, str), name
            assert "\n" not in solution.detail, name
            assert solution.bound is None or math.isfinite(solution.bound), name
            if solution.termination is Termination.OPTIMAL:
                assert solution.bound == pytest.approx(
                    problem.objective(solution.choice), rel=TOLERANCE, abs=TOLERANCE
                ), name

    def test_it_is_right_at_the_edges(self, solver: Solver) -> None:
        """No choice to make, no room at all, room for everything."""
        for kind in dict.fromkeys(kind.partition("+")[0] for kind in self.kinds):
            for goal, problem in _edges(tiny_problem(kind, seed=self.seed)):
                if solver.can_solve(problem) is True:
                    self._solved(f"{kind}, {goal}", problem, solver)

    def _all_problems(self) -> Iterator[tuple[str, AllocationProblem]]:
        return tiny_problems(
            len(self.kinds) * self.problems_per_kind, seed=self.seed, kinds=self.kinds
        )

    def _problems(self, solver: Solver) -> Iterator[tuple[str, AllocationProblem]]:
        return (one for one in self._all_problems() if solver.can_solve(one[1]) is True)

    def _solved(
        self,
        name: str,
        problem: AllocationProblem,
        solver: Solver,
        optimum: Optimum | None = None,
    ) -> CheckedSolution | None:
        """Return the checked answer; None if the solver rightly says that there is none."""
        try:
            return solve_problem(problem, solver)
        except (InfeasibleError, SolverError) as error:
            crashed = isinstance(error, SolverError) and error.__cause__ is not None
            if crashed or (isinstance(error, SolverError) and not self.may_give_up):
                pytest.fail(f"{name}: {error}")
            if not self.may_give_up and (optimum or brute_force(problem)) is not None:
                pytest.fail(f"{name}: {error}, but brute force finds a choice")
            return None


def _goals(problem: AllocationProblem) -> list[AllocationProblem]:
    """Return the problem with rising capacities, or rising targets."""
    if problem.capacity_bytes is not None:
        low, high = problem.min_cost_bytes, problem.max_cost_bytes
        return [problem.with_capacity(low + (high - low) * part // 3) for part in range(4)]
    assert problem.target is not None  # a problem has one of both
    floor = problem.objective_value(np.zeros(problem.n_units, dtype=np.int64))
    top = problem.target
    return [problem.with_target(floor + (top - floor) * part / 3) for part in range(4)]


def _edges(problem: AllocationProblem) -> Iterator[tuple[str, AllocationProblem]]:
    """Yield the problem where there is nothing to decide, or almost."""
    floor = problem.objective_value(np.zeros(problem.n_units, dtype=np.int64))
    yield "only the floors fit", problem.with_capacity(problem.min_cost_bytes)
    yield (
        "one byte short of one step",
        problem.with_capacity(problem.min_cost_bytes + problem.lattice_bytes - 1),
    )
    yield "everything fits", problem.with_capacity(problem.max_cost_bytes)
    yield "far more than everything fits", problem.with_capacity(2**62)
    yield "a target that the floors meet", problem.with_target(min(floor, problem.max_value))
    yield "a target that only the best meets", problem.with_target(problem.max_value)
    names = ("tokens", "values", "costs", "bits")
    arrays = {name: getattr(problem, name) for name in names}
    first = {name: array[..., :1].copy() for name, array in arrays.items() if array is not None}
    single = problem.with_capacity(problem.min_cost_bytes).replace(
        **first, option_counts=np.ones(problem.n_units, dtype=np.int64), constraints=()
    )
    yield "one option for each unit", single
