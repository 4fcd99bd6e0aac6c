"""Shadow prices: what the next byte buys, and which limits bind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.allocation.verification import DUAL
from kvalloc.formats.budget_profile import Limit
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    MaxDistinct,
    cheapest_reaching,
    dual_bound,
)
from kvalloc.problem.arrays import VALUE_TOLERANCE
from kvalloc.problem.bounds import next_gain

MIB = 2**20

WORST_STEP = 0.01
"""Step of value that is priced where the step of a single option would be too uneven."""


class ShadowPrice(NamedTuple):
    """The price of memory at a choice.

    Attributes
    ----------
    value_per_mib : float or None
        Value of one MiB more, at least 0; its inverse is the price of a value of 1. None if it is
        unknown.
    source : str
        Where it comes from, or why it is unknown, in a few words.
    """

    value_per_mib: float | None
    source: str


UNPRICED = ShadowPrice(None, "not computed: the limits leave no formula")


def price_at(
    problem: AllocationProblem,
    choice: IntArray,
    is_optimal: bool = True,
    multiplier: float | None = None,
    prices: tuple[float, ...] = (),
) -> ShadowPrice:
    """Return the price of a MiB at a choice.

    Parameters
    ----------
    problem : AllocationProblem
        Either sense.
    choice : ndarray of int64, (n_units,)
        The decision; the price is for going on from there.
    is_optimal : bool
        A rule's answer is not where the best one goes on from.
    multiplier : float, optional
        Multiplier of the dual bound, if it is known already.
    prices : tuple of float
        Prices of the dual bound under caps, if they are known.

    Returns
    -------
    ShadowPrice
        For concave units, also under caps, the best gain of a next option that every cap leaves
        room for. For other units the price of the capacity in the Lagrangian dual.
        For the worst unit the bytes that `WORST_STEP` more of it takes. Unknown if side constraints
        leave no such formula; if the choice is not optimal, only the multiplier is known.

    Examples
    --------
    >>> from kvalloc.testing import tiny_problem
    >>> problem = tiny_problem("concave", seed=0)
    >>> price_at(problem, problem.last_options).value_per_mib
    0.0
    """
    if problem.aggregate is Aggregate.WORST and not problem.constraints and is_optimal:
        return _worst_price(problem, choice)
    if problem.aggregate is not Aggregate.SUM:
        return UNPRICED
    only_caps = set(map(type, problem.constraints)) <= {GroupCap}
    if only_caps and problem.is_concave and is_optimal:
        return ShadowPrice(next_gain(problem, choice) * MIB, "the next entry")
    if problem.constraints:
        return ShadowPrice(prices[0] * MIB, DUAL) if only_caps and prices else UNPRICED
    if multiplier is None:
        multiplier = dual_bound(problem).multiplier
    return ShadowPrice(multiplier * MIB, DUAL)


def _worst_price(problem: AllocationProblem, choice: IntArray) -> ShadowPrice:
    value = problem.objective_value(choice)
    source = f"{WORST_STEP:g} more"
    higher = min(value + WORST_STEP, problem.max_value)
    # Curves that tie but for the last bit reach a level together.
    now, then = (cheapest_reaching(problem, one - VALUE_TOLERANCE) for one in (value, higher))
    if now is None or then is None or higher <= value:
        return ShadowPrice(0.0, source)
    gained, spent = problem.objective_value(then) - value, problem.cost(then) - problem.cost(now)
    per_byte = max(0.0, gained) / spent if spent > 0 else 0.0
    return ShadowPrice(per_byte * MIB, source)


def limits_of(
    problem: AllocationProblem, choice: IntArray, prices: tuple[float, ...]
) -> tuple[Limit, ...]:
    """Return the limits of a problem, as a choice uses them.

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
    known = priced and len(prices) == 1 + len(caps)
    of_capacity, *of_caps = prices if known else [None] * (1 + len(caps))
    after = np.minimum(choice + 1, problem.last_options)
    steps = problem.costs[problem.units, after] - problem.costs[problem.units, choice]

    def limit(name: str, units: Sequence[int] | IntArray, size: int, price: float | None) -> Limit:
        used, larger = problem.cost(choice, units), steps[list(units)]
        binds = bool((larger > 0).any()) and used + int(larger[larger > 0].min()) > size
        worth = None if price is None else price * MIB
        return Limit(name=name, used=used, most=size, binds=binds, value_per_mib=worth)

    limits = []
    if problem.capacity_bytes is not None:
        limits.append(limit("capacity", problem.units, problem.capacity_bytes, of_capacity))
    for cap, price in zip(caps, of_caps, strict=True):
        limits.append(limit(cap.stated()[0], cap.units, cap.capacity_bytes, price))
    for one in problem.constraints:
        if isinstance(one, MaxDistinct):
            used = int(np.unique(problem.chosen_tokens(choice)).size)
            name = one.stated()[0]
            limits.append(Limit(name=name, used=used, most=one.most, binds=used == one.most))
    return tuple(limits)
