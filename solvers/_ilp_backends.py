"""Integer programming back ends behind one function each: CP-SAT, MathOpt, SciPy's HiGHS."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import SolverError
from kvalloc.solvers._ilp_program import Answer, Limits, Program

FLOAT_RANGE = 1e6
"""Rows and objectives in floating point are scaled to this size, so that the back ends' absolute
tolerances of 1e-6 are 1e-12 of what they apply to."""


def by_cp_sat(program: Program, limits: Limits) -> Answer:
    """Solve with OR-Tools CP-SAT, exactly in whole numbers; 0/1 variables only."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    variables = [model.new_bool_var("") for _ in range(program.n_variables)]
    for group in program.one_of:
        model.add_exactly_one([variables[v] for v in group.tolist()])
    for causes, effect in program.implied:
        for cause in causes.tolist():
            model.add_implication(variables[cause], variables[effect])
    for row in program.rows:
        total = cp_model.LinearExpr.weighted_sum(
            [variables[v] for v in row.variables.tolist()], row.coefficients.tolist()
        )
        if row.lower is not None:
            model.add(total >= row.lower)
        if row.upper is not None:
            model.add(total <= row.upper)
    used = np.flatnonzero(program.objective)
    goal = cp_model.LinearExpr.weighted_sum(
        [variables[v] for v in used.tolist()], program.objective[used].tolist()
    )
    if program.maximise:
        model.maximize(goal)
    else:
        model.minimize(goal)
    if program.hint is not None:
        for variable, value in zip(variables, program.hint.tolist(), strict=True):
            model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.workers
    solver.parameters.absolute_gap_limit = max(limits.absolute_gap, 0.5)
    solver.parameters.random_seed = 0
    # OR-Tools 9.15 looks for rows that are parts of other rows, and with coefficients beyond 32
    # bits it cuts off solutions there: a tiny problem had a worse answer called optimal.
    solver.parameters.presolve_inclusion_work_limit = 0
    if math.isfinite(limits.seconds):
        solver.parameters.max_time_in_seconds = limits.seconds
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise SolverError(f"ilp: CP-SAT calls the model invalid: {model.validate()}")
    name = f"CP-SAT {str(solver.status_name(status)).lower()}"
    if status == cp_model.INFEASIBLE:
        return Answer(values=None, bound=None, status=name, infeasible=True)
    values = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        values = np.array([solver.value(v) for v in variables], dtype=np.int64)
    return Answer(values=values, bound=float(solver.best_objective_bound), status=name)


def by_scipy(program: Program, limits: Limits) -> Answer:
    """Solve with HiGHS through `scipy.optimize.milp`."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    matrix, lower, upper = _matrix(program)
    goal, unit = _goal(program)
    options: dict[str, Any] = {"mip_rel_gap": _relative_gap(program, limits)}
    if math.isfinite(limits.seconds):
        options["time_limit"] = limits.seconds
    with stdout_kept_clean():
        answer = milp(
            c=goal,
            integrality=(np.arange(program.n_variables) < program.n_binary).astype(np.int64),
            bounds=Bounds(0, _upper_limits(program)),
            constraints=LinearConstraint(matrix, lower, upper),
            options=options,
        )
    words = {0: "optimal", 1: "stopped", 2: "infeasible"}
    name = f"HiGHS {words.get(answer.status, answer.message)}"
    if answer.status == 2:
        return Answer(values=None, bound=None, status=name, infeasible=True)
    if answer.status not in (0, 1):
        raise SolverError(f"ilp: HiGHS cannot solve the program: {answer.message}")
    values = None
    if answer.x is not None:
        values = np.rint(answer.x * _steps(program)).astype(np.int64)
    bound = answer.mip_dual_bound
    if bound is None or not math.isfinite(bound):
        return Answer(values=values, bound=None, status=name)
    signed = -float(bound) if program.maximise else float(bound)
    return Answer(values=values, bound=signed * unit, status=name)


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send what a library writes to file descriptor 1 to stderr.

    HiGHS 1.12 prints a line of debugging there now and then, whatever is asked of it, and a
    program's output may be read by another one.
    """
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


