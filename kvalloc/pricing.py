"""Shadow prices: what the next byte buys, read off at a choice or from the dual."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvalloc.dual import bound_at
from kvalloc.problem import Aggregate, AllocationProblem, GroupCap, IntArray

WORST_STEP = 0.01
"""How much more value of the worst unit is priced: single options would be a jagged measure."""


@dataclass(frozen=True, kw_only=True)
class ShadowPrice:
    """What one more byte buys at a choice.

    Attributes
    ----------
    value_per_byte : float
        Value of one byte more, at least 0; its inverse is what one more of value costs.
    source : str
        Where it comes from, in a few words.
    """

    value_per_byte: float
    source: str


def price_at(problem: AllocationProblem, choice: IntArray) -> ShadowPrice | None:
    """The price of a byte at a choice.

    Parameters
    ----------
    problem : AllocationProblem
        Either sense.
    choice : ndarray of int64, (n_units,)
        What was decided; the price is that of going on from there.

    Returns
    -------
    ShadowPrice or None
        For concave units, also under caps, the best gain of a next option that every cap leaves
        room for. For other units without side constraints the multiplier of the Lagrangian dual.
        For the worst unit what `WORST_STEP` more of it takes. None where side constraints leave
        no such formula.

    Examples
    --------
    >>> from kvalloc.testing import tiny_problem
    >>> problem = tiny_problem("concave", seed=0)
    >>> price_at(problem, problem.last_options).value_per_byte
    0.0
    """
    if problem.aggregate is Aggregate.WORST:
        return None if problem.constraints else _worst_price(problem, choice)
    only_caps = all(isinstance(c, GroupCap) for c in problem.constraints)
    if only_caps and problem.is_concave:
        return ShadowPrice(value_per_byte=_next_gain(problem, choice), source="the next entry")
    if problem.constraints:
        return None
    return ShadowPrice(value_per_byte=problem.dual_bound().multiplier, source="dual")


def bound_at_choice(problem: AllocationProblem, choice: IntArray) -> float:
    """A bound for one capacity that needs no search: the dual at the price of the choice itself.

    Tight for a concave problem at its optimum; valid for any.
    """
    if problem.aggregate is Aggregate.WORST or not problem.is_concave:
        return problem.dual_bound().bound
    # Without the caps: the dual leaves side constraints out.
    return bound_at(problem, _next_gain(problem, choice, capped=False))


def _next_gain(problem: AllocationProblem, choice: IntArray, *, capped: bool = True) -> float:
    step = problem.step_bytes
    if step is None:
        return 0.0  # one option each
    units = np.arange(problem.n_units)
    after = np.minimum(choice + 1, problem.last_options)
    gains = problem.weights * (problem.values[units, after] - problem.values[units, choice])
    if capped:
        for cap in problem.constraints:
            assert isinstance(cap, GroupCap)  # the caller has looked
            members = np.asarray(cap.units, dtype=np.int64)
            stored = int(problem.costs[members, choice[members]].sum())
            if stored + step > cap.capacity_bytes:
                gains[members] = 0.0
    return max(0.0, float(gains.max())) / step


def _worst_price(problem: AllocationProblem, choice: IntArray) -> ShadowPrice:
    value = problem.objective_value(choice)
    source = f"{WORST_STEP:g} more"
    higher = min(value + WORST_STEP, problem.max_value)
    now, then = problem.cheapest_reaching(value), problem.cheapest_reaching(higher)
    if now is None or then is None or higher <= value:
        return ShadowPrice(value_per_byte=0.0, source=source)
    more_bytes = problem.cost(then) - problem.cost(now)
    gained = problem.objective_value(then) - value
    per_byte = gained / more_bytes if more_bytes > 0 else 0.0
    return ShadowPrice(value_per_byte=per_byte, source=source)
