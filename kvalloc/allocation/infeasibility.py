"""What to ask for instead: a request that nothing can meet, answered with flags to copy."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np

from kvalloc.allocation.diagnosis import (
    PATIENCE_SECONDS,
    Diagnosis,
    Relaxation,
    diagnose,
    is_solvable,
    least_that_works,
)
from kvalloc.allocation.formulation import cache_costs, formulate
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError, option, several
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.problem import AllocationProblem, GroupCap, MaxDistinct, RankBalance, SideConstraint
from kvalloc.units import parse_bytes


def advise(
    scores: ScoreProfile,
    request: Request,
    error: InfeasibleError,
    *,
    time_limit_seconds: float | None = None,
) -> InfeasibleError:
    """Say which flag makes a request impossible, and the nearest values that are possible.

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
    nearest, nearest_flag = _nearest(scores, request, problem, found)
    ways = [_way_out(request, problem, one) for one in found.relaxations]
    blamed = [_flag(request, one.index, one.constraint) for one in found.relaxations]
    rises = request.max_tokens is not None and request.bits is None
    if rises and (more := _more_tokens(scores, request, deadline)):
        ways.append(more)
        blamed.append(option("max_tokens", request.max_tokens))
    if lower := _lower_floor(scores, request, deadline):
        ways.append(lower)
        blamed.append(option("min_tokens", request.min_tokens))
    text = f"{request.target} is not possible"
    if blamed:
        text += f" with {' and '.join(blamed)}"
    else:
        every = [_flag(request, i, c) for i, c in enumerate(problem.constraints)]
        if request.max_tokens is not None:
            every.append(option("max_tokens", request.max_tokens))
        text += f" with {' and '.join(every)}" if every else ""
        text += " together; to change one of them is not enough" if len(every) > 1 else ""
    if nearest_flag is not None:
        text += f"; {request.target.limit} {nearest_flag}"
        text += "" if found.exact else f" as far as {limit:g} s of search can tell"
    elif found.hopeless:
        text += ", and neither is any other target"
    if ways:
        text += f"; or use {', or '.join(ways)}"
    return InfeasibleError(text, nearest=nearest)


def _nearest(
    scores: ScoreProfile, request: Request, problem: AllocationProblem, found: Diagnosis
) -> tuple[float | int | None, str | None]:
    """The nearest goal in the unit of the one asked, and its flag, rounded to the safe side."""
    if found.nearest is None:
        return None, None
    number, target = request.target.nearest(found.nearest, cache_costs(scores, request))
    return number, str(target)


def _flag(request: Request, index: int, constraint: SideConstraint) -> str:
    """The flag that a constraint came from."""
    if isinstance(constraint, GroupCap):
        return option("cap", request.cap[index].text)
    if isinstance(constraint, MaxDistinct):
        return option("max_distinct", constraint.most)
    if isinstance(constraint, RankBalance):
        return several(ranks=constraint.n_ranks, rank_tolerance=constraint.tolerance)
    return option("equal_heads", True)


def _way_out(request: Request, problem: AllocationProblem, one: Relaxation) -> str:
    """The flag with which it works, or without which."""
    if isinstance(one.relaxed, GroupCap):
        original = problem.constraints[one.index]
        assert isinstance(original, GroupCap)  # a constraint is relaxed to one of its kind
        cap = request.cap[one.index]
        sliding = cap.capacity_bytes - original.capacity_bytes
        which = cap.text.partition("=")[0]
        way = option("cap", f"{which}={_size(one.relaxed.capacity_bytes + sliding)}")
    elif isinstance(one.relaxed, MaxDistinct):
        way = option("max_distinct", one.relaxed.most)
    elif isinstance(one.relaxed, RankBalance):
        way = option("rank_tolerance", one.relaxed.tolerance)
    else:
        return f"no {option(one.constraint.keyword)}"
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
            lower = formulate(scores, dataclasses.replace(request, min_tokens=asked - fewer))
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
    whole = formulate(scores, dataclasses.replace(request, max_tokens=None))

    def works(options: int) -> bool | None:
        counts = np.minimum(whole.option_counts, options)
        fewer = dataclasses.replace(whole, option_counts=counts)
        return is_solvable(fewer, time_limit_seconds=deadline - time.monotonic())

    most = int(whole.option_counts.max())
    if works(most) is not True:
        return None
    least, exact = least_that_works(0, most, works)
    tokens = int(whole.tokens[:, least - 1].max())
    return option("max_tokens", tokens) + ("" if exact else " (fewer may do)")
