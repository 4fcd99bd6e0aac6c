"""The whole trade-off in one call: the best retention at many sizes, and what a byte buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvalloc.budget_profile import Level
from kvalloc.dual import bound_at
from kvalloc.errors import InputError, SolverError
from kvalloc.formulate import Request, formulate
from kvalloc.problem import AllocationProblem, IntArray
from kvalloc.registry import get_solver
from kvalloc.score_profile import ScoreProfile
from kvalloc.solver import Solver


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One size on the frontier.

    Attributes
    ----------
    share : float
        Bytes of the choice over the bytes of keeping everything.
    cost_bytes : int
        Bytes of the choice.
    value : float
        Retention reached.
    bound : float
        No choice of this capacity has more.
    value_per_mib : float
        Shadow price: retention that one more MiB would buy here.
    choice : ndarray of int64, (n_units,)
        Chosen option of each unit.
    """

    share: float
    cost_bytes: int
    value: float
    bound: float
    value_per_mib: float
    choice: IntArray


def frontier(
    scores: ScoreProfile,
    *,
    points: int = 50,
    shares: Sequence[float] | None = None,
    context: int | None = None,
    batch: int = 1,
    level: Level = "layer",
    min_tokens: int | None = None,
    page: int = 1,
    solver: str = "greedy",
    solver_options: dict[str, Any] | None = None,
) -> list[FrontierPoint]:
    """Best retention against bytes, from the floors to everything.

    Parameters
    ----------
    scores : ScoreProfile
        Measured retention curves.
    points : int
        Sizes, spaced geometrically in bytes (fewer where they fall together); ignored with
        ``shares``.
    shares : sequence of float, optional
        Sizes as shares of all entries instead.
    context, batch, level, min_tokens, page
        As in `kvalloc.solve`.
    solver : str
        Registered name.
    solver_options : dict, optional
        Its options.

    Returns
    -------
    list of FrontierPoint
        By rising size.

    Raises
    ------
    InputError
        If there are no points or a share is out of range.
    SolverError
        If the solver cannot solve this problem.
    """
    request = Request(
        budget=1.0,
        level=level,
        context_tokens=context,
        batch=batch,
        min_tokens=min_tokens,
        page_tokens=page,
    )
    problem = formulate(scores, request)
    chosen = get_solver(solver, **(solver_options or {}))
    return trace_frontier(problem, chosen, _capacities(problem, points, shares))


def trace_frontier(
    problem: AllocationProblem, solver: Solver, capacities: Sequence[int]
) -> list[FrontierPoint]:
    """Solve one problem at many capacities.

    Parameters
    ----------
    problem : AllocationProblem
        Its own capacity or target is ignored; arrays are checked and looked through only once.
    solver : Solver
    capacities : sequence of int
        Bytes, rising.

    Returns
    -------
    list of FrontierPoint

    Raises
    ------
    SolverError
        If the solver cannot solve this problem.
    """
    able = solver.can_solve(problem.with_capacity(capacities[0]))
    if able is not True:
        raise SolverError(str(able))
    traced = []
    for capacity in capacities:
        point = problem.with_capacity(capacity)
        point.check_feasible()
        choice = solver.solve(point).choice
        value, cost = point.objective_value(choice), point.cost(choice)
        price = _price(point, choice)
        traced.append(
            FrontierPoint(
                share=cost / point.max_cost_bytes,
                cost_bytes=cost,
                value=value,
                bound=max(value, bound_at(point, price)),
                value_per_mib=price * 2**20,
                choice=choice,
            )
        )
    return traced


def _capacities(
    problem: AllocationProblem, points: int, shares: Sequence[float] | None
) -> list[int]:
    least, most = problem.min_cost_bytes, problem.max_cost_bytes
    if shares is not None:
        if not shares or min(shares) <= 0 or max(shares) > 1:
            raise InputError("shares of the frontier must be above 0 and up to 1, at least one")
        return [int(share * most) for share in sorted(shares)]
    if points < 2:
        raise InputError(f"a frontier of {points} points is no line; ask for at least 2")
    grain = problem.lattice_bytes
    sizes = np.geomspace(max(least, grain), most, points)
    steps = np.unique(np.rint((sizes - least) / grain).astype(np.int64))
    return [min(most, least + int(step) * grain) for step in steps]


def _price(problem: AllocationProblem, choice: IntArray) -> float:
    """What the next byte would buy; for a concave problem, read off at the choice itself."""
    if not problem.is_concave or problem.step_bytes is None:
        return problem.dual_bound().multiplier
    units = np.arange(problem.n_units)
    after = np.minimum(choice + 1, problem.last_options)
    gains = problem.weights * (problem.values[units, after] - problem.values[units, choice])
    return max(0.0, float(gains.max())) / problem.step_bytes
