"""From a score profile and a target to a budget profile: solve, then check every claim."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.grouping import settle
from kvalloc.allocation.infeasibility import advise
from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.allocation.result import to_budget_profile
from kvalloc.allocation.sensitivity import price_of
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, InputError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.sharing_groups import groups_record
from kvalloc.problem import AllocationProblem, Solver, Termination, dual_bound
from kvalloc.problem.registry import get_solver, options_of

__all__ = [
    "Average",
    "CheckedSolution",
    "decide",
    "default_objective",
    "solve",
    "solve_problem",
]

Average = Literal["curves", "allocations"]


def solve(
    scores: ScoreProfile,
    *,
    solver: str | Solver = "auto",
    solver_options: dict[str, Any] | None = None,
    time_limit: float | None = None,
    average: Average = "curves",
    **asked: Unpack[RequestOptions],
) -> BudgetProfile:
    """Decide how many entries each layer and KV head keeps.

    Parameters
    ----------
    scores : ScoreProfile
        Measured retention curves.
    solver : str or Solver
        Registered name, or a solver object. ``"auto"`` takes the cheapest one that is exact.
    solver_options : dict, optional
        Options of a named solver.
    time_limit : float, optional
        Seconds.
    average : {"curves", "allocations"}
        Solve once on the mean curves (the sample-average problem), or solve each sample and
        average the budgets (XKV, Sec. IV-C).
    **asked
        One target, where it holds and what must hold beside it: see
        `kvalloc.allocation.request.RequestOptions`.

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
    request = Request.parse(**asked)
    if request.objective is None:
        request, _ = default_objective(scores, request, solver, solver_options)
    return solve_request(
        scores,
        request,
        solver=solver,
        solver_options=solver_options,
        time_limit=time_limit,
        average=average,
    )


def default_objective(
    scores: ScoreProfile,
    request: Request,
    solver: str | Solver = "auto",
    solver_options: dict[str, Any] | None = None,
) -> tuple[Request, str]:
    """What is optimised where nobody said so: the loss where loss curves were measured.

    Retention says little of harm, so a size is spent by loss curves where the score profile holds
    some for such units, the request asks for nothing that they do not know (bits, shared entries,
    the worst of several workloads), and the solver takes them.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
        With the objective ``"mean"``, or ``"loss"``, which naming policies implies.
    solver, solver_options
        As in `solve`.

    Returns
    -------
    request : Request
    said : str
        One line on what was taken and why; empty where there were no curves to choose from.
    """
    sized = request.target.needed_value is None
    if not scores.has_losses or not sized or request.objective == "loss":
        return request, ""
    try:
        by_loss = replace(request, objective="loss")
        refusal = _refusal(scores, by_loss, solver, solver_options)
    except InputError as error:
        refusal = str(error)
    if refusal:
        return request, f"retention decides, not the loss curves: {refusal}"
    return by_loss, (
        "the score profile holds loss curves, so the least predicted loss decides; "
        f"{option('objective', 'mean')} asks for retention"
    )


def _refusal(
    scores: ScoreProfile,
    request: Request,
    solver: str | Solver,
    solver_options: dict[str, Any] | None,
) -> str:
    """Why a solver does not take a request; empty where it does."""
    try:
        problem = formulate(scores, request)
    except InfeasibleError:
        return ""  # solving tells what is in the way
    chosen = solver if isinstance(solver, Solver) else get_solver(solver, **(solver_options or {}))
    able = chosen.can_solve(problem)
    return "" if able is True else f"{chosen.name}: {able}"


