"""Why nothing can work, and what to ask for instead, as options to copy.

One thing at a time gives way: the target, each side constraint, the least and the largest budget.
What is nearest is found by solving again, exactly where solvers prove that nothing nearer works.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from kvalloc.allocation.formulation import cache_costs, formulate
from kvalloc.allocation.request import Request
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, SolverError, option, several
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    MaxDistinct,
    RankBalance,
    Sense,
    SideConstraint,
)
from kvalloc.problem.registry import get_solver
from kvalloc.units import parse_bytes

PATIENCE_SECONDS = 10.0
"""Longest search for what is nearest; what was found by then is reported as what it is."""

TOLERANCE_GRID = 1000
"""Rank tolerances are looked for in steps of one part in so many."""

Answer = CheckedSolution | bool | None
"""A solution, False where there is none, None where neither was shown in time."""


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """One side constraint, and how far it has to give way for the problem to have a solution.

    Attributes
    ----------
    index : int
        Which of the problem's constraints.
    constraint : SideConstraint
        As it was.
    relaxed : SideConstraint or None
        The tightest one of its kind with which there is a solution; None where only leaving it
        out helps.
    exact : bool
        Whether anything tighter was proven not to work (a rank tolerance: on a grid of 0.001).
    """

    index: int
    constraint: SideConstraint
    relaxed: SideConstraint | None
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What stands in the way of an infeasible problem.

    Attributes
    ----------
    nearest : float or int or None
        The largest target, or the smallest capacity in bytes, that all constraints together leave
        possible; None where there is none, or none was found in time.
    hopeless : bool
        Whether the constraints were proven to leave no choice at all, whatever the goal.
    bound : float or None
        Nothing beyond this is possible; equal to ``nearest`` where that is exact.
    relaxations : tuple of Relaxation
        The side constraints of which each alone, relaxed, makes the problem feasible.
    """

    nearest: float | int | None
    bound: float | None
    hopeless: bool
    relaxations: tuple[Relaxation, ...]

    @property
    def exact(self) -> bool:
        """Whether nothing nearer is possible."""
        return self.nearest == self.bound and (self.nearest is not None or self.hopeless)


def diagnose(
    problem: AllocationProblem, *, time_limit_seconds: float = PATIENCE_SECONDS
) -> Diagnosis | None:
    """Find out why a problem has no solution, and what is nearest to it.

    Parameters
    ----------
    problem : AllocationProblem
        Of either sense, with any side constraints.
    time_limit_seconds : float
        For the whole search.

    Returns
    -------
    Diagnosis or None
        None where the problem has a solution, or none was found and none was ruled out.
    """
    deadline = time.monotonic() + time_limit_seconds
    if _solve(problem, deadline) is not False:
        return None
    reaches_target = problem.sense is Sense.MIN_COST
    if reaches_target:
        best = _solve(problem.with_capacity(problem.max_cost_bytes), deadline)
    else:
        best = _solve(problem.with_target(_below_everything(problem)), deadline)
    nearest, bound = None, None
    if isinstance(best, CheckedSolution):
        nearest = best.value if reaches_target else best.cost_bytes
        bound = None if best.bound is None else float(best.bound)
    found = (_relax(problem, index, deadline) for index in range(len(problem.constraints)))
    return Diagnosis(
        nearest=nearest,
        bound=bound,
        hopeless=best is False,
        relaxations=tuple(one for one in found if one is not None),
    )


def is_solvable(problem: AllocationProblem, *, time_limit_seconds: float) -> bool | None:
    """Whether a problem has a solution; None where neither was shown in time."""
    answer = _solve(problem, time.monotonic() + time_limit_seconds)
    return answer if answer is None else answer is not False


def least_that_works(
    low: int, high: int, works: Callable[[int], int | bool | None]
) -> tuple[int, bool]:
    """The least whole number above ``low`` that works, ``high`` being known to.

    Parameters
    ----------
    low, high : int
        What is known not to work and to work.
    works : callable
        ``works(n)`` is False, or None where it is not known, or True; or the least number that
        the solution found for ``n`` needs, which saves steps.

    Returns
    -------
    (int, bool)
        The number, and whether everything below was ruled out.
    """
    exact = True
    while high - low > 1:
        middle = (low + high) // 2
        answer = works(middle)
        exact = exact and answer is not None
        if answer is None or answer is False:
            low = middle
        else:
            high = middle if answer is True else max(low + 1, min(middle, answer))
    return high, exact


def _solve(problem: AllocationProblem, deadline: float) -> Answer:
    left = deadline - time.monotonic()
    if left <= 0:
        return None
    try:
        return solve_problem(problem, get_solver("auto"), time_limit_seconds=left)
    except InfeasibleError:
        return False
    except SolverError:
        return None