def by_mathopt(program: Program, limits: Limits) -> Answer:
    """Solve with SCIP through OR-Tools MathOpt."""
    from ortools.math_opt.python import mathopt

    matrix, lower, upper = _matrix(program)
    goal, unit = _goal(program)
    model = mathopt.Model()
    upper_limits, steps = _upper_limits(program), _steps(program)
    variables = [model.add_binary_variable() for _ in range(program.n_binary)]
    variables += [
        model.add_variable(lb=0.0, ub=limit) for limit in upper_limits[program.n_binary :].tolist()
    ]
    for row in range(matrix.shape[0]):
        start, end = matrix.indptr[row], matrix.indptr[row + 1]
        model.add_linear_constraint(
            lb=float(lower[row]),
            ub=float(upper[row]),
            expr=mathopt.LinearSum(
                float(c) * variables[v]
                for v, c in zip(matrix.indices[start:end], matrix.data[start:end], strict=True)
            ),
        )
    model.minimize(
        mathopt.LinearSum(float(c) * v for c, v in zip(goal, variables, strict=True) if c)
    )
    parameters = mathopt.SolveParameters(
        threads=limits.workers,
        absolute_gap_tolerance=limits.absolute_gap / unit,
        relative_gap_tolerance=0.0,
    )
    if math.isfinite(limits.seconds):
        parameters.time_limit = datetime.timedelta(seconds=limits.seconds)
    hints = mathopt.ModelSolveParameters()
    if program.hint is not None:
        values_of = dict(zip(variables, (program.hint / steps).tolist(), strict=True))
        hints.solution_hints.append(mathopt.SolutionHint(variable_values=values_of))
    try:
        answer = mathopt.solve(
            model, mathopt.SolverType.GSCIP, params=parameters, model_params=hints
        )
    except Exception as error:  # OR-Tools 9.15 raises what it wraps, and hides some messages
        raise SolverError(
            f"ilp: MathOpt cannot solve the program: {error}; use backend=cp_sat"
        ) from error
    return _mathopt_answer(answer, variables, program, unit)


def _mathopt_answer(answer: Any, variables: list[Any], program: Program, unit: float) -> Answer:
    from ortools.math_opt.python import mathopt

    reason = answer.termination.reason
    name = f"SCIP {reason.name.lower()}"
    if reason is mathopt.TerminationReason.INFEASIBLE:
        return Answer(values=None, bound=None, status=name, infeasible=True)
    found = None
    if answer.has_primal_feasible_solution():
        found = np.rint(answer.variable_values(variables) * _steps(program)).astype(np.int64)
    bound = float(answer.termination.objective_bounds.dual_bound)
    if not math.isfinite(bound):
        return Answer(values=found, bound=None, status=name)
    return Answer(values=found, bound=(-bound if program.maximise else bound) * unit, status=name)


BACKENDS: dict[str, Callable[[Program, Limits], Answer]] = {
    "cp_sat": by_cp_sat,
    "mathopt": by_mathopt,
    "scipy": by_scipy,
}
"""Back ends by the name that ``backend=`` takes."""


def _steps(program: Program) -> FloatArray:
    """How much one unit of each variable of a floating-point back end is in whole numbers.

    Variables that are not 0/1 are counted in shares of what the largest of them can be.
    """
    steps = np.ones(program.n_variables)
    steps[program.n_binary :] = max(1.0, max(program.whole_limits, default=1) / FLOAT_RANGE)
    return steps


def _upper_limits(program: Program) -> FloatArray:
    limits = np.ones(program.n_variables)
    limits[program.n_binary :] = program.whole_limits
    return limits / _steps(program)


def _goal(program: Program) -> tuple[FloatArray, float]:
    """The objective to minimise, scaled, and how much one unit of it is in whole numbers."""
    goal = program.objective * _steps(program)
    largest = float(np.abs(goal).max()) if goal.size else 0.0
    unit = largest / FLOAT_RANGE if largest > FLOAT_RANGE else 1.0
    return (-goal if program.maximise else goal) / unit, unit


def _relative_gap(program: Program, limits: Limits) -> float:
    """The absolute gap as HiGHS counts it: relative to the objective of the start."""
    if limits.absolute_gap <= 0 or program.hint is None:
        return 0.0
    return limits.absolute_gap / max(1.0, float(program.objective @ program.hint))


def _matrix(program: Program) -> tuple[Any, FloatArray, FloatArray]:
    """All rows as one sparse matrix with limits, scaled to `FLOAT_RANGE`."""
    from scipy import sparse

    data: list[FloatArray] = []
    columns: list[IntArray] = []
    lower: list[float] = []
    upper: list[float] = []

    def add(variables: IntArray, coefficients: FloatArray, low: float, high: float) -> None:
        data.append(coefficients)
        columns.append(variables)
        lower.append(low)
        upper.append(high)

    for group in program.one_of:
        add(group, np.ones(group.size), 1.0, 1.0)
    for causes, effect in program.implied:
        for cause in causes.tolist():
            add(np.array([cause, effect]), np.array([1.0, -1.0]), -math.inf, 0.0)
    steps = _steps(program)
    for row in program.rows:
        if row.variables.size == 0:
            continue
        coefficients = row.coefficients * steps[row.variables]
        largest = float(np.abs(coefficients).max())
        unit = largest / FLOAT_RANGE if largest > FLOAT_RANGE else 1.0
        low = -math.inf if row.lower is None else row.lower / unit
        high = math.inf if row.upper is None else row.upper / unit
        add(row.variables, coefficients / unit, low, high)
    pointers = np.concatenate(([0], np.cumsum([part.size for part in data])))
    matrix = sparse.csr_matrix(
        (np.concatenate(data), np.concatenate(columns), pointers),
        shape=(len(data), program.n_variables),
    )
    return matrix, np.array(lower), np.array(upper)
