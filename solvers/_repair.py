"""From a choice at some price to a good feasible one: change one unit, or exchange two."""

from __future__ import annotations

import contextlib
import time
from typing import ClassVar

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import AllocationProblem, Solver
from kvalloc.solvers._hulls import hull_greedy
from kvalloc.solvers._prices import Prices
from kvalloc.solvers._rules import Rule
from kvalloc.solvers.proportional import Proportional
from kvalloc.solvers.uniform import Uniform

ROUNDS = 2000
"""Limit on the improvements of one choice; a safety net, dozens are common."""

NEAR = 4096
"""Options that a change may lead to: those that lose least at the prices."""

PAIRED = 128
"""Options that are exchanged in pairs: those that lose least at the prices."""

TRIED = 64
"""Best changes of a round that are checked against capacity, target and caps."""

MARGIN = 1e-13
"""Smaller gains, relative to the larger of 1 and the sum, may come from the order of the sum."""


class SameBytes(Uniform):
    """As many bytes for every unit, which is no less than the same entries at the same width."""

    takes_bits: ClassVar[bool] = True

    def rule(self, problem: AllocationProblem, deadline: float) -> tuple[Rule, int]:
        """Return the choices by their bytes."""
        costs = np.unique(problem.costs[problem.exists])
        rows = list(zip(problem.costs, problem.option_counts.tolist(), strict=True))

        def same(place: int) -> IntArray:
            within = [row[:n].searchsorted(costs[place], side="right") for row, n in rows]
            return np.maximum(np.array(within, dtype=np.int64) - 1, 0)

        return same, costs.size - 1


def equal_choices(problem: AllocationProblem) -> list[IntArray]:
    """Return equal budgets (equal bytes if bits are chosen, too), if they satisfy everything."""
    return _choices_of(problem, Uniform() if problem.bits is None else SameBytes())


def rule_choices(problem: AllocationProblem) -> list[IntArray]:
    """Return equal and proportional budgets, if they satisfy everything."""
    return [*equal_choices(problem), *_choices_of(problem, Proportional())]


def _choices_of(problem: AllocationProblem, rule: Solver) -> list[IntArray]:
    if rule.can_solve(problem) is True:
        with contextlib.suppress(InfeasibleError, SolverError):
            return [rule.solve(problem).choice]
    return []


def best_of(problem: AllocationProblem, *choices: IntArray) -> IntArray | None:
    """Return the best of some choices; None if none satisfies everything."""
    known = [choice for choice in choices if problem.satisfies(choice)]
    return max(known, key=lambda choice: _merit(problem, choice), default=None)


def best_known(
    problem: AllocationProblem, prices: Prices, deadline: float, *known: IntArray
) -> IntArray | None:
    """Return the best choice that repair reaches, or a known one if that is better.

    Parameters
    ----------
    problem : AllocationProblem
    prices : Prices
        Their start is repaired, and what the hull greedy picks.
    deadline : float
        ``time.monotonic()`` at which to stop improving.
    *known : ndarray of int64, (n_units,)
        Choices that are known already.

    Returns
    -------
    ndarray of int64, (n_units,), or None
        None if no choice satisfies everything.
    """
    starts = (prices.start, hull_greedy(problem))
    repaired = (_repaired(problem, prices, start, deadline) for start in starts)
    return best_of(problem, *repaired, *known)


def _repaired(
    problem: AllocationProblem, prices: Prices, start: IntArray, deadline: float
) -> IntArray:
    """Return the choice that is reached from a start, which is better if it satisfies all."""
    choice = start
    for _ in range(ROUNDS):
        if time.monotonic() > deadline or not problem.satisfies(choice):
            break
        room = prices.room(problem.objective(choice))
        improved = None if room < 0 else _improved(problem, prices, choice, room)
        if improved is None:
            break
        choice = improved
    return choice


def _improved(
    problem: AllocationProblem, prices: Prices, choice: IntArray, room: float
) -> IntArray | None:
    """Return the choice after the best change of one unit, else of two; None if none is better.

    ``room`` is the largest loss of an option of a better choice.
    """
    kept = prices.worth_keeping(room)
    kept[problem.units, choice] = False
    units, options = np.nonzero(kept)
    lost = prices.loss[units, options] - prices.loss[units, choice[units]]
    near = np.argsort(lost, kind="stable")[:NEAR]
    units, options = units[near], options[near]
    gained = problem.gains(choice[units], options, units)
    bytes_ = problem.costs[units, options] - problem.costs[units, choice[units]]
    pairs = np.stack(np.triu_indices(min(units.size, PAIRED), k=1), axis=1)
    pairs = pairs[units[pairs[:, 0]] != units[pairs[:, 1]]]
    for moves in (np.arange(units.size)[:, None], pairs):
        scores = _scores(problem, choice, gained[moves].sum(axis=1), bytes_[moves].sum(axis=1))
        if moves is not pairs:
            for cap in problem.caps:
                too_large = bytes_ > cap.capacity_bytes - problem.cost(choice, cap.units)
                scores[too_large & np.isin(units, cap.units)] = -np.inf
        for best in np.argsort(-scores, kind="stable")[:TRIED].tolist():
            if not np.isfinite(scores[best]):
                break
            changed = choice.copy()
            changed[units[moves[best]]] = options[moves[best]]
            if problem.satisfies(changed) and _merit(problem, changed) > _merit(problem, choice):
                return changed
    return None


def _merit(problem: AllocationProblem, choice: IntArray) -> tuple[float, float]:
    """Return what is optimised, higher is better; of equal costs the higher value."""
    value = problem.objective_value(choice)
    return (value, 0.0) if problem.target is None else (-float(problem.cost(choice)), value)


def _scores(
    problem: AllocationProblem, choice: IntArray, gained: FloatArray, bytes_: IntArray
) -> FloatArray:
    """Return how good each of some changes is; -inf if it does not improve the choice."""
    now = problem.objective_value(choice)
    values, margin = now + gained, MARGIN * max(1.0, abs(now))
    if problem.target is None:
        able = (bytes_ <= problem.spendable_bytes - problem.cost(choice)) & (gained > margin)
        return np.where(able, values, -np.inf)
    able = (bytes_ < 0) | ((bytes_ == 0) & (gained > margin))
    able &= values >= problem.lowest_accepted_value - margin
    # Bytes first; among equal ones the change that leaves most to give back.
    spread = float(np.ptp(values)) if values.size else 0.0
    return np.where(
        able, -bytes_ + 0.5 * (values - values.min(initial=0.0)) / (spread or 1.0), -np.inf
    )
