"""The whole trade-off in one call: the best retention at many sizes, with shadow prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.allocation.decision import outcome
from kvalloc.allocation.formulation import choose_objective, pose
from kvalloc.allocation.infeasibility import advise
from kvalloc.allocation.request import TARGETS, Request, RequestOptions
from kvalloc.allocation.verification import bound_at_choice, checked_answer, price_at
from kvalloc.errors import InfeasibleError, InputError, option
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_scores
from kvalloc.problem import AllocationProblem, Solution, Solver
from kvalloc.problem.registry import get_solver
from kvalloc.units import keywords_of


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One size on the frontier.

    Attributes
    ----------
    share : float
        Cost of the choice over that of keeping everything, at 16 bits a number.
    cost_bytes : int
        Bytes of the choice.
    value : float
        What the objective is about: retention, or less the predicted loss.
    bound : float
        No choice of this capacity has more.
    value_per_mib : float or None
        Shadow price: value that one more MiB would buy here; None where side constraints leave no
        price.
    choice : ndarray of int64, (n_units,)
        Chosen option of each unit.
    retention : float or None
        Mean over layers of the kept share of score mass; None where only a problem is known, or
        units keep other entries than the scorer's best.
    predicted_loss : float or None
        Sum of the measured losses, nats per token; None where loss was not measured.
    """

    share: float
    cost_bytes: int
    value: float
    bound: float
    value_per_mib: float | None
    choice: IntArray
    retention: float | None = None
    predicted_loss: float | None = None


