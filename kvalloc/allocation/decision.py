"""Decision: from a score profile and a target to a solved and verified budget profile."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import constant_entries
from kvalloc.accounting.rounding import apportion
from kvalloc.allocation.formulation import PosedRequest, choose_objective
from kvalloc.allocation.infeasibility import advise
from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.allocation.verification import (
    CheckedSolution,
    check_time_limit,
    checked,
    limits_of,
    price_at,
    solve_problem,
)
from kvalloc.errors import InfeasibleError, InputError, KVAllocError, SolverError, option
from kvalloc.files import provenance
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import find_fitted, load_fitted, load_scores, while_unchanged
from kvalloc.problem import Solution, Solver, Termination
from kvalloc.problem.registry import get_solver, options_of, solver_names
from kvalloc.units import keywords_of

Average = Literal["curves", "allocations"]


@keywords_of(RequestOptions)
def solve(
    scores: ScoreProfile | str | Path,
    *,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
    average: Average = "curves",
    request: Request | None = None,
    notify: Callable[[str], None] = lambda line: None,
    **keywords: Unpack[RequestOptions],
) -> BudgetProfile:
    """Decide how many entries each layer and KV head keeps.

    Parameters
    ----------
    scores : ScoreProfile, str or Path
    solver : str or Solver
        A name, also with options, ``"ilp:gap=0.001"``; ``"auto"`` takes the cheapest exact one.
    time_limit : float, optional
        Seconds of each run of a solver, one a sample if averaged; 60 by default.
    average : {"curves", "allocations"}
        Solve on mean curves, or for each sample and average the budgets (XKV, Sec. IV-C).
    request : Request, optional
        Instead of keywords.
    notify : callable
        Called with a line on the objective, if the request has none.
    **keywords
        One target, its context and its limits.

    Raises
    ------
    InputError
        If an argument is out of range, or the target is none or several.
    InfeasibleError
        If the target cannot be met; says which one can.
    SolverError
        If the solver refuses, fails or misreports.

    Examples
    --------
    >>> profile = solve("s.safetensors", target_retention=0.9)  # doctest: +SKIP
    """
    start, chosen = time.monotonic(), get_solver(solver)
    if not isinstance(scores, ScoreProfile):
        scores = load_scores(scores)
    request = Request.parse(**keywords) if request is None else request
    request, note = choose_objective(scores, request, chosen)
    try:
        posed = PosedRequest(scores=scores, request=request)
        decided = decide(posed, chosen, time_limit=time_limit, average=average)
    except InfeasibleError as error:
        left = None
        if time_limit is not None:
            left = max(time_limit - (time.monotonic() - start), 0.1 * time_limit)
        raise advise(scores, request, error, time_limit_seconds=left) from None
    if note:
        notify(note)
    return decided


def decide(
    posed: PosedRequest,
    solver: Solver,
    *,
    time_limit: float | None = None,
    average: Average = "curves",
    priced: bool = True,
) -> BudgetProfile:
    """Solve a posed request without advice; ``priced`` states shadow prices and limits too."""
    options = options_of(solver)
    scores, request, problem = posed.scores, posed.request, posed.problem
    if average == "curves":
        answer = solve_problem(problem, solver, time_limit_seconds=time_limit)
    else:
        answer = _average_allocations(posed, solver, time_limit, average)
        options["average"] = average
    prices: dict[str, Any] = {}
    if priced:
        is_optimal = answer.termination is Termination.OPTIMAL
        price = price_at(problem, answer.choice, is_optimal, answer.multiplier, answer.prices)
        prices["value_per_mib"], prices["price_source"] = price
        prices["limits"] = limits_of(problem, answer.choice, answer.prices or (answer.multiplier,))
    requested = request.record()
    if (granted := request.target.granted(posed.costs)) is not None:
        requested["bytes"] = granted + posed.costs.constant_bytes
    return BudgetProfile(
        shape=scores.shape,
        level=request.level,
        context_tokens=problem.context_tokens,
        batch=request.batch,
        length_rule="fixed" if request.target.is_fixed else "proportional",
        page_tokens=request.page,
        policy=scores.policy,
        requested=requested,
        **request.target.steering(),
        **outcome(posed, answer.choice, answer.value),
        solver=solver.name,
        solver_options=options,
        decided_by=answer.decided_by,
        detail=answer.detail,
        sense=problem.sense.value,
        objective=answer.objective,
        bound=answer.bound,
        bound_source=answer.bound_source,
        prices=answer.prices,
        termination=answer.termination.value,
        **prices,
        score_digest=scores.digest,
        problem_digest=problem.digest(),
        **provenance("python", "numpy"),
    )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The result of one of several solvers."""

    solver: str
    profile: BudgetProfile | None
    reason: str
    seconds: float

    @property
    def rank(self) -> tuple[float, ...]:
        """Return a sort key: best objective, then proven, then quick."""
        if self.profile is None:
            return (math.inf,)
        better = -1.0 if self.profile.sense == "max_value" else 1.0
        proven = self.profile.termination == Termination.OPTIMAL.value
        return better * self.profile.objective, not proven, self.seconds


