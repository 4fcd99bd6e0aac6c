"""Shadow prices: what the next byte buys, and which limits bind."""

from __future__ import annotations

from dataclasses import dataclass

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

WORST_STEP = 0.01
"""Step of value that is priced where the step of a single option would be too uneven."""


@dataclass(frozen=True, kw_only=True)
class ShadowPrice:
    """What one more byte buys at a choice.

    Attributes
    ----------
    value_per_byte : float or None
        Value of one byte more, at least 0; its inverse is what one more of value costs. None if
        it is unknown.
    source : str
        Where it comes from, or why it is unknown, in a few words.
    """

    value_per_byte: float | None
    source: str

    @property
    def value_per_mib(self) -> float | None:
        """Value of one MiB more."""
        return None if self.value_per_byte is None else self.value_per_byte * 2**20


UNPRICED = ShadowPrice(value_per_byte=None, source="not computed: the limits leave no formula")


def price_at(
    problem: AllocationProblem,
    choice: IntArray,
    is_optimal: bool = True,
    multiplier: float | None = None,
    prices: tuple[float, ...] = (),
) -> ShadowPrice:
    """Return the price of a byte at a choice.

    Parameters
    ----------
    problem : AllocationProblem
        Either sense.
    choice : ndarray of int64, (n_units,)
        What was decided; the price is that of going on from there.
    is_optimal : bool
        A rule's answer is not where the best one goes on from.
    multiplier : float, optional
        That of the dual bound, where it is known already.
    prices : tuple of float
        Those of the dual bound under caps, if they are known.

    Returns
    -------
    ShadowPrice
        For concave units, also under caps, the best gain of a next option that every cap leaves
        room for. For other units the price of the capacity in the Lagrangian dual.
        For the worst unit what `WORST_STEP` more of it takes. Unknown where side constraints leave
        no such formula; of what is not optimal only the multiplier is known.

    Examples
    --------
    >>> from kvalloc.testing import tiny_problem
    >>> problem = tiny_problem("concave", seed=0)
    >>> price_at(problem, problem.last_options).value_per_byte
    0.0
    """
    if problem.aggregate is Aggregate.WORST and not problem.constraints and is_optimal:
        return _worst_price(problem, choice)
    if problem.aggregate is not Aggregate.SUM:
        return UNPRICED
    only_caps = set(map(type, problem.constraints)) <= {GroupCap}
    if only_caps and problem.is_concave and is_optimal:
        return ShadowPrice(value_per_byte=next_gain(problem, choice), source="the next entry")
    if problem.constraints:
        known = only_caps and prices
        return ShadowPrice(value_per_byte=prices[0], source=DUAL) if known else UNPRICED
    if multiplier is None:
        multiplier = dual_bound(problem).multiplier
    return ShadowPrice(value_per_byte=multiplier, source=DUAL)


def _worst_price(problem: AllocationProblem, choice: IntArray) -> ShadowPrice:
    value = problem.objective_value(choice)
    source = f"{WORST_STEP:g} more"
    higher = min(value + WORST_STEP, problem.max_value)
    # Curves that tie but for the last bit reach a level together.
    now, then = (cheapest_reaching(problem, one - VALUE_TOLERANCE) for one in (value, higher))
    if now is None or then is None or higher <= value:
        return ShadowPrice(value_per_byte=0.0, source=source)
    gained, spent = problem.objective_value(then) - value, problem.cost(then) - problem.cost(now)
    per_byte = max(0.0, gained) / spent if spent > 0 else 0.0
    return ShadowPrice(value_per_byte=per_byte, source=source)


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
    known = prices if priced and len(prices) == 1 + len(caps) else ()
    of_cap = known[1:] or (None,) * len(caps)
    limits = []
    if problem.capacity_bytes is not None:
        price = known[0] if known else None
        limits.append(_limit(problem, choice, "capacity", problem.units, price))
    for cap, price in zip(caps, of_cap, strict=True):
        members = np.asarray(cap.units, dtype=np.int64)
        limits.append(_limit(problem, choice, cap.stated()[0], members, price, cap))
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
    cap: GroupCap | None = None,
) -> Limit:
    """Return one limit of bytes; it binds where no unit's next option fits."""
    most = problem.spendable_bytes if cap is None else cap.capacity_bytes
    used = int(problem.costs[units, choice[units]].sum())
    after = np.minimum(choice + 1, problem.last_options)[units]
    steps = problem.costs[units, after] - problem.costs[units, choice[units]]
    larger = steps[steps > 0]
    return Limit(
        name=name,
        used=used,
        most=most if cap is not None else problem.capacity_bytes or 0,
        binds=bool(larger.size) and used + int(larger.min()) > most,
        value_per_mib=None if price is None else price * 2**20,
    )
