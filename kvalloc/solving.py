"""From a score profile and a target to a budget profile: solve, then check every claim."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, TypeVar

import numpy as np

from kvalloc.budget_profile import BudgetProfile, Level, Policy
from kvalloc.errors import InputError, KVAllocError, SolverError
from kvalloc.formulate import Objective, Request, fixed_bytes, formulate
from kvalloc.problem import AllocationProblem, IntArray, Sense, apportion
from kvalloc.registry import get_solver
from kvalloc.score_profile import ScoreProfile
from kvalloc.solver import Solution, Solver, Termination
from kvalloc.watchdog import NoAnswerError, call_in_time

PROOF_TOLERANCE = 1e-10
"""Objective and bound this close, relative to the larger of 1 and the objective, are equal."""

GRACE_SECONDS = 5.0
"""A solver of another package is given up after twice its time limit and this much more."""

Average = Literal["curves", "allocations"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckedSolution:
    """A solver's answer after kvalloc has computed everything again.

    Attributes
    ----------
    choice : ndarray of int64, (n_units,)
        Chosen option of each unit.
    objective : float
        Value (MAX_VALUE) or cost in bytes (MIN_COST), recomputed.
    value : float
        Weighted value of the choice, whatever the sense.
    cost_bytes : int
        Cost of the choice.
    bound : float or None
        The tighter of kvalloc's own dual bound and what an exact solver proved.
    bound_source : str
        ``"dual"`` or the solver's name.
    termination : Termination
        Why the solver stopped.
    detail : str
        The solver's own line.
    seconds : float
        Wall time of the solver alone.
    """

    choice: IntArray
    objective: float
    value: float
    cost_bytes: int
    bound: float | None
    bound_source: str
    termination: Termination
    detail: str
    seconds: float

    @property
    def gap(self) -> float | None:
        """Relative distance between objective and bound."""
        if self.bound is None:
            return None
        return abs(self.bound - self.objective) / max(abs(self.bound), 1e-300)


def solve_problem(
    problem: AllocationProblem, solver: Solver, *, time_limit_seconds: float | None = None
) -> CheckedSolution:
    """Run a solver and trust nothing it says.

    Parameters
    ----------
    problem : AllocationProblem
    solver : Solver
    time_limit_seconds : float, optional
        Passed to the solver.

    Returns
    -------
    CheckedSolution

    Raises
    ------
    InfeasibleError
        If no choice can meet the capacity or the target.
    SolverError
        If the solver refuses the problem, fails, hangs beyond its time limit, or reports what is
        not true.
    """
    if time_limit_seconds is not None and not time_limit_seconds > 0:
        raise InputError(f"a time limit of {time_limit_seconds:g} s leaves no time; give more")
    patience = None if time_limit_seconds is None else 2 * time_limit_seconds + GRACE_SECONDS
    able = _guarded(solver, patience, solver.can_solve, problem)
    if isinstance(able, str) or not able:
        raise SolverError(able or f"{solver.name} cannot solve this problem")
    problem.check_feasible()
    start = time.perf_counter()
    solution = _guarded(
        solver, patience, solver.solve, problem, time_limit_seconds=time_limit_seconds
    )
    seconds = time.perf_counter() - start
    _check_types(solver, solution)
    _check_claims(problem, solver, solution)
    objective = problem.objective(solution.choice)
    bound, source = _tightest_bound(problem, solver, solution)
    if bound is not None and abs(bound - objective) <= PROOF_TOLERANCE * max(1.0, abs(objective)):
        bound = objective
    return CheckedSolution(
        choice=solution.choice,
        objective=objective,
        value=problem.objective_value(solution.choice),
        cost_bytes=problem.cost(solution.choice),
        bound=bound,
        bound_source=source,
        termination=solution.termination,
        detail=solution.detail,
        seconds=seconds,
    )


def solve(
    scores: ScoreProfile,
    *,
    target_retention: float | None = None,
    budget: str | float | None = None,
    budget_tokens: int | None = None,
    memory: str | int | None = None,
    context: int | None = None,
    batch: int = 1,
    level: Level = "layer",
    min_tokens: int | None = None,
    page: int = 1,
    solver: str | Solver = "greedy",
    solver_options: dict[str, Any] | None = None,
    time_limit: float | None = None,
    average: Average = "curves",
    objective: Objective = "mean",
) -> BudgetProfile:
    """Decide how many entries each layer and KV head keeps.

    Parameters
    ----------
    scores : ScoreProfile
        Measured retention curves.
    target_retention : float, optional
        Fewest bytes whose mean retention over layers reaches this (XKV, Eq. 18).
    budget : str or float, optional
        Most retention within this share of all entries, ``"20%"`` or ``0.2`` (XKV, Eq. 17).
    budget_tokens : int, optional
        The same with a mean budget per KV head, entries.
    memory : str or int, optional
        The same with bytes for the whole cache, such as ``"512MiB"``.
    context : int, optional
        Prompt length that the target holds for, tokens; the score profile's own by default.
    batch : int
        Rows that share the memory.
    level : {"layer", "head"}
        What gets a budget.
    min_tokens : int, optional
        Least budget; sinks and window by default.
    page : int
        Budgets are whole pages of so many tokens.
    solver : str or Solver
        Registered name, or a solver object.
    solver_options : dict, optional
        Options of a named solver.
    time_limit : float, optional
        Seconds.
    average : {"curves", "allocations"}
        Solve once on the mean curves (the sample-average problem), or solve each sample and
        average the budgets (XKV, Sec. IV-C).
    objective : {"mean", "worst"}
        Retention is the mean over layers, or that of the worst unit (PrefixKV).

    Returns
    -------
    BudgetProfile

    Raises
    ------
    InputError
        If an argument is out of range, or none or several targets are given.
    InfeasibleError
        If the target cannot be met; says which one can.
    SolverError
        If the solver refuses, fails or misreports.

    Examples
    --------
    >>> profile = solve(scores, target_retention=0.9, solver="greedy")  # doctest: +SKIP
    >>> profile.save("mine.json")  # doctest: +SKIP
    """
    request = Request(
        target_retention=target_retention,
        budget=budget,
        budget_tokens=budget_tokens,
        memory=memory,
        level=level,
        context_tokens=context,
        batch=batch,
        min_tokens=min_tokens,
        page_tokens=page,
        objective=objective,
    )
    if isinstance(solver, Solver) and solver_options:
        raise InputError("solver_options go with a solver's name; this solver has its options set")
    chosen = solver if isinstance(solver, Solver) else get_solver(solver, **(solver_options or {}))
    if average not in ("curves", "allocations"):
        raise InputError(f"average is {average!r}, expected 'curves' or 'allocations'")
    problem = formulate(scores, request)
    if average == "allocations" and scores.n_samples > 1:
        checked = _average_allocations(scores, request, problem, chosen, time_limit)
    else:
        checked = solve_problem(problem, chosen, time_limit_seconds=time_limit)
    options = {**(solver_options or {})}
    if average == "allocations":
        options["average"] = average
    return to_budget_profile(scores, request, problem, checked, chosen.name, options)


def to_budget_profile(
    scores: ScoreProfile,
    request: Request,
    problem: AllocationProblem,
    checked: CheckedSolution,
    solver_name: str,
    solver_options: dict[str, Any],
) -> BudgetProfile:
    """Write a checked solution down as a budget profile.

    Parameters
    ----------
    scores : ScoreProfile
        What was measured.
    request : Request
        What was asked.
    problem : AllocationProblem
        What was solved.
    checked : CheckedSolution
        What came out.
    solver_name : str
    solver_options : dict

    Returns
    -------
    BudgetProfile
    """
    shape = scores.shape
    budgets = np.full(
        (shape.n_layers, shape.n_kv_heads),
        shape.sliding_entries(problem.context_tokens),
        dtype=np.int64,
    )
    chosen = problem.chosen_tokens(checked.choice)
    if request.level == "layer":
        budgets[problem.layers] = chosen[:, None]
    else:
        budgets[problem.layers, problem.heads] = chosen
    requested = {
        **request.describe(),
        "objective": request.objective,
        "min_tokens": request.min_tokens,
    }
    if problem.capacity_bytes is not None:
        constant = fixed_bytes(scores, problem.context_tokens, request.batch, request.page_tokens)
        requested["bytes"] = problem.capacity_bytes + constant
    return BudgetProfile(
        shape=shape,
        level=request.level,
        context_tokens=problem.context_tokens,
        budgets=budgets,
        length_rule=request.length_rule,
        page_tokens=request.page_tokens,
        policy=Policy(
            scorer=scores.scorer,
            scorer_parameters=dict(scores.scorer_parameters),
            sinks=scores.sinks,
            window=scores.window,
        ),
        solver=solver_name,
        solver_options=solver_options,
        sense=problem.sense.value,
        objective=checked.objective,
        bound=checked.bound,
        bound_source=checked.bound_source,
        termination=checked.termination.value,
        requested=requested,
        retention=_mean_retention(scores, request, problem, checked),
        batch=request.batch,
        score_digest=scores.digest(),
        problem_digest=problem.digest(),
        versions=_versions(),
        created=datetime.date.today().isoformat(),
    )


def _mean_retention(
    scores: ScoreProfile,
    request: Request,
    problem: AllocationProblem,
    checked: CheckedSolution,
) -> float:
    """Mean over layers of the kept share of score mass, whatever was optimised."""
    if request.objective == "mean":
        return checked.value
    return formulate(scores, replace(request, objective="mean")).objective_value(checked.choice)


def _guarded(
    solver: Solver,
    patience_seconds: float | None,
    call: Callable[..., T],
    *args: Any,
    **options: Any,
) -> T:
    """A call into a solver: whatever goes wrong there is a `SolverError` here."""
    ours = type(solver).__module__.startswith("kvalloc.")
    try:
        if ours or patience_seconds is None:
            return call(*args, **options)
        # Ours keep their limits, which is tested; others may ignore theirs, or hang.
        return call_in_time(lambda: call(*args, **options), seconds=patience_seconds)
    except KVAllocError:
        raise
    except NoAnswerError as error:
        raise SolverError(
            f"the solver {solver.name} ignores its time limit: {error}, it was given up (it may "
            "still be using the processor until this process ends); try another one"
        ) from error
    except Exception as error:  # a plug-in may fail in any way
        reason = " ".join(str(error).split())
        raise SolverError(
            f"the solver {solver.name} failed: {type(error).__name__}: {reason}; try another one"
        ) from error


def _check_types(solver: Solver, solution: Any) -> None:
    kinds: dict[str, Any] = {
        "choice": np.ndarray,
        "objective": Real,
        "bound": (Real, type(None)),
        "termination": Termination,
    }
    sound = isinstance(solution, Solution) and all(
        isinstance(getattr(solution, name), kind) for name, kind in kinds.items()
    )
    if not sound:
        raise SolverError(
            f"the solver {solver.name} returned no sound Solution (an array as choice, numbers "
            f"as objective and bound, a Termination): {str(solution)[:200]!r}"
        )


def _check_claims(problem: AllocationProblem, solver: Solver, solution: Solution) -> None:
    name, choice = solver.name, solution.choice
    if choice.shape != (problem.n_units,) or choice.dtype.kind != "i":
        raise SolverError(
            f"the solver {name} returned a choice of {choice.dtype} shaped {choice.shape}, "
            f"expected whole numbers shaped ({problem.n_units},)"
        )
    if np.any(choice < 0) or np.any(choice >= problem.option_counts):
        unit = int(np.argmax((choice < 0) | (choice >= problem.option_counts)))
        raise SolverError(
            f"the solver {name} chose option {int(choice[unit])} of unit {unit}, which has "
            f"{int(problem.option_counts[unit])}"
        )
    cost, value = problem.cost(choice), problem.objective_value(choice)
    capacity = problem.capacity_bytes
    if capacity is not None and cost > capacity and not solver.may_exceed_capacity:
        raise SolverError(f"the solver {name} spends {cost:,} bytes of a capacity of {capacity:,}")
    if not problem.meets_target(value):
        raise SolverError(
            f"the solver {name} reaches {value:.6g}, below the target of {problem.target:g}"
        )
    fault = problem.side_fault(choice, solution.ranks)
    if fault is not None:
        raise SolverError(f"the solver {name} breaks a constraint: {fault}")
    true = problem.objective(choice)
    slack = PROOF_TOLERANCE * max(1.0, abs(true))
    if not abs(solution.objective - true) <= slack:  # also when it is NaN
        raise SolverError(
            f"the solver {name} reports an objective of {solution.objective:.9g}; it is {true:.9g}"
        )
    if solution.bound is not None:
        room = solution.bound - true if problem.sense is Sense.MAX_VALUE else true - solution.bound
        if not room >= -slack:
            raise SolverError(
                f"the solver {name} reports a bound of {solution.bound:.9g}, which its own choice "
                f"of {true:.9g} beats"
            )
        if solution.termination is Termination.OPTIMAL and room > slack:
            raise SolverError(
                f"the solver {name} claims to be optimal at {true:.9g} with a bound of "
                f"{solution.bound:.9g}"
            )


def _tightest_bound(
    problem: AllocationProblem, solver: Solver, solution: Solution
) -> tuple[float | None, str]:
    cost = problem.cost(solution.choice)
    if problem.capacity_bytes is not None and cost > problem.capacity_bytes:
        problem = problem.with_capacity(cost)  # a rule that overspends: bound what it did spend
    response = problem.dual_bound()
    dual = response.bound
    if solution.bound is None:
        return dual, "dual"
    tighter = min if problem.sense is Sense.MAX_VALUE else max
    known = problem.objective(response.choice)
    beaten = abs(known - solution.bound) > PROOF_TOLERANCE * max(1.0, abs(known))
    if beaten and not problem.constraints and tighter(known, solution.bound) != known:
        raise SolverError(
            f"the solver {solver.name} reports a bound of {solution.bound:.9g}, but a choice of "
            f"{known:.9g} exists"
        )
    bound = tighter(dual, solution.bound)
    return bound, "dual" if bound == dual else solver.name


def _average_allocations(
    scores: ScoreProfile,
    request: Request,
    problem: AllocationProblem,
    solver: Solver,
    time_limit: float | None,
) -> CheckedSolution:
    """Solve every sample, average the budgets, and repair the sum with the one rounding rule."""
    start = time.perf_counter()
    wanted = np.zeros(problem.n_units)
    for sample in range(scores.n_samples):
        single = formulate(scores, request, sample=sample)
        answer = solve_problem(single, solver, time_limit_seconds=time_limit)
        wanted += answer.choice / scores.n_samples

    def averaged(total: int) -> IntArray:
        return apportion(wanted, total, maximum=problem.last_options)

    total = int(np.floor(wanted.sum() + 1e-9))
    if problem.target is not None:
        # The mean of sufficient budgets need not suffice on the mean curves: add what is missing.
        low, high = total, int(problem.last_options.sum())
        while low < high:
            middle = (low + high) // 2
            if problem.meets_target(problem.objective_value(averaged(middle))):
                high = middle
            else:
                low = middle + 1
        total = low
    choice = averaged(total)
    dual = problem.dual_bound().bound
    return CheckedSolution(
        choice=choice,
        objective=problem.objective(choice),
        value=problem.objective_value(choice),
        cost_bytes=problem.cost(choice),
        bound=dual,
        bound_source="dual",
        termination=Termination.HEURISTIC,
        detail=f"mean of the budgets of {scores.n_samples} samples",
        seconds=time.perf_counter() - start,
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    try:
        versions["kvalloc"] = importlib.metadata.version("kvalloc")
    except importlib.metadata.PackageNotFoundError:
        versions["kvalloc"] = "source"
    return versions