@keywords_of(RequestOptions)
def compare(
    scores: ScoreProfile | str | Path,
    *,
    solvers: Sequence[str] | None = None,
    time_limit: float | None = None,
    average: Average = "curves",
    request: Request | None = None,
    notify: Callable[[str], None] = lambda line: None,
    watch: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
    **keywords: Unpack[RequestOptions],
) -> list[Attempt]:
    """Let several solvers decide the same budgets.

    Parameters
    ----------
    scores : ScoreProfile, str or Path
    solvers : sequence of str, optional
        By default all registered solvers.
    time_limit, average, request, notify : optional
        As in `solve`; the time limit is for each solver.
    watch : callable
        Returns a context, such as a progress bar, open while a solver runs.
    **keywords
        As in `solve`.

    Returns
    -------
    list of Attempt
        The best first, failed ones last.

    Raises
    ------
    InputError
    InfeasibleError
    SolverError
        If no solver succeeds.
    """
    scores = load_scores(scores)
    request = Request.parse(**keywords) if request is None else request
    chosen = {name: get_solver(name) for name in (solver_names() if solvers is None else solvers)}
    if not chosen:
        raise SolverError("no solver is registered: kvalloc is on the path but not installed")
    check_time_limit(time_limit)  # once, not as every solver's reason
    request, note = choose_objective(scores, request, get_solver("auto"))
    try:
        posed = PosedRequest(scores=scores, request=request)
        posed.problem.check_feasible()  # only the user can change what no solver can do
    except InfeasibleError as error:
        raise advise(scores, request, error) from None
    if average != "curves":
        _check_average(posed, average)
    attempts = []
    for name, solver in chosen.items():
        profile, reason, start = None, "", time.perf_counter()
        try:
            with watch(name):
                profile = decide(
                    posed, solver, time_limit=time_limit, average=average, priced=False
                )
        except KVAllocError as error:
            # The problem itself is sound: this solver cannot handle it.
            reason = str(error)
        seconds = time.perf_counter() - start
        attempts.append(Attempt(solver=name, profile=profile, reason=reason, seconds=seconds))
    if all(one.profile is None for one in attempts):
        reasons = "; ".join(one.reason for one in attempts)
        advice = advise(scores, request, InfeasibleError(reasons), time_limit_seconds=time_limit)
        raise SolverError(reasons) if str(advice) == reasons else advice
    if note:
        notify(note)
    return sorted(attempts, key=lambda one: one.rank)


def outcome(posed: PosedRequest, choice: IntArray, value: float) -> dict[str, Any]:
    """Return a choice's fields of a `BudgetProfile`; ``value`` is its value in the problem."""
    problem, scores, bits = posed.problem, posed.scores, None
    shape, full = scores.shape, list(scores.shape.full_layers)
    budgets = constant_entries(shape, problem.context_tokens)
    budgets[full] = problem.tokens[problem.units, choice].reshape(len(full), -1)
    if problem.bits is not None:
        bits = np.full_like(budgets, 16)
        bits[full] = problem.bits[problem.units, choice].reshape(len(full), -1)
    fields: dict[str, Any] = {"budgets": budgets, "bits": bits}
    is_mean = posed.request.objective in (None, "mean")
    fields["retention"] = value if is_mean else posed.retention(budgets)
    if scores.has_losses:
        fields["predicted_loss"] = loss = posed.predicted_loss(budgets, bits)
        share = problem.cost(choice) / posed.costs.full
        fields["model_error"] = None if loss is None else posed.model_error(bits, share)
    return fields


