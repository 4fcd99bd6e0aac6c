"""Problems of too many options: some of them first, then finer ones near the answer.

Options are first spread evenly, then equally many lie between the neighbours of the choice, until
none is left out. The bound is the dual of the whole problem at the last prices, so it covers left
out options.
"""

from __future__ import annotations

import time
from abc import abstractmethod

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InfeasibleError, SolverError, option
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    MaxDistinct,
    Solution,
    Solver,
    bound_at,
    deadline_after,
    dual_bound,
)
from kvalloc.solvers._prices import equal_choices

MOST_OPTIONS = 2**17
"""A problem with more options in all is solved by parts."""

MOST_LIMITED = 2**16
"""The same limit under side constraints, with slower linear programs."""

PART_OPTIONS = 2**15
"""Options of a part."""

PART_CAPPED = 2**13
"""Options of a part under caps: their linear program takes .2 s, and 5 s for four times as many."""


RESERVED = 0.3
"""Share of the time limit reserved for bounds over all options, before and after."""


class ByParts(Solver):
    """A solver that takes problems with too many options by parts."""

    gap: float = 0.0
    """Relative gap at which it may stop."""

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Return the choice by `solve_whole`, of all options or of parts."""
        deadline = deadline_after(time_limit_seconds)
        if int(problem.option_counts.sum()) <= self.sizes(problem)[0]:
            return self.solve_whole(problem, deadline)
        return _by_parts(self, problem, deadline - RESERVED * (deadline - time.monotonic()))

    def sizes(self, problem: AllocationProblem) -> tuple[int, int]:
        """Return the most options of an undivided problem, and of a part."""
        limit = MOST_LIMITED if problem.constraints else MOST_OPTIONS
        return limit, PART_CAPPED if problem.caps else PART_OPTIONS

    @abstractmethod
    def solve_whole(self, problem: AllocationProblem, deadline: float) -> Solution:
        """Return a solution with prices by a ``time.monotonic()``."""

    def rough(self, problem: AllocationProblem) -> ByParts:
        """Return the solver for all parts but the last."""
        return self


def _by_parts(solver: ByParts, problem: AllocationProblem, deadline: float) -> Solution:
    dual = None if problem.aggregate is Aggregate.SUM else dual_bound(problem)
    choice, spacing = problem.last_options // 2, int(problem.last_options.max() + 1) // 2
    answer: Solution | None = None
    prices: list[tuple[float, ...]] = []
    while answer is None or (spacing > 1 and time.monotonic() < deadline):
        steps = _steps(problem, choice, spacing, solver.sizes(problem)[1])
        columns, counts = _columns(problem, choice, steps)
        finer = -(-2 * spacing // (steps.size - 1))
        known, now = answer, time.monotonic()
        able, until = solver.rough(problem), now + (deadline - now) / 3
        if finer <= 1:
            able, until = solver, deadline
        try:
            answer = able.solve_whole(problem.with_options(columns, counts), until)
        except (InfeasibleError, SolverError) as error:
            if answer is not None:
                break
            if isinstance(error, SolverError) or problem.target is None:
                raise
            free = problem.with_capacity(problem.max_cost_bytes)
            if not problem.meets_target(_by_parts(solver.rough(free), free, deadline).bound or 0.0):
                raise  # of all options, too
            raise SolverError(
                f"{solver.name} looks at {int(counts.sum()):,} of "
                f"{int(problem.option_counts.sum()):,} options first, and these do not meet the "
                f"target; give larger pages with {option('page')}"
            ) from None
        before, choice = choice, columns[problem.units, answer.choice]
        # A unit that chose the first or the last of its options looks on from there, as coarsely.
        ends = np.abs(choice - before) >= np.abs(steps).max()
        improved = known is not None and problem.is_better(answer.objective, known.objective)
        if not (improved and ends.any()):
            spacing = finer
        prices.append(answer.prices)
    for known_choice in equal_choices(problem) + ([] if dual is None else [dual.choice]):
        better = problem.is_better(problem.objective(known_choice), problem.objective(choice))
        if better and problem.satisfies(known_choice):
            choice = known_choice
    # The last prices are the best, unless time ran out among them: each bound looks at everything.
    best = prices[-1 if spacing <= 1 else -2 :]
    bounds = [(bound_at(problem, *last), last) for last in best if last and dual is None]
    bounds += [] if dual is None else [(dual.bound, prices[-1])]
    bound, last = (min if problem.target is None else max)(bounds, default=(None, ()))
    return Solution.of(
        problem,
        choice,
        bound=bound,
        prices=last,
        detail=f"{answer.detail}; of {int(problem.option_counts.sum()):,}, some at a time",
        deadline=deadline,
        gap=solver.gap,
    )


def _has_few(problem: AllocationProblem) -> bool:
    return any(isinstance(one, MaxDistinct) for one in problem.constraints)


def _steps(problem: AllocationProblem, choice: IntArray, spacing: int, part: int) -> IntArray:
    """Return distances of options from a choice, 0 among them."""
    around = np.unique(choice).size if _has_few(problem) else 1
    half = max(3, part // (2 * around * problem.n_units))
    return np.rint(np.linspace(-spacing, spacing, 2 * half - 1)).astype(np.int64)


def _columns(
    problem: AllocationProblem, choice: IntArray, steps: IntArray
) -> tuple[IntArray, IntArray]:
    """Return rising options around each choice (or all, for few budgets), and their number."""
    around = np.unique(choice)[None, :] if _has_few(problem) else choice[:, None]
    spread = (around[:, :, None] + steps).reshape(len(around), -1)
    ends = np.stack([np.zeros_like(choice), problem.last_options], axis=1)  # and both ends
    columns = np.hstack([np.clip(spread, 0, problem.last_options[:, None]), ends])
    columns.sort(axis=1)
    fresh = np.diff(columns, axis=1, prepend=-1) > 0
    order, counts = np.argsort(~fresh, axis=1, kind="stable"), fresh.sum(axis=1)
    return np.take_along_axis(columns, order, axis=1)[:, : int(counts.max())], counts
