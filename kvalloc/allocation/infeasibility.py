"""Why nothing can work, and what to ask for instead, as options to copy.

One thing at a time gives way: the target, each side constraint, the least and the largest budget.
What is nearest is found by solving again, exactly where solvers prove that nothing nearer works.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from kvalloc.allocation.curves import RequestCurves
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, SolverError, option
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import AllocationProblem, GroupCap, MaxDistinct, Sense
from kvalloc.problem import SideConstraint as Side
from kvalloc.problem.registry import get_solver
from kvalloc.units import parse_bytes

PATIENCE_SECONDS = 10.0
"""Longest search for what is nearest; what was found by then is reported as what it is."""

SURE = {True: "", False: " (a smaller change may do)"}
"""What is said of a way out, by whether nothing nearer works."""


def diagnose(
    problem: AllocationProblem, *, deadline: float
) -> tuple[float | int | None, bool] | None:
    """What is nearest to a problem that has no solution, as far as is found until a deadline.

    Returns
    -------
    (float or int or None, bool) or None
        The largest target, or the smallest capacity in bytes, that all constraints together leave
        possible, and whether nothing nearer is; (None, True) where they leave no choice at all.
        None where the problem has a solution, or none was found and none was ruled out.
    """
    if attempt(lambda: problem, deadline) is not False:
        return None
    # The other way round: with all the bytes there are, or for a target that any choice meets.
    other = problem.with_capacity(problem.max_cost_bytes)
    if problem.sense is Sense.MAX_VALUE:
        least = problem.values if problem.scenarios is None else problem.scenarios.min(axis=0)
        worth = np.minimum(problem.weights * least.min(axis=1), 0.0)
        other = problem.with_target(math.fsum(worth) - 1.0)
    best = attempt(lambda: other, deadline)
    if not isinstance(best, CheckedSolution):
        return None, best is False
    nearest = best.value if problem.sense is Sense.MIN_COST else best.cost_bytes
    return nearest, nearest == best.bound


def attempt(
    make: Callable[[], AllocationProblem], deadline: float
) -> CheckedSolution | Literal[False] | None:
    """A solution, False where there is none, None where neither was shown in time."""
    left = deadline - time.monotonic()
    if left <= 0:
        return None
    try:
        return solve_problem(make(), get_solver("auto"), time_limit_seconds=left)
    except InfeasibleError:
        return False
    except SolverError:
        return None


def least_that_works(
    low: int, high: int, works: Callable[[int], int | None]
) -> tuple[int, bool] | None:
    """The least whole number above one that does not work, up to another one.

    Parameters
    ----------
    low, high : int
        One known not to work, 0 or more, and the last to look at.
    works : callable
        ``works(n)`` is the least number that the solution found for n needs, False where there is
        none, None where neither was shown.

    Returns
    -------
    (int, bool) or None
        It, and whether everything below was ruled out; None where ``high`` does not work.
    """
    if high <= low or not (needed := works(high)):
        return None
    high, exact = min(high, needed), True
    while high - low > 1:
        middle = (low + high) // 2
        needed = works(middle)
        exact = exact and needed is not None
        low, high = (low, max(low + 1, min(middle, needed))) if needed else (middle, high)
    return high, exact


def relax(
    problem: AllocationProblem, index: int, *, deadline: float
) -> tuple[Side | None, bool] | None:
    """How far one side constraint has to give way for a problem to have a solution.

    Returns
    -------
    (SideConstraint or None, bool) or None
        The tightest one of its kind with which there is one, None where it has to be left out; and
        whether anything tighter was proven not to work. None where that alone does not help.
    """
    low, loosest, at = _scale(problem, problem.constraints[index])

    def works(number: int) -> int | None:
        changed = list(problem.constraints)
        changed[index : index + 1] = [] if number > loosest else [at(number)]
        answer = attempt(lambda: problem.replace(constraints=tuple(changed)), deadline)
        if not isinstance(answer, CheckedSolution):
            return answer
        choice = answer.choice

        def keeps(tighter: int) -> bool:
            return at(tighter).fault(problem, choice) is None

        return bisect_left(range(number), True, lo=low + 1, key=keeps)

    if (found := least_that_works(low, max(low, loosest) + 1, works)) is None:
        return None
    return None if found[0] > loosest else at(found[0]), found[1]


def _scale(problem: AllocationProblem, one: Side) -> tuple[int, int, Callable[[int], Side]]:
    """Constraints of one kind by number, from tight to loose: this one's, the loosest's, all."""
    if isinstance(one, GroupCap):
        units, grain = list(one.units), problem.lattice_bytes
        floors = int(problem.costs[units, 0].sum())
        most = int(problem.costs[units, problem.last_options[units]].sum())
        low, loosest = ((size - floors) // grain + 1 for size in (one.capacity_bytes, most))
        return max(0, low), loosest, lambda n: replace(one, capacity_bytes=floors + (n - 1) * grain)
    if isinstance(one, MaxDistinct):
        return one.most, problem.n_units, lambda n: replace(one, most=n)
    return 0, 0, lambda _: one


# What to ask for instead


def advise(
    scores: ScoreProfile,
    request: Request,
    error: InfeasibleError,
    *,
    time_limit_seconds: float | None = None,
) -> InfeasibleError:
    """Say which option makes a request impossible, and the nearest values that are possible.

    Parameters
    ----------
    scores, request
        What was measured and asked.
    error : InfeasibleError
        What a solver, or the problem itself, said.
    time_limit_seconds : float, optional
        For the search; `PATIENCE_SECONDS` by default.

    Returns
    -------
    InfeasibleError
        To raise; its ``nearest`` is in the unit of the target. The error as it was, where only one
        solver could not meet the request, or groups of layers are still to be chosen.
    """
    if isinstance(request.share_groups, int):
        return error
    limit = PATIENCE_SECONDS if time_limit_seconds is None else time_limit_seconds
    deadline = time.monotonic() + limit
    try:
        problem = formulate(scores, request)
    except InfeasibleError as too_small:  # below the floors: there is no problem to look into
        lower = _other_limit(scores, request, "min_tokens", deadline)
        text = f"{too_small}, or use {lower}" if lower else str(too_small)
        return InfeasibleError(text, nearest=too_small.nearest)
    found = diagnose(problem, deadline=deadline)
    if found is None:
        return error
    ways: dict[str, str] = {}
    every: list[str] = []
    for index, asked in enumerate(problem.constraints):
        every.append(_option(request, index, asked, asked))
        if (relaxed := relax(problem, index, deadline=deadline)) is not None:
            other = relaxed[0] and _option(request, index, asked, relaxed[0])
            ways[every[-1]] = (other or f"no {option(asked.keyword)}") + SURE[relaxed[1]]
    if request.max_tokens is not None:
        every.append(option("max_tokens", request.max_tokens))
    for name in ("max_tokens", "min_tokens"):
        if way := _other_limit(scores, request, name, deadline):
            ways[option(name, getattr(request, name))] = way
    text, nearest = f"{request.target} is not possible", None
    text += f" with {' and '.join(ways or every)}" if ways or every else ""
    text += " together; to change one of them is not enough" if every[1:] and not ways else ""
    if found[0] is not None:
        costs = RequestCurves(scores=scores, request=request).costs
        nearest, target = request.target.nearest(found[0], costs)
        text += f"; {request.target.limit} {target}"
        text += "" if found[1] else f" as far as {limit:g} s of search can tell"
    elif found[1]:
        text += ", and neither is any other target"
    text += f"; or use {', or '.join(ways.values())}" if ways else ""
    return InfeasibleError(text, nearest=nearest)


def _option(request: Request, index: int, asked: Side, shown: Side) -> str:
    """The option that asks for a constraint, or for another one in its place."""
    if isinstance(asked, GroupCap) and isinstance(shown, GroupCap):
        cap = request.cap[index]
        if shown is asked:
            return option("cap", cap.text)
        # What was asked for counts sliding layers, too.
        size = cap.capacity_bytes - asked.capacity_bytes + shown.capacity_bytes
        return option("cap", f"{cap.text.partition('=')[0]}={_size(size)}")
    if isinstance(shown, MaxDistinct):
        return option("max_distinct", shown.most)
    return option("equal_heads", True)


def _size(least_bytes: int) -> str:
    """A size as people write it, rounded up by a hundredth at most; bytes where that is more."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        text = f"{math.ceil(100 * least_bytes / unit) / 100:.2f}{name}"
        if least_bytes >= unit and parse_bytes(text) >= least_bytes:
            return text
    return f"{least_bytes}B"


def _other_limit(scores: ScoreProfile, request: Request, name: str, deadline: float) -> str:
    """The nearest other limit of single budgets with which the request can be met, if any."""
    asked = getattr(request, name) or 0
    step, last = -1, scores.protected_tokens
    if name == "max_tokens":
        step, last = 1, RequestCurves(scores=scores, request=request).context_tokens

    def works(moved: int) -> int | None:
        changed: dict[str, Any] = {name: asked + step * moved}
        answer = attempt(lambda: formulate(scores, replace(request, **changed)), deadline)
        return moved if isinstance(answer, CheckedSolution) else answer

    found = least_that_works(0, step * (last - asked) if asked else 0, works)
    return option(name, asked + step * found[0]) + SURE[found[1]] if found else ""
