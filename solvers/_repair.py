"""From a pick at some price to a good feasible one: reach the target, then move and exchange."""

from __future__ import annotations

import contextlib
import time
from typing import ClassVar

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import AllocationProblem, Solver
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._hulls import hull_greedy
from kvalloc.solvers._prices import Prices
from kvalloc.solvers._rules import Rule
from kvalloc.solvers.proportional import Proportional
from kvalloc.solvers.uniform import Uniform

ROUNDS = 2000
"""Limit on the improvements of one pick; a safety net, dozens are common."""

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


def rule_choices(problem: AllocationProblem, *rules: Solver) -> list[IntArray]:
    """Return what simple rules choose, where that satisfies everything; equal ones by default.

    Parameters
    ----------
    problem : AllocationProblem
    *rules : Solver
    """
    choices = []
    for rule in rules or (Uniform() if problem.bits is None else SameBytes(),):
        if rule.can_solve(problem) is True:
            with contextlib.suppress(InfeasibleError, SolverError):
                choices.append(rule.solve(problem).choice)
    return choices


def rule_picks(choices: Choices) -> list[IntArray]:
    """Return equal and proportional budgets as picks, where they satisfy everything."""
    picks = rule_choices(choices.problem) + rule_choices(choices.problem, Proportional())
    return [picked for picked in picks if choices.satisfies(picked)]


def best_of(choices: Choices, *picks: IntArray) -> IntArray | None:
    """Return the best of some picks; None where none is within capacity, target and caps."""
    known = [picked for picked in picks if choices.satisfies(picked)]
    return max(known, key=lambda picked: _merit(choices, picked), default=None)


def best_known(
    choices: Choices, prices: Prices, deadline: float, *others: IntArray
) -> IntArray | None:
    """Return the best pick that repair reaches within capacity, target and caps.

    Parameters
    ----------
    choices : Choices
    prices : Prices
        Each of its starts is repaired, and what the hull greedy picks.
    deadline : float
        ``time.monotonic()`` at which to stop improving.
    *others : ndarray of int64, (n_rows,)
        Other picks that are known.

    Returns
    -------
    ndarray of int64, (n_rows,), or None
        None when no pick meets the target within the caps.
    """
    starts = (*prices.starts, hull_greedy(choices))
    repaired = (_repaired(choices, prices, start, deadline) for start in starts)
    return best_of(choices, *repaired, *others)


def _repaired(choices: Choices, prices: Prices, start: IntArray, deadline: float) -> IntArray:
    """Return the pick that is reached from a start, which is better where it satisfies all."""
    picked = start
    for _ in range(ROUNDS):
        if time.monotonic() > deadline or not choices.satisfies(picked):
            break
        room = prices.room(choices, choices.objective(picked))
        improved = None if room < 0 else _improved(choices, prices, picked, room)
        if improved is None:
            break
        picked = improved
    return picked


def _improved(choices: Choices, prices: Prices, picked: IntArray, room: float) -> IntArray | None:
    """Return the pick after the best change of one row, else of two; None where none is better.

    ``room`` is what the options of a better pick lose at most.
    """
    kept = prices.worth_keeping(room) & choices.exists
    kept[choices.index, picked] = False
    rows, columns = np.nonzero(kept)
    lost = prices.loss[rows, columns] - prices.loss[rows, picked[rows]]
    near = np.argsort(lost, kind="stable")[:NEAR]
    rows, columns = rows[near], columns[near]
    gained, bytes_ = _differences(choices, picked, rows, columns)
    pairs = np.stack(np.triu_indices(min(rows.size, PAIRED), k=1), axis=1)
    pairs = pairs[rows[pairs[:, 0]] != rows[pairs[:, 1]]]
    for moves in (np.arange(rows.size)[:, None], pairs):
        scores = _scores(choices, picked, gained[moves].sum(axis=1), bytes_[moves].sum(axis=1))
        if choices.caps and moves is not pairs:
            scores[~_within_caps(choices, picked)[rows, columns]] = -np.inf
        for best in np.argsort(-scores, kind="stable")[:TRIED].tolist():
            if not np.isfinite(scores[best]):
                break
            changed = picked.copy()
            changed[rows[moves[best]]] = columns[moves[best]]
            if choices.satisfies(changed) and _merit(choices, changed) > _merit(choices, picked):
                return changed
    return None


def _merit(choices: Choices, picked: IntArray) -> tuple[float, float]:
    """Return what is optimised, higher is better; of equal costs the higher value."""
    value = choices.value(picked)
    return (-float(choices.cost(picked)), value) if choices.minimise else (value, 0.0)


def _differences(
    choices: Choices, picked: IntArray, rows: IntArray, columns: IntArray
) -> tuple[FloatArray, IntArray]:
    """Return the worth and the bytes that options add, ``(n,)`` each."""
    worth, now = choices.worth, picked[rows]
    bytes_ = choices.costs[rows, columns] - choices.costs[rows, now]
    return worth[rows, columns] - worth[rows, now], bytes_


def _scores(choices: Choices, picked: IntArray, gained: FloatArray, bytes_: IntArray) -> FloatArray:
    """Return how good each of some changes is; -inf where it does not improve the pick."""
    values = choices.worth[choices.index, picked].sum() + gained
    now = choices.value(picked)
    margin = MARGIN * max(1.0, abs(now))
    if not choices.minimise:
        able = (bytes_ <= choices.budget_bytes - choices.cost(picked)) & (values > now + margin)
        return np.where(able, values, -np.inf)
    able = (bytes_ < 0) | ((bytes_ == 0) & (values > now + margin))
    if choices.target is not None:
        able &= values >= choices.target - margin
    # Bytes first; among equal ones the change that leaves most to give back.
    spread = float(np.ptp(values)) if values.size else 0.0
    return np.where(
        able, -bytes_ + 0.5 * (values - values.min(initial=0.0)) / (spread or 1.0), -np.inf
    )


def _within_caps(choices: Choices, picked: IntArray) -> BoolArray:
    """Return the options that no cap forbids when one row changes, ``(n_rows, n_columns)``."""
    able: BoolArray = np.ones(choices.worth.shape, dtype=np.bool_)
    for cap in choices.caps:
        spare = cap.capacity_bytes - cap.load(picked)
        now = cap.costs[np.arange(cap.rows.size), picked[cap.rows]]
        able[cap.rows] &= cap.costs - now[:, None] <= spare
    return able