def _below_everything(problem: AllocationProblem) -> float:
    """A target that any choice meets."""
    least = problem.values if problem.scenarios is None else problem.scenarios.min(axis=0)
    worth = problem.weights[:, None] * least
    if problem.aggregate is Aggregate.WORST:
        return float(worth.min()) - 1.0
    return math.fsum(worth.min(axis=1)) - 1.0


def _relax(problem: AllocationProblem, index: int, deadline: float) -> Relaxation | None:
    """How far one constraint has to give way; None where that alone does not help."""
    constraint = problem.constraints[index]

    def under(*changed: SideConstraint) -> Answer:
        before, after = problem.constraints[:index], problem.constraints[index + 1 :]
        return _solve(problem.replace(constraints=(*before, *changed, *after)), deadline)

    def relaxation(relaxed: SideConstraint | None, exact: bool) -> Relaxation:
        return Relaxation(index=index, constraint=constraint, relaxed=relaxed, exact=exact)

    free = under()
    if not isinstance(free, CheckedSolution):
        return None
    if isinstance(constraint, GroupCap):
        scale = _cap_scale(problem, constraint)
    elif isinstance(constraint, MaxDistinct):
        scale = _distinct_scale(problem, constraint)
    elif isinstance(constraint, RankBalance):
        scale = _balance_scale(problem, constraint)
        free = under(scale.at((constraint.n_ranks - 1) * TOLERANCE_GRID))  # all on one rank
        if not isinstance(free, CheckedSolution):
            return relaxation(None, free is False)
    else:
        return relaxation(None, True)

    def works(number: int) -> int | bool | None:
        answer = under(scale.at(number))
        return scale.needed(answer) if isinstance(answer, CheckedSolution) else answer

    least, exact = least_that_works(scale.known, max(scale.known + 1, scale.needed(free)), works)
    return relaxation(scale.at(least), exact)


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Constraints of one kind by a whole number, from tight to loose."""

    known: int
    """Of the constraint that does not work."""
    at: Callable[[int], SideConstraint]
    needed: Callable[[CheckedSolution], int]
    """The least number with which a solution is allowed."""


def _cap_scale(problem: AllocationProblem, cap: GroupCap) -> _Scale:
    """Capacities on the grain of the costs."""
    units, grain = np.asarray(cap.units, dtype=np.int64), problem.lattice_bytes
    floors = int(problem.costs[units, 0].sum())
    return _Scale(
        known=max(-1, (cap.capacity_bytes - floors) // grain),
        at=lambda grains: replace(cap, capacity_bytes=floors + grains * grain),
        needed=lambda answer: (
            int(problem.costs[units, answer.choice[units]].sum() - floors) // grain
        ),
    )


def _distinct_scale(problem: AllocationProblem, few: MaxDistinct) -> _Scale:
    return _Scale(
        known=few.most,
        at=lambda most: MaxDistinct(most=most),
        needed=lambda answer: int(np.unique(problem.chosen_tokens(answer.choice)).size),
    )


def _balance_scale(problem: AllocationProblem, balance: RankBalance) -> _Scale:
    """Tolerances in steps of one part in `TOLERANCE_GRID`."""

    def needed(answer: CheckedSolution) -> int:
        assert answer.ranks is not None  # the problem asks for a placement
        loads = balance.loads(problem, answer.choice, answer.ranks)
        over = float(loads.max()) * balance.n_ranks / max(1, int(loads.sum())) - 1.0
        return max(0, math.ceil(over * TOLERANCE_GRID - 1e-9))

    return _Scale(
        known=math.floor(balance.tolerance * TOLERANCE_GRID),
        at=lambda steps: replace(balance, tolerance=steps / TOLERANCE_GRID),
        needed=needed,
    )


# What to ask for instead


def raise_with_advice(
    scores: ScoreProfile,
    request: Request,
    error: InfeasibleError,
    *,
    time_limit_seconds: float | None = None,
) -> NoReturn:
    """Raise what `advise` says, or the error as it was where that knows nothing better."""
    if isinstance(request.share_groups, int):
        raise error  # there is no problem to look into before the groups are chosen
    advice = advise(scores, request, error, time_limit_seconds=time_limit_seconds)
    raise advice from (None if advice is error else error)


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
    scores : ScoreProfile
        What was measured.
    request : Request
        What was asked.
    error : InfeasibleError
        What a solver, or the problem itself, said.
    time_limit_seconds : float, optional
        For the search; `PATIENCE_SECONDS` by default.

    Returns
    -------
    InfeasibleError
        To raise; its ``nearest`` is in the unit of the target asked for. The error as it was,
        where the request can be met after all and only one solver could not.
    """
    limit = PATIENCE_SECONDS if time_limit_seconds is None else time_limit_seconds
    deadline = time.monotonic() + limit
    try:
        problem = formulate(scores, request)
    except InfeasibleError as too_small:  # below the floors: there is no problem to look into
        lower = _lower_floor(scores, request, deadline)
        text = f"{too_small}, or use {lower}" if lower else str(too_small)
        return InfeasibleError(text, nearest=too_small.nearest)
    found = diagnose(problem, time_limit_seconds=limit)
    if found is None:
        return error
    ways: dict[str, str | None] = {
        _flag(request, one.index, one.constraint): _way_out(request, one)
        for one in found.relaxations
    }
    if request.max_tokens is not None and request.bits is None:
        ways[option("max_tokens", request.max_tokens)] = _more_tokens(scores, request, deadline)
    ways[option("min_tokens", request.min_tokens)] = _lower_floor(scores, request, deadline)
    ways = {flag: way for flag, way in ways.items() if way}
    text, nearest = f"{request.target} is not possible", None
    if ways:
        text += f" with {' and '.join(ways)}"
    else:
        every = [_flag(request, place, one) for place, one in enumerate(problem.constraints)]
        if request.max_tokens is not None:
            every.append(option("max_tokens", request.max_tokens))
        text += f" with {' and '.join(every)}" if every else ""
        text += " together; to change one of them is not enough" if len(every) > 1 else ""
    if found.nearest is not None:
        nearest, target = request.target.nearest(found.nearest, cache_costs(scores, request))
        text += f"; {request.target.limit} {target}"
        text += "" if found.exact else f" as far as {limit:g} s of search can tell"
    elif found.hopeless:
        text += ", and neither is any other target"
    if ways:
        text += f"; or use {', or '.join(map(str, ways.values()))}"
    return InfeasibleError(text, nearest=nearest)


