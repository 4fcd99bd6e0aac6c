"""Frontier: the best retention at many sizes, with shadow prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from kvalloc.allocation.decision import outcome
from kvalloc.allocation.formulation import PosedRequest, choose_objective
from kvalloc.allocation.infeasibility import advise
from kvalloc.allocation.request import TARGETS, Request, RequestOptions
from kvalloc.allocation.verification import CheckedSolution, price_at, solve_problem
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_scores
from kvalloc.problem import AllocationProblem, Solver, Termination
from kvalloc.problem.registry import get_solver
from kvalloc.units import keywords_of

MOST_POINTS = 100_000
"""Largest number of points; more would show nothing new."""


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(CheckedSolution):
    """The best choice of one size.

    Attributes
    ----------
    share : float
        Of the cost of all entries at 16 bits.
    value_per_mib : float or None
        Shadow price: value that one more MiB would buy.
    retention : float or None
        Mean over layers of the kept share of score mass.
    predicted_loss : float or None
        Nats per token.
    """

    share: float
    value_per_mib: float | None
    retention: float | None = None
    predicted_loss: float | None = None


class Frontier(list[FrontierPoint]):
    """The points of one request, by rising size."""

    def __init__(self, request: Request, points: Iterable[FrontierPoint]) -> None:
        super().__init__(points)
        self.request = request


@keywords_of(RequestOptions, without=TARGETS)
def frontier(
    scores: ScoreProfile | str | Path,
    *,
    points: int = 50,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
    request: Request | None = None,
    notify: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] | None = None,
    **keywords: Unpack[RequestOptions],
) -> Frontier:
    """Return the best retention, or smallest predicted loss, at sizes from the floors up.

    Parameters
    ----------
    points : int
        Sizes, spaced geometrically in bytes; equal ones are merged.
    solver, notify
        As in `kvalloc.solve`.
    time_limit : float, optional
        Seconds for each point.
    request : Request, optional
        With the target ``budget=1.0``.
    progress : callable, optional
        Called after each point with points done and in all.

    Raises
    ------
    InputError
        If points are not 2 to `MOST_POINTS`.
    InfeasibleError
        If no size is enough for the side constraints.
    SolverError
    """
    scores, chosen = load_scores(scores), get_solver(solver)
    if request is None:
        keywords["budget"] = 1.0
        request = Request.parse(**keywords)
    request, note = choose_objective(scores, request, chosen)
    posed = PosedRequest(scores=scores, request=request)
    try:
        traced = trace_frontier(
            posed.problem,
            chosen,
            _capacities(posed, points),
            whole_bytes=posed.costs.full,
            time_limit_seconds=time_limit,
            progress=progress,
        )
    except InfeasibleError as error:
        raise advise(scores, request, error) from None
    if note:
        notify(note)
    fields = [outcome(posed, point.choice, point.value) for point in traced]
    return Frontier(
        request,
        (
            replace(point, retention=one.get("retention"), predicted_loss=one.get("predicted_loss"))
            for point, one in zip(traced, fields, strict=True)
        ),
    )


def _capacities(posed: PosedRequest, points: int) -> list[int]:
    problem, costs = posed.problem, posed.costs
    if not 2 <= points <= MOST_POINTS:
        raise InputError(f"a frontier of {points} points is no line; ask for 2 to {MOST_POINTS:,}")
    smallest, grain = problem.min_cost_bytes, problem.lattice_bytes
    largest = max(smallest, min(problem.max_cost_bytes, costs.full))
    line = np.geomspace(max(smallest, grain), largest, points)
    steps = np.unique(np.rint((line - smallest) / grain).astype(np.int64))
    capacities = [min(largest, smallest + int(step) * grain) for step in steps]
    capacities[-1] = largest  # also where steps do not end there
    return [costs.everything if size >= costs.full else size for size in capacities]


def trace_frontier(
    problem: AllocationProblem,
    solver: Solver,
    capacities: Sequence[int],
    *,
    whole_bytes: int | None = None,
    time_limit_seconds: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[FrontierPoint]:
    """Solve one problem, its capacity or target ignored, at many capacities.

    ``capacities`` are rising bytes. Shares are of ``whole_bytes``, the largest cost of a point; by
    default of all last options.

    Raises
    ------
    InfeasibleError, SolverError
    """
    traced, whole = list[FrontierPoint](), whole_bytes or problem.max_cost_bytes
    last_error: InfeasibleError | None = None
    point = problem
    for done, capacity in enumerate(capacities, start=1):
        # From the last one, not the first: it keeps the results computed from the arrays.
        point = point.with_capacity(capacity)
        try:
            answer = solve_problem(point, solver, time_limit_seconds=time_limit_seconds)
        except InfeasibleError as error:
            last_error = error  # too small for the side constraints; a larger one may do
        else:
            is_optimal = answer.termination is Termination.OPTIMAL
            price = price_at(point, answer.choice, is_optimal, answer.multiplier, answer.prices)
            cost = min(answer.cost_bytes, whole)  # what keeps everything stores no positions
            fields = {**vars(answer), "cost_bytes": cost, "share": cost / whole}
            traced.append(FrontierPoint(**fields, value_per_mib=price.value_per_mib))
        if progress is not None:
            progress(done, len(capacities))
    if not traced and last_error is not None:
        raise last_error
    return traced