def _check_average(posed: PosedRequest, average: str) -> None:
    problem, counts = posed.problem, posed.problem.option_counts
    way_out = option("average", "curves")
    if average != "allocations":
        raise InputError(f"average is {average!r}, expected 'curves' or 'allocations'")
    if problem.constraints:
        raise InputError(
            "the mean of several allocations need not keep caps or few distinct budgets; use "
            f"{way_out} with them"
        )
    if problem.bits is not None or np.any(counts != counts[0]):
        raise InputError(
            "the mean of several allocations is one of tokens, and here options differ in more; "
            f"use {way_out}"
        )


def _average_allocations(
    posed: PosedRequest,
    solver: Solver,
    time_limit: float | None,
    average: str,
) -> CheckedSolution:
    _check_average(posed, average)
    problem, n_samples = posed.problem, posed.scores.n_samples
    problem.check_feasible()
    start = time.perf_counter()
    mean_choice = np.zeros(problem.n_units)
    for sample in range(n_samples):
        single = replace(posed, sample=sample).problem
        if single.target is not None:  # one sample may reach less than the mean of all has to
            single = single.with_target(min(single.target, single.max_value))
        answer = solve_problem(single, solver, time_limit_seconds=time_limit)
        mean_choice += answer.choice / n_samples

    def averaged(total: int) -> IntArray:
        return apportion(mean_choice, total, maximum=problem.last_options)

    total = int(np.floor(mean_choice.sum() + 1e-9))
    if problem.target is not None:
        # The mean of sufficient budgets need not suffice on the mean curves: add entries.
        total = bisect_left(
            range(int(problem.last_options.sum())),
            True,
            lo=total,
            key=lambda more: problem.meets_target(problem.objective_value(averaged(more))),
        )
    choice = averaged(total)
    if not problem.meets_target(problem.objective_value(choice)):  # curves that fall at their ends
        raise InfeasibleError(
            "budgets averaged over the samples do not meet the target, which those of the mean "
            f"curves do; use {option('average', 'curves')}"
        )
    detail = f"mean of the budgets of {n_samples} samples, each by {answer.decided_by}"
    mean = Solution.of(problem, choice, detail=detail)
    return checked(problem, mean, answer.decided_by, time.perf_counter() - start)


def loss_outlook(profile: BudgetProfile) -> str:
    """Return one line on the loss of budgets decided by retention, by the model's fitted file."""
    if profile.retention is None or profile.predicted_loss is not None:
        return ""
    unknown = "retention does not tell what answers lose"
    if (file := find_fitted(profile.shape)) is None:
        return f"{unknown}: run 'kvalloc fit {profile.shape.model_id}' once to know"
    share = min(profile.share, 1.0)
    try:
        lost, best = _predicted_losses(file, profile, share)
    except KVAllocError as error:  # a length or a share that its curves do not cover
        return f"{unknown}, nor does {file}: {error}"
    if lost is None or best is None:
        return f"{unknown}, and these budgets are below the curves of {file}"
    return (
        f"predicted to lose {lost:.2g} nats a token; {option('budget', f'{share:.1%}')} could lose "
        f"{best:.2g} in the same bytes (curves of {file})"
    )


@while_unchanged(maxsize=16)
def _predicted_losses(
    file: str, profile: BudgetProfile, share: float
) -> tuple[float | None, float | None]:
    fitted = load_fitted(file)
    scores, tokens = fitted.scores, profile.context_tokens
    request = Request.parse(
        budget=share, context=tokens, level="head", objective="loss", bits=fitted.widths
    )
    posed = PosedRequest(scores=scores, request=request)
    lost = posed.predicted_loss(profile.budgets, profile.bits)
    best = decide(posed, get_solver("lagrangian"), priced=False)
    if lost is not None:
        lost *= scores.error_at(share) or 1.0
    return lost, best.expected_loss
