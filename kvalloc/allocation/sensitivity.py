"""Shadow prices: what the next byte buys, read off at a choice or from the dual."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.allocation.verification import CheckedSolution, solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import (
    Aggregate,
    AllocationProblem,
    GroupCap,
    Solver,
    Termination,
    bound_at,
    cheapest_reaching,
    dual_bound,
)

WORST_STEP = 0.01
"""How much more value is priced where single options would be a jagged measure."""

MORE = 0.01
"""The same in bytes, as a share of the capacity."""

AGAIN_SECONDS = 1.0
"""A problem that took longer is not solved again for its price."""


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


def price_of(
    problem: AllocationProblem,
    solver: Solver,
    answer: CheckedSolution,
    *,
    time_limit_seconds: float | None = None,
) -> ShadowPrice | None:
    """The price of a byte for an answer: by formula, else by solving again.

    Parameters
    ----------
    problem : AllocationProblem
    solver : Solver
        Which solved it.
    answer : CheckedSolution
    time_limit_seconds : float, optional
        For solving again.

    Returns
    -------
    ShadowPrice or None
        `price_at` the answer if it is optimal. A rule's answer is not where the best one goes on
        from: without side constraints its price is that of the dual, else None.
    """
    if answer.termination is not Termination.OPTIMAL:
        plain = problem.aggregate is Aggregate.SUM and not problem.constraints
        if not plain or answer.multiplier is None:
            return None
        return ShadowPrice(value_per_byte=answer.multiplier, source="dual")
    price = price_at(problem, answer.choice, multiplier=answer.multiplier)
    if price is not None:
        return price
    return _price_by_solving(problem, solver, answer, time_limit_seconds)


def price_at(
    problem: AllocationProblem, choice: IntArray, *, multiplier: float | None = None
) -> ShadowPrice | None:
    """The price of a byte at a choice.

    Parameters
    ----------
    problem : AllocationProblem
        Either sense.
    choice : ndarray of int64, (n_units,)
        What was decided; the price is that of going on from there.
    multiplier : float, optional
        That of the dual bound, where it is known already.

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
    if problem.aggregate is Aggregate.WORST and not problem.constraints:
        return _worst_price(problem, choice)
    if problem.aggregate is not Aggregate.SUM:
        return None
    only_caps = set(map(type, problem.constraints)) <= {GroupCap}
    if only_caps and problem.is_concave:
        return ShadowPrice(value_per_byte=_next_gain(problem, choice), source="the next entry")
    if problem.constraints:
        return None
    if multiplier is None:
        multiplier = dual_bound(problem).multiplier
    return ShadowPrice(value_per_byte=multiplier, source="dual")


def bound_at_choice(problem: AllocationProblem, choice: IntArray) -> float:
    """A bound for one capacity that needs no search: the dual at the price of the choice itself.

    Tight for a concave problem at its optimum; valid for any.
    """
    if problem.aggregate is not Aggregate.SUM or not problem.is_concave:
        return dual_bound(problem).bound
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
    now, then = cheapest_reaching(problem, value), cheapest_reaching(problem, higher)
    if now is None or then is None or higher <= value:
        return ShadowPrice(value_per_byte=0.0, source=source)
    more_bytes = problem.cost(then) - problem.cost(now)
    gained = problem.objective_value(then) - value
    per_byte = gained / more_bytes if more_bytes > 0 else 0.0
    return ShadowPrice(value_per_byte=per_byte, source=source)


def _price_by_solving(
    problem: AllocationProblem,
    solver: Solver,
    answer: CheckedSolution,
    time_limit_seconds: float | None,
) -> ShadowPrice | None:
    """From `MORE` of the bytes, or `WORST_STEP` more value for a target.

    None where that would take long, is not possible, or is not proven optimal.
    """
    if answer.seconds > AGAIN_SECONDS:
        return None
    if problem.capacity_bytes is not None:
        step = max(problem.lattice_bytes, int(MORE * problem.capacity_bytes))
        changed, source = problem.with_capacity(problem.capacity_bytes + step), f"{step:,} bytes"
    else:
        assert problem.target is not None  # a problem has one of both
        changed, source = problem.with_target(problem.target + WORST_STEP), f"{WORST_STEP:g}"
    limit = 10 * AGAIN_SECONDS if time_limit_seconds is None else time_limit_seconds
    try:
        then = solve_problem(changed, solver, time_limit_seconds=limit)
    except (InfeasibleError, SolverError):
        return None
    if then.termination is not Termination.OPTIMAL:
        return None
    more_bytes = step if problem.target is None else then.cost_bytes - answer.cost_bytes
    gained = max(0.0, then.value - answer.value)
    per_byte = gained / more_bytes if more_bytes > 0 else 0.0
    return ShadowPrice(value_per_byte=per_byte, source=f"solved again with {source} more")
