"""Integer programs in whole numbers, and their back ends."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.errors import SolverError
from kvalloc.problem import Aggregate, AllocationProblem

VALUE_RANGE = 2**50
"""Number of whole steps for the spread of all values; sums stay far within int64."""

FLOAT_RANGE = 1e5
"""Scale of rows and objectives in floating point: HiGHS' absolute tolerances of 1e-6 are then 1e-11
of the scaled numbers."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """``lower <= sum coefficients * variables <= upper``; None without a limit.

    Without coefficients, all are 1.
    """

    variables: IntArray
    coefficients: IntArray | None = None
    lower: int | None = None
    upper: int | None = None


@dataclass(kw_only=True)
class Program:
    """A program in whole numbers, while it is written.

    Variables go from 0 to ``upper``; above 1, they are whole in every best solution. A ``hint``
    counts if it has all variables.
    """

    maximise: bool
    rows: list[Row] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    goal: Row = Row(variables=np.zeros(0, dtype=np.int64))
    hint: list[int] = field(default_factory=list)

    def new(self, count: int, *, upper: int = 1) -> IntArray:
        first = len(self.upper)
        self.upper += [upper] * count
        return np.arange(first, first + count)

    def add(self, variables: IntArray, coefficients: IntArray | None = None, **limits: int) -> None:
        self.rows.append(Row(variables=variables, coefficients=coefficients, **limits))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Best values, (n_variables,), and proven bound of a back end, in whole numbers."""

    values: IntArray | None
    bound: float | None
    status: str
    infeasible: bool = False


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A program and how to read its numbers.

    The first variables, (n_picks,), pick ``options`` of ``units``. Every choice has the value, or
    cost in bytes, ``base``; a step of the goal adds ``step``. Rounding may have lost ``rounded``
    steps.
    """

    program: Program
    units: IntArray
    options: IntArray
    base: float
    step: float
    rounded: int

    def choice(self, values: IntArray) -> IntArray:
        on = np.flatnonzero(values[: self.units.size])  # one of each unit, in their order
        return self.options[on]

    def bound(self, bound: float | None) -> float:
        """Return a bound on all choices from the back end's."""
        if not self.program.maximise:
            return -math.inf if bound is None else self.base + math.ceil(bound - 1e-6) * self.step
        return math.inf if bound is None else self.base + (bound + self.rounded) * self.step