@keywords_of(RequestOptions, without=[kind.keyword for kind in TARGETS])
def frontier(
    scores: ScoreProfile | str | Path,
    *,
    points: int = 50,
    shares: Sequence[float] | None = None,
    solver: str = "auto",
    solver_options: dict[str, Any] | None = None,
    time_limit: float | None = None,
    notify: Callable[[int, int], None] | None = None,
    **keywords: Unpack[RequestOptions],
) -> list[FrontierPoint]:
    """Return the best retention, or smallest predicted loss, at sizes from the floors up.

    Parameters
    ----------
    scores : ScoreProfile, str or Path
        Measured retention curves, or their file.
    points : int
        Sizes, spaced geometrically in bytes (fewer where they fall together); ignored with
        ``shares``.
    shares : sequence of float, optional
        Sizes as budgets instead, each a share.
    solver : str
        Registered name.
    solver_options : dict, optional
        Its options.
    time_limit : float, optional
        Seconds for each point.
    notify : callable, optional
        Called with the points done and the points in all after each one.
    **keywords
        See `kvalloc.allocation.request.RequestOptions`, without a target. Groups of layers are
        named, not counted: other groups would be best at every size.

    Returns
    -------
    list of FrontierPoint
        By rising size.

    Raises
    ------
    InputError
        If there are no points or a share is out of range.
    InfeasibleError
        If no size is enough for the side constraints; says what would be.
    SolverError
        If the solver cannot solve this problem.
    """
    keywords["budget"], scores = 1.0, load_scores(scores)
    chosen = get_solver(solver, **(solver_options or {}))
    request, problem, _ = choose_objective(scores, Request.parse(**keywords), chosen)
    return trace_request(
        scores,
        request,
        chosen,
        Sizes(points=points, shares=shares),
        problem=problem,
        time_limit=time_limit,
        notify=notify,
    )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes to solve for.

    Attributes
    ----------
    points, shares
        As in `frontier`.
    """

    points: int = 50
    shares: Sequence[float] | None = None

    def capacities(self, problem: AllocationProblem, whole_bytes: int) -> list[int]:
        """Return the bytes of each size, rising.

        Parameters
        ----------
        problem : AllocationProblem
            From its smallest choice to its largest, or to what shares are of.
        whole_bytes : int
            What shares are of.

        Raises
        ------
        InputError
            If there are no points or a share is out of range.
        """
        smallest = problem.min_cost_bytes
        largest = max(smallest, min(problem.max_cost_bytes, whole_bytes))
        if self.shares is not None:
            if not self.shares or min(self.shares) <= 0 or max(self.shares) > 1:
                raise InputError("shares of the frontier must be above 0 and up to 1, at least one")
            return [int(share * whole_bytes) for share in sorted(self.shares)]
        if self.points < 2:
            raise InputError(f"a frontier of {self.points} points is no line; ask for at least 2")
        grain = problem.lattice_bytes
        sizes = np.geomspace(max(smallest, grain), largest, self.points)
        steps = np.unique(np.rint((sizes - smallest) / grain).astype(np.int64))
        return [min(largest, smallest + int(step) * grain) for step in steps]


def trace_request(
    scores: ScoreProfile,
    request: Request,
    solver: Solver,
    sizes: Sizes,
    *,
    problem: AllocationProblem | None = None,
    notify: Callable[[int, int], None] | None = None,
    time_limit: float | None = None,
) -> list[FrontierPoint]:
    """Return the frontier of a request; see `frontier`.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
        Its target is ``budget=1.0``, its objective is chosen.
    solver : Solver
    sizes : Sizes
    problem : AllocationProblem, optional
        That of the request, where it is known already.
    time_limit, notify
        As in `frontier`, which says what is returned and raised.
    """
    if isinstance(request.share_groups, int):
        raise InputError(
            "the best groups of layers differ from size to size; name them, such as "
            f"{option('share_groups', '2-3,4-5')} (kvalloc solve chooses them for one size)"
        )
    posed = pose(scores, request, problem)
    whole_bytes = posed.curves.costs.full
    try:
        traced = trace_frontier(
            posed.problem,
            solver,
            sizes.capacities(posed.problem, whole_bytes),
            whole_bytes=whole_bytes,
            time_limit_seconds=time_limit,
            notify=notify,
        )
    except InfeasibleError as error:
        raise advise(scores, request, error) from None
    fields = [outcome(posed, point.choice, point.value) for point in traced]
    return [
        replace(point, retention=one.get("retention"), predicted_loss=one.get("predicted_loss"))
        for point, one in zip(traced, fields, strict=True)
    ]


def trace_frontier(
    problem: AllocationProblem,
    solver: Solver,
    capacities: Sequence[int],
    *,
    whole_bytes: int | None = None,
    time_limit_seconds: float | None = None,
    notify: Callable[[int, int], None] | None = None,
) -> list[FrontierPoint]:
    """Solve one problem at many capacities.

    Parameters
    ----------
    problem : AllocationProblem
        Its own capacity or target is ignored; arrays are checked only once.
    solver : Solver
    capacities : sequence of int
        Bytes, rising.
    whole_bytes : int, optional
        What shares are of; the cost of every unit's last option by default.
    time_limit_seconds, notify
        As ``time_limit`` and ``notify`` of `frontier`.

    Raises
    ------
    InfeasibleError
        If no capacity is enough for the side constraints.
    SolverError
        If the solver cannot solve this problem, fails or misreports.
    """
    traced = []
    last_error: InfeasibleError | None = None
    point = problem
    for done, capacity in enumerate(capacities, start=1):
        # From the last one, not the first: what is computed from the arrays is kept.
        point = point.with_capacity(capacity)
        try:
            answer, _ = checked_answer(point, solver, time_limit_seconds)
            traced.append(_point(point, answer, whole_bytes or problem.max_cost_bytes))
        except InfeasibleError as error:
            last_error = error  # too small for the side constraints; a larger one may do
        if notify is not None:
            notify(done, len(capacities))
    if not traced and last_error is not None:
        raise last_error
    return traced


def _point(problem: AllocationProblem, answer: Solution, whole_bytes: int) -> FrontierPoint:
    choice = answer.choice
    value, cost = problem.objective_value(choice), problem.cost(choice)
    price = price_at(problem, choice)
    bound = bound_at_choice(problem, choice)
    if answer.bound is not None:
        bound = min(bound, answer.bound)
    return FrontierPoint(
        share=cost / whole_bytes,
        cost_bytes=cost,
        value=value,
        bound=max(value, bound),
        value_per_mib=None if price is None else price.value_per_byte * 2**20,
        choice=choice,
    )
