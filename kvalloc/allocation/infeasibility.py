"""Advice on an infeasible request: the nearest feasible ones, as options to copy.

The target, each side constraint, the smallest and the largest budget are relaxed alone. The nearest
value is exact if solvers prove their answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from kvalloc.allocation.formulation import PosedRequest, formulate
from kvalloc.allocation.request import Request, Target
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, SolverError, option
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import AllocationProblem, GroupCap, MaxDistinct, Sense
from kvalloc.problem import SideConstraint as Side
from kvalloc.problem.registry import get_solver
from kvalloc.units import parse_bytes

PATIENCE_SECONDS = 10.0
"""Longest search for the nearest possible values."""

SURE = {True: "", False: " (a smaller change may do)"}
"""Note on a way out, by whether it is proven to be the nearest."""


def diagnose(
    problem: AllocationProblem, *, deadline: float
) -> tuple[float | int | None, bool] | None:
    """Return the largest feasible target, or smallest capacity in bytes, and whether it is proven.

    (None, True) if the constraints allow no choice; None if the problem has a solution, or nothing
    was shown in time.
    """
    if attempt(lambda: problem, deadline) is not False:
        return None
    # The other way round: with all the bytes there are, or for a target that any choice meets.
    other = problem.with_capacity(problem.max_cost_bytes)
    if problem.sense is Sense.MAX_VALUE:
        worth = np.minimum(problem.weights * problem.values.min(axis=1), 0.0)
        other = problem.with_target(math.fsum(worth) - 1.0)
    best = attempt(lambda: other, deadline)
    if not isinstance(best, CheckedSolution):
        return None, best is False
    nearest = best.value if problem.sense is Sense.MIN_COST else best.cost_bytes
    return nearest, nearest == best.bound


def attempt(
    make: Callable[[], AllocationProblem], deadline: float
) -> CheckedSolution | Literal[False] | None:
    """Return a solution, False if there is none, None if neither is shown in time."""
    if time.monotonic() >= deadline:
        return None
    try:
        problem = make()
        left = max(deadline - time.monotonic(), 1e-3)
        return solve_problem(problem, get_solver("auto"), time_limit_seconds=left)
    except InfeasibleError:
        return False
    except SolverError:
        return None


def smallest_that_works(
    low: int, high: int, attempted: Callable[[int], CheckedSolution | Literal[False] | None]
) -> tuple[int, bool] | None:
    """Return the smallest number that works, and whether all below were ruled out, by bisection.

    ``low`` does not work; None if ``high`` does not either.
    """
    if high <= low or not attempted(high):
        return None
    exact = True
    while high - low > 1:
        middle = (low + high) // 2
        answer = attempted(middle)
        exact = exact and answer is not None
        low, high = (low, middle) if answer else (middle, high)
    return high, exact


def relax(problem: AllocationProblem, index: int, *, deadline: float) -> tuple[Side, bool] | None:
    """Return the tightest form of one side constraint with a solution, and whether it is proven.

    None if relaxing this constraint alone does not help.
    """
    before, after = problem.constraints[:index], problem.constraints[index + 1 :]
    low, loosest, at = _scale(problem, problem.constraints[index])

    def attempted(number: int) -> CheckedSolution | Literal[False] | None:
        changed = (*before, at(number), *after)
        return attempt(lambda: problem.replace(constraints=changed), deadline)

    nearest = smallest_that_works(low, loosest, attempted)
    return None if nearest is None else (at(nearest[0]), nearest[1])


def _scale(problem: AllocationProblem, one: Side) -> tuple[int, int, Callable[[int], Side]]:
    """Return the number of a constraint, of the loosest of its kind, and their maker."""
    if isinstance(one, GroupCap):
        units, grain = list(one.units), problem.lattice_bytes
        floors = int(problem.costs[units, 0].sum())
        largest = int(problem.costs[units, problem.last_options[units]].sum())
        low, loosest = ((size - floors) // grain + 1 for size in (one.capacity_bytes, largest))
        return max(0, low), loosest, lambda n: replace(one, capacity_bytes=floors + (n - 1) * grain)
    assert isinstance(one, MaxDistinct)  # a request asks for no others
    return one.maximum, problem.n_units, lambda n: replace(one, maximum=n)


# What to ask for instead


def advise(
    scores: ScoreProfile,
    request: Request,
    error: InfeasibleError,
    *,
    time_limit_seconds: float | None = None,
) -> InfeasibleError:
    """Return the error that names the option in the way, and the nearest possible values.

    It is ``error`` if only one solver could not meet the request.
    """
    limit = PATIENCE_SECONDS if time_limit_seconds is None else time_limit_seconds
    deadline = time.monotonic() + limit
    try:
        problem = formulate(scores, request)
    except InfeasibleError as too_small:  # below the floors
        problem = formulate(scores, replace(request, target=Target.of({"budget": 1.0})))
        if not problem.constraints:
            lower = _other_limit(scores, request, "min_tokens", deadline)
            text = f"{too_small}, or use {lower}" if lower else str(too_small)
            return InfeasibleError(text, nearest=too_small.nearest)
        problem = problem.with_capacity(problem.min_cost_bytes - 1)
    goal, costs = request.target, PosedRequest(scores=scores, request=request).costs
    limit_is = "the most is" if goal.kind == "retention" else "the least is"
    if (diagnosis := diagnose(problem, deadline=deadline)) is None:
        if error.nearest is None or problem.target is None or time.monotonic() > deadline:
            return error
        number, target = goal.nearest(error.nearest, costs)  # of one solver: others can
        return InfeasibleError(f"{error}; {limit_is} {target} with it", nearest=number)
    possible, is_exact = diagnosis
    ways: dict[str, str] = {}
    limits: list[str] = []
    for index, side in enumerate(problem.constraints):
        limits.append(_option(request, index, side, side))
        if (relaxed := relax(problem, index, deadline=deadline)) is not None:
            ways[limits[-1]] = _option(request, index, side, relaxed[0]) + SURE[relaxed[1]]
    if request.max_tokens is not None:
        limits.append(option("max_tokens", request.max_tokens))
    for name in ("max_tokens", "min_tokens"):
        if way := _other_limit(scores, request, name, deadline):
            ways[option(name, getattr(request, name))] = way
    text, nearest = f"{goal} is not possible", None
    text += f" with {' and '.join(ways or limits)}" if ways or limits else ""
    text += " together; to change one of them is not enough" if limits[1:] and not ways else ""
    if possible is not None and (problem.target is None or goal.kind == "loss" or possible > 0):
        nearest, target = goal.nearest(possible, costs)
        text += f"; {limit_is} {target}"
        text += "" if is_exact else f" as far as {limit:.3g} s of search can tell"
    elif is_exact:
        text += ", and neither is any other target"
    text += f"; or use {', or '.join(ways.values())}" if ways else ""
    return InfeasibleError(text, nearest=nearest)


def _option(request: Request, index: int, requested: Side, shown: Side) -> str:
    if isinstance(requested, GroupCap) and isinstance(shown, GroupCap):
        cap = request.cap[index]
        if shown is requested:
            return option("cap", cap.text)
        # The cap of the request counts sliding layers, too.
        size = cap.capacity_bytes - requested.capacity_bytes + shown.capacity_bytes
        return option("cap", f"{cap.text.partition('=')[0]}={_size(size)}")
    return option("max_distinct", shown.maximum if isinstance(shown, MaxDistinct) else None)


def _size(least_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        text = f"{math.ceil(100 * least_bytes / unit) / 100:.2f}{name}"
        if least_bytes >= unit and parse_bytes(text) >= least_bytes:
            return text
    return f"{least_bytes}B"


def _other_limit(scores: ScoreProfile, request: Request, name: str, deadline: float) -> str:
    limit = getattr(request, name) or 0
    step, last = -1, scores.protected_tokens
    if name == "max_tokens":
        step, last = 1, PosedRequest(scores=scores, request=request).context_tokens

    def attempted(moved: int) -> CheckedSolution | Literal[False] | None:
        changed: dict[str, Any] = {name: limit + step * moved}
        return attempt(lambda: formulate(scores, replace(request, **changed)), deadline)

    nearest = smallest_that_works(0, step * (last - limit) if limit else 0, attempted)
    return option(name, limit + step * nearest[0]) + SURE[nearest[1]] if nearest else ""