def encode(
    problem: AllocationProblem,
    kept: BoolArray,
    limit: int | None,
    hint: IntArray | None,
    *,
    tight_target: bool = False,
) -> Encoding:
    """Write the integer program over the ``kept`` options, (n_units, n_options).

    Weighted values of a worst unit have to be whole numbers from 0 up; ``limit`` counts different
    budgets. With ``tight_target`` every answer meets the target; else rounding loses nothing
    feasible.
    """
    units, options = np.nonzero(kept)
    program = Program(maximise=problem.target is None)
    picks = program.new(units.size)
    if hint is not None:
        program.hint += (options == hint[units]).astype(np.int64).tolist()
    starts = np.flatnonzero(np.diff(units, prepend=-1, append=problem.n_units)).tolist()
    for first, end in pairwise(starts):
        program.add(picks[first:end], lower=1, upper=1)
    cheapest = np.argmax(kept, axis=1)
    base_bytes, grain = problem.cost(cheapest), problem.lattice_bytes
    costs = problem.costs[units, options]
    extra = (costs - problem.costs[units, cheapest[units]]) // grain
    if problem.capacity_bytes is not None:
        program.add(picks, extra, upper=(problem.spendable_bytes - base_bytes) // grain)
    for cap in problem.caps:
        members = np.flatnonzero(np.isin(units, cap.units))
        program.add(members, costs[members], upper=cap.capacity_bytes)
    if limit is not None:
        _add_levels(program, problem.tokens[units, options], limit)
    goal_of = _worst_goal if problem.aggregate is Aggregate.WORST else _sum_goal
    goal, base, step, rounded = goal_of(program, units, problem.worth[units, options])
    if problem.target is not None:
        target = (problem.lowest_accepted_value - base) / step
        lower = math.ceil(target) if tight_target else math.floor(target) - rounded
        program.add(goal.variables, goal.coefficients, lower=lower)
        goal, base, step = Row(variables=picks, coefficients=extra), base_bytes, grain
    program.goal = goal
    return Encoding(
        program=program, units=units, options=options, base=base, step=step, rounded=rounded
    )


def _sum_goal(
    program: Program, units: IntArray, worth: FloatArray
) -> tuple[Row, float, float, int]:
    """Return the goal's row, every choice's value, one step, and the steps lost by rounding."""
    starts = np.flatnonzero(np.diff(units, prepend=-1))
    smallest = np.minimum.reduceat(worth, starts)
    spread = math.fsum(np.maximum.reduceat(worth, starts) - smallest)
    scale = VALUE_RANGE / spread if spread > 0 else 1.0
    whole = np.floor((worth - smallest[units]) * scale).astype(np.int64)
    goal = Row(variables=np.arange(units.size), coefficients=whole)
    return goal, math.fsum(smallest), 1.0 / scale, starts.size


def _worst_goal(
    program: Program, units: IntArray, worth: FloatArray
) -> tuple[Row, float, float, int]:
    """Return the same for the worst unit; its variable is a lower bound of all values."""
    whole = worth.astype(np.int64)
    worst = program.new(1, upper=int(whole.max()))
    for unit in np.unique(units).tolist():
        picks = np.flatnonzero(units == unit)
        program.add(np.append(picks, worst), np.append(whole[picks], -1), lower=0)
    return Row(variables=worst), 0.0, 1.0, 0


def _add_levels(program: Program, tokens: IntArray, limit: int) -> None:
    levels, level_of = np.unique(tokens, return_inverse=True)
    used = program.new(levels.size)
    for pick, level in enumerate(level_of.tolist()):
        program.add(np.array([pick, used[level]]), np.array([1, -1]), upper=0)
    program.add(used, upper=limit)
    if program.hint:
        picked = np.flatnonzero(program.hint)
        program.hint += np.isin(np.arange(levels.size), level_of[picked]).astype(int).tolist()


def by_cp_sat(program: Program, deadline: float, gap: float, workers: int) -> Answer:
    """Solve with OR-Tools CP-SAT, exactly."""
    from ortools.sat.python import cp_model

    def total(row: Row) -> Any:
        terms = [variables[v] for v in row.variables.tolist()]
        if row.coefficients is None:
            return cp_model.LinearExpr.sum(terms)
        return cp_model.LinearExpr.weighted_sum(terms, row.coefficients.tolist())

    model = cp_model.CpModel()
    variables = [model.new_int_var(0, upper, "") for upper in program.upper]
    for row in program.rows:
        if row.coefficients is None and row.lower == row.upper == 1:
            model.add_exactly_one([variables[v] for v in row.variables.tolist()])
            continue
        if row.lower is not None:
            model.add(total(row) >= row.lower)
        if row.upper is not None:
            model.add(total(row) <= row.upper)
    (model.maximize if program.maximise else model.minimize)(total(program.goal))
    if len(program.hint) == len(variables):
        for variable, value in zip(variables, program.hint, strict=True):
            model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.absolute_gap_limit = max(gap, 0.5)
    solver.parameters.random_seed = 0
    # OR-Tools 9.15 looks for rows that are parts of other rows, and with coefficients beyond 32
    # bits it cuts off solutions there: a tiny problem had a worse answer called optimal.
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.max_time_in_seconds = _seconds_until(deadline)
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise SolverError(f"ilp: CP-SAT calls the model invalid: {model.validate()}")
    name = f"CP-SAT {str(solver.status_name(status)).lower()}"
    if status == cp_model.INFEASIBLE:
        return Answer(values=None, bound=None, status=name, infeasible=True)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        # Stopped early it has no bound, and says 0.
        return Answer(values=None, bound=None, status=name)
    values = np.array([solver.value(v) for v in variables], dtype=np.int64)
    return Answer(values=values, bound=float(solver.best_objective_bound), status=name)


def by_highs(program: Program, deadline: float, gap: float, workers: int) -> Answer:
    """Solve with HiGHS (`scipy.optimize.milp`), rows and goal scaled to `FLOAT_RANGE`."""
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    upper = np.array(program.upper, dtype=np.float64)
    # variables that are not 0/1 are counted in shares of what the largest of them can be
    steps = np.where(upper > 1, max(1.0, float(upper.max()) / FLOAT_RANGE), 1.0)

    def scaled(row: Row) -> tuple[FloatArray, float]:
        ones = row.coefficients is None
        coefficients = steps[row.variables] * (1.0 if ones else row.coefficients)
        unit = max(float(np.abs(coefficients).max(initial=0.0)) / FLOAT_RANGE, 1.0)
        return coefficients / unit, unit

    rows = [row for row in program.rows if row.variables.size]
    parts, units = zip(*map(scaled, rows), strict=True)
    columns = np.concatenate([row.variables for row in rows])
    starts = np.cumsum([0, *(part.size for part in parts)])
    matrix = sparse.csr_array(
        (np.concatenate(parts), columns, starts), shape=(len(rows), upper.size)
    )
    lows = [-math.inf if row.lower is None else row.lower for row in rows]
    highs = [math.inf if row.upper is None else row.upper for row in rows]
    goal, sign = np.zeros(upper.size), -1.0 if program.maximise else 1.0
    goal[program.goal.variables], unit = scaled(program.goal)
    goal, unit = sign * goal, sign * unit
    options: dict[str, Any] = {"mip_rel_gap": 0.0}
    if gap > 0 and len(program.hint) == upper.size:
        # As HiGHS counts it: relative to the objective of the start.
        start = float(goal @ (program.hint / steps)) * unit
        options["mip_rel_gap"] = gap / max(1.0, start)
    options["time_limit"] = _seconds_until(deadline)
    with stdout_kept_clean():
        answer = milp(
            c=goal,
            integrality=(upper == 1).astype(np.int64),
            bounds=Bounds(0, upper / steps),
            constraints=LinearConstraint(matrix, np.array(lows) / units, np.array(highs) / units),
            options=options,
        )
    words = {0: "optimal", 1: "stopped", 2: "infeasible"}
    status = f"HiGHS {words.get(answer.status, answer.message)}"
    if answer.status not in (0, 1):  # of one that failed nothing is known
        infeasible = answer.status == 2
        return Answer(values=None, bound=None, status=status, infeasible=infeasible)
    values, bound = answer.x, answer.mip_dual_bound
    known = bound is not None and math.isfinite(bound)
    return Answer(
        values=None if values is None else np.rint(values * steps).astype(np.int64),
        bound=float(bound) * unit if known else None,
        status=status,
    )


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Redirect file descriptor 1 to stderr: HiGHS 1.12 always prints debugging lines."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError):  # closed, as in a service
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _seconds_until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)


BackEnd = Callable[[Program, float, float, int], Answer]
"""Takes a program, a deadline of ``time.monotonic()``, the accepted gap in the goal's whole
numbers, and threads."""

BACKENDS: dict[str, BackEnd] = {"cp_sat": by_cp_sat, "highs": by_highs}
"""Back ends by the value of ``backend=``."""
