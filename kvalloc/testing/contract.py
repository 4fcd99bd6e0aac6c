"""Contract of a solver as a pytest suite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest

from kvalloc.allocation.request import RequestOptions
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, KVAllocError, SolverError
from kvalloc.problem import AllocationProblem, Solver, Termination
from kvalloc.problem.registry import solver_names
from kvalloc.testing.oracle import brute_force
from kvalloc.testing.problems import KINDS, larger_problem, tiny_problems

TOLERANCE = 1e-9
"""Relative difference, to the larger of 1 and the objective, up to which objectives are equal."""


class SolverContract:
    """Guarantees of any solver: subclass it, override the fixture ``solver``.

    Tests run on tiny problems that the solver accepts; it must refuse others with a reason.
    `kvalloc.allocation.verification.solve_problem` recomputes every claim: whole choice, capacity,
    target, side constraints, objective, bound.

    Attributes
    ----------
    kinds : sequence of str
        From `kvalloc.testing.KINDS`.
    problems_per_kind : int
        For each test, half with a capacity, half with a target.
    seed : int
        Seed of the first problem.
    exact : bool
        True if, given time, it must prove its answer optimal.
    may_give_up : bool
        True for a rule that may miss a reachable target, or break side constraints, with a
        SolverError or InfeasibleError.
    monotone : bool
        False for a rule that may reach less value with more to spend. Optimal answers must be
        monotone.
    time_limit_seconds : float
        For the larger problems.
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
        """Return the solver under test."""
        raise NotImplementedError("override the fixture 'solver' to return yours")

    def test_it_declares_itself(self, solver: Solver) -> None:
        """Check the name, which ``--solver`` takes, and the summary's one line."""
        assert isinstance(solver, Solver)
        assert isinstance(solver.name, str)
        assert solver.name
        assert solver.name == solver.name.strip().lower().replace(" ", "_")
        assert isinstance(solver.summary, str)
        assert solver.summary
        assert "\n" not in solver.summary

    def test_it_refuses_with_a_reason(self, solver: Solver) -> None:
        """Check that it accepts some problems, and refuses others with the way out.

        That is another solver, or an option of `kvalloc.solve` as `kvalloc.errors.option` writes
        it: ``level='head'``, ``--level head``.
        """
        accepted = 0
        for name, problem in self._all_problems():
            answer = solver.can_solve(problem)
            if answer is True:
                accepted += 1
                continue
            assert isinstance(answer, str), f"{name}: can_solve says {answer!r}, not why"
            ways_out = ["--", *(f"{option}=" for option in RequestOptions.__annotations__)]
            ways_out += [other for other in solver_names() if other != solver.name]
            assert any(way in answer for way in ways_out), (
                f"{name}: the refusal names no solver to use instead: {answer}"
            )
            with pytest.raises(SolverError):
                solve_problem(problem, solver)
        assert accepted, "it refuses every problem"

    def test_its_claims_hold_against_brute_force(self, solver: Solver) -> None:
        """Check optimal answers and bounds by the oracle."""
        for name, problem in self._problems(solver):
            answer = self._solved(name, problem, solver)
            if answer is None:
                continue
            optimum = brute_force(problem)
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
        """Check that more to spend gives no less value, and a higher target costs no less.

        Rules must pass only if more entries are never worth less.
        """
        for name, problem in self._problems(solver):
            owed = self.monotone and bool(np.all(np.diff(problem.values, axis=1) >= 0))
            answers = [self._solved(name, goal, solver) for goal in _rising_goals(problem)]
            for first, second in pairwise(answer for answer in answers if answer is not None):
                both = {first.termination, second.termination}
                if owed or both == {Termination.OPTIMAL}:
                    slack = TOLERANCE * max(1.0, abs(first.objective))
                    assert second.objective >= first.objective - slack, (
                        f"{name}: {first.objective} and with more {second.objective}"
                    )

    def test_it_answers_the_same_twice(self, solver: Solver) -> None:
        """Check that it is deterministic, and remembers no earlier problem."""
        first: dict[str, list[int] | None] = {}
        problems = list(self._problems(solver))
        for name, problem in [*problems, *reversed(problems)]:
            answer = self._solved(name, problem, solver)
            choice = None if answer is None else answer.choice.tolist()
            assert first.setdefault(name, choice) == choice, name

    def test_it_keeps_a_time_limit(self, solver: Solver) -> None:
        """Check that larger problems end with a true answer, or an error.

        `kvalloc.solve` abandons other packages' solvers long after the limit.
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
        """Check that time ends it only with a limit; its detail is one line, its bound finite."""
        for name, problem in self._problems(solver):
            with suppress(KVAllocError):
                solution = solver.solve(problem)
                assert solution.termination is not Termination.TIME_LIMIT, f"{name}: had no limit"
                assert "\n" not in solution.detail, name
                assert solution.bound is None or math.isfinite(solution.bound), name

    def test_it_accepts_units_without_a_choice(self, solver: Solver) -> None:
        """Check problems with one option for each unit, in the bytes of these options."""
        for name, problem in self._problems(solver):
            first = np.zeros((problem.n_units, 1), dtype=np.int64)
            single = problem.replace(constraints=()).with_capacity(problem.min_cost_bytes)
            single = single.with_options(first, first[:, 0] + 1)
            if solver.can_solve(single) is True:
                self._solved(name, single, solver)

    def _all_problems(self) -> Iterator[tuple[str, AllocationProblem]]:
        return tiny_problems(
            len(self.kinds) * self.problems_per_kind, seed=self.seed, kinds=self.kinds
        )

    def _problems(self, solver: Solver) -> Iterator[tuple[str, AllocationProblem]]:
        return (one for one in self._all_problems() if solver.can_solve(one[1]) is True)

    def _solved(
        self, name: str, problem: AllocationProblem, solver: Solver
    ) -> CheckedSolution | None:
        before = problem.digest()
        try:
            answer = solve_problem(problem, solver)
        except (InfeasibleError, SolverError) as error:
            gave_up = self.may_give_up and error.__cause__ is None  # with a cause it crashed
            if not (gave_up or isinstance(error, InfeasibleError)):
                pytest.fail(f"{name}: {error}")
            if not self.may_give_up and brute_force(problem) is not None:
                pytest.fail(f"{name}: {error}, but brute force finds a choice")
            return None
        assert problem.digest() == before, f"{name}: the problem was changed"
        return answer


def _rising_goals(problem: AllocationProblem) -> list[AllocationProblem]:
    if problem.capacity_bytes is None:
        best = problem.max_value
        floor = problem.objective_value(np.zeros(problem.n_units, dtype=np.int64))
        return [problem.with_target(one) for one in np.linspace(min(floor, best), best, 4)]
    low, high = problem.min_cost_bytes, problem.max_cost_bytes
    sizes = {low + (high - low) * part // 3 for part in range(4)}
    sizes |= {low + problem.lattice_bytes - 1, 2**62}  # a byte short of one step; more than all
    return [problem.with_capacity(size) for size in sorted(sizes)]