def _flag(request: Request, index: int, constraint: SideConstraint) -> str:
    """The option that a constraint came from."""
    if isinstance(constraint, GroupCap):
        return option("cap", request.cap[index].text)
    if isinstance(constraint, MaxDistinct):
        return option("max_distinct", constraint.most)
    if isinstance(constraint, RankBalance):
        return several(ranks=constraint.n_ranks, rank_tolerance=constraint.tolerance)
    return option("equal_heads", True)


def _way_out(request: Request, one: Relaxation) -> str:
    """The option with which it works, or without which."""
    original = one.constraint
    if isinstance(one.relaxed, GroupCap) and isinstance(original, GroupCap):
        cap = request.cap[one.index]
        sliding = cap.capacity_bytes - original.capacity_bytes
        which = cap.text.partition("=")[0]
        way = option("cap", f"{which}={_size(one.relaxed.capacity_bytes + sliding)}")
    elif isinstance(one.relaxed, MaxDistinct):
        way = option("max_distinct", one.relaxed.most)
    elif isinstance(one.relaxed, RankBalance):
        way = option("rank_tolerance", one.relaxed.tolerance)
    else:
        return f"no {option(original.keyword)}"
    return way if one.exact else f"{way} (a smaller change may do)"


def _size(least_bytes: int) -> str:
    """A size as people write it, rounded up by a hundredth at most; bytes where that is more."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        text = f"{math.ceil(100 * least_bytes / unit) / 100:.2f}{name}"
        if least_bytes >= unit and parse_bytes(text) >= least_bytes:
            return text
    return f"{least_bytes}B"


def _lower_floor(scores: ScoreProfile, request: Request, deadline: float) -> str | None:
    """The largest least budget below the one asked with which the request can be met, if any."""
    asked = request.min_tokens or 0

    def works(fewer: int) -> bool | None:
        try:
            lower = formulate(scores, replace(request, min_tokens=asked - fewer))
        except InfeasibleError:
            return False
        return is_solvable(lower, time_limit_seconds=deadline - time.monotonic())

    most = asked - scores.protected_tokens
    if most <= 0 or works(most) is not True:
        return None
    least, exact = least_that_works(0, most, works)
    return option("min_tokens", asked - least) + ("" if exact else " (more may do)")


def _more_tokens(scores: ScoreProfile, request: Request, deadline: float) -> str | None:
    """The smallest largest budget with which the request can be met, if any."""
    whole = formulate(scores, replace(request, max_tokens=None))

    def works(options: int) -> bool | None:
        fewer = whole.replace(option_counts=np.minimum(whole.option_counts, options))
        return is_solvable(fewer, time_limit_seconds=deadline - time.monotonic())

    most = int(whole.option_counts.max())
    if works(most) is not True:
        return None
    least, exact = least_that_works(0, most, works)
    tokens = int(whole.tokens[:, least - 1].max())
    return option("max_tokens", tokens) + ("" if exact else " (fewer may do)")
