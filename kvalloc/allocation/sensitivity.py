"""Which limits bind, what a byte of each is worth, and over which sizes its price holds."""

from __future__ import annotations

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.formats.budget_profile import Limit
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    MaxDistinct,
    best_response,
)

HOLDS_WITHIN = 1.1
"""A price holds at the sizes at which it is at most this factor higher or lower."""


MOST_OPTIONS = 2**24
"""With more options of curves that are not concave, the sizes at which prices hold take seconds."""


def limits_of(
    problem: AllocationProblem, choice: IntArray, prices: tuple[float, ...]
) -> tuple[Limit, ...]:
    """Return the limits of a problem, as a choice uses them.

    At prices p of all limits each unit's best option is known. With one price higher or lower and
    the others as they are, the bytes that these options draw on that limit are the sizes between
    which its price is the best one.

    Parameters
    ----------
    problem : AllocationProblem
    choice : ndarray of int64, (n_units,)
    prices : tuple of float
        Value of a byte of the capacity (or for the target), then of each cap, in the dual. Where
        some are missing, or other limits are there, none is stated.

    Returns
    -------
    tuple of Limit
        The capacity, each cap, and the number of different budgets, where there are such limits.
    """
    caps = problem.caps
    # Prices of a dual that leaves limits out are no prices under them.
    priced = problem.aggregate is Aggregate.SUM and len(caps) == len(problem.constraints)
    known = prices if priced and len(prices) == 1 + len(caps) else ()
    of_cap = known[1:] or (None,) * len(caps)
    at = np.full(problem.n_units, known[0] if known else 0.0)
    for cap, price in zip(caps, of_cap, strict=True):
        at[list(cap.units)] += price or 0.0
    limits = []
    if problem.capacity_bytes is not None:
        price = known[0] if known else None
        limits.append(_limit(problem, choice, "capacity", problem.units, price, at))
    for cap, price in zip(caps, of_cap, strict=True):
        members = np.asarray(cap.units, dtype=np.int64)
        limits.append(_limit(problem, choice, cap.stated()[0], members, price, at, cap))
    for one in problem.constraints:
        if isinstance(one, MaxDistinct):
            used = int(np.unique(problem.chosen_tokens(choice)).size)
            name = one.stated()[0]
            limits.append(Limit(name=name, used=used, most=one.most, binds=used == one.most))
    return tuple(limits)


def _limit(
    problem: AllocationProblem,
    choice: IntArray,
    name: str,
    units: IntArray,
    price: float | None,
    at: FloatArray,
    cap: GroupCap | None = None,
) -> Limit:
    """Return one limit of bytes; it binds where no unit's next option fits."""
    most = problem.spendable_bytes if cap is None else cap.capacity_bytes
    used = int(problem.costs[units, choice[units]].sum())
    after = np.minimum(choice + 1, problem.last_options)[units]
    steps = problem.costs[units, after] - problem.costs[units, choice[units]]
    larger = steps[steps > 0]
    quick = problem.is_concave or int(problem.option_counts.sum()) <= MOST_OPTIONS
    low, high = _holds(problem, units, price, at) if price and quick else (None, None)
    return Limit(
        name=name,
        used=used,
        most=most if cap is not None else problem.capacity_bytes or 0,
        binds=bool(larger.size) and used + int(larger.min()) > most,
        value_per_mib=None if price is None else price * 2**20,
        holds_from=low,
        holds_to=high,
    )


def _holds(
    problem: AllocationProblem, units: IntArray, price: float, at: FloatArray
) -> tuple[int, int]:
    """Return the bytes of some units where a price is within `HOLDS_WITHIN` of the best one."""
    sizes = []
    for factor in (HOLDS_WITHIN, 1.0 / HOLDS_WITHIN):
        changed = at.copy()
        changed[units] += (factor - 1.0) * price
        response = best_response(problem, changed)
        sizes.append(int(problem.costs[units, response[units]].sum()))
    return sizes[0], sizes[1]