def solve_request(
    scores: ScoreProfile,
    request: Request,
    *,
    solver: str | Solver = "auto",
    solver_options: dict[str, Any] | None = None,
    time_limit: float | None = None,
    average: Average = "curves",
) -> BudgetProfile:
    """What `solve` does with a request: decide, and where that is infeasible, say what is not.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
    solver, solver_options, time_limit, average
        As in `solve`.

    Returns
    -------
    BudgetProfile

    Raises
    ------
    InputError, InfeasibleError, SolverError
        As `solve`.
    """
    try:
        return decide(
            scores,
            request,
            solver=solver,
            solver_options=solver_options,
            time_limit=time_limit,
            average=average,
        )
    except InfeasibleError as error:
        if isinstance(request.share_groups, int):
            raise  # there is no problem to look into before the groups are chosen
        advice = advise(scores, request, error, time_limit_seconds=time_limit)
        if advice is error:
            raise
        raise advice from error


def decide(
    scores: ScoreProfile,
    request: Request,
    *,
    solver: str | Solver = "auto",
    solver_options: dict[str, Any] | None = None,
    time_limit: float | None = None,
    average: Average = "curves",
    priced: bool = True,
) -> BudgetProfile:
    """What `solve` does with a request, without looking for advice where it is infeasible.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
    solver, solver_options, time_limit, average
        As in `solve`.
    priced : bool
        Look for the shadow price too, which may mean to solve a second time.

    Returns
    -------
    BudgetProfile

    Raises
    ------
    InputError, InfeasibleError, SolverError
        As `solve`.
    """
    if isinstance(solver, Solver) and solver_options:
        raise InputError("solver_options go with a solver's name; this solver has its options set")
    chosen = solver if isinstance(solver, Solver) else get_solver(solver, **(solver_options or {}))
    if average not in ("curves", "allocations"):
        raise InputError(f"average is {average!r}, expected 'curves' or 'allocations'")
    if average == "allocations" and request.workloads != "mean":
        raise InputError(
            "budgets averaged over samples know nothing of the worst of them; leave out average, "
            "or ask for the mean of the workloads"
        )
    if average == "allocations" and request.share_groups is not None:
        raise InputError(
            "budgets averaged over samples cannot share entries between layers; leave out average "
            "or the groups"
        )
    asked_groups = request.share_groups
    request, grouping = settle(scores, request)
    problem, checked = _solved(scores, request, chosen, time_limit, average)
    options: dict[str, Any]
    options = options_of(solver) if isinstance(solver, Solver) else {**(solver_options or {})}
    if average == "allocations":
        options["average"] = average
    decided = to_budget_profile(scores, request, problem, checked, chosen.name, options)
    if asked_groups is not None:
        requested = {**decided.requested, "share_groups": groups_record(asked_groups)}
        bound = None if grouping is None else grouping.bound
        decided = replace(decided, requested=requested, grouping_bound=bound)
    price = price_of(problem, chosen, checked, time_limit_seconds=time_limit) if priced else None
    if price is None:
        return decided
    return replace(decided, value_per_mib=price.value_per_byte * 2**20, price_source=price.source)


def _solved(
    scores: ScoreProfile,
    request: Request,
    solver: Solver,
    time_limit: float | None,
    average: Average,
) -> tuple[AllocationProblem, CheckedSolution]:
    problem = formulate(scores, request)
    if average == "curves" or scores.n_samples == 1:
        return problem, solve_problem(problem, solver, time_limit_seconds=time_limit)
    if problem.constraints:
        raise InputError(
            "the mean of several allocations need not keep caps, ranks or few distinct budgets; "
            f"use {option('average', 'curves')} with them"
        )
    if problem.bits is not None or np.any(problem.option_counts != problem.option_counts[0]):
        raise InputError(
            "the mean of several allocations is one of tokens, and here options differ in more; "
            f"use {option('average', 'curves')}"
        )
    return problem, _average_allocations(scores, request, problem, solver, time_limit)


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
    dual = dual_bound(problem).bound
    return CheckedSolution(
        choice=choice,
        objective=problem.objective(choice),
        value=problem.objective_value(choice),
        cost_bytes=problem.cost(choice),
        bound=dual,
        bound_source="dual",
        termination=Termination.HEURISTIC,
        detail=f"mean of the budgets of {scores.n_samples} samples, each by {answer.decided_by}",
        decided_by=answer.decided_by,
        seconds=time.perf_counter() - start,
    )
