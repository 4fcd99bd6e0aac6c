"""Exact dynamic programming, pruned by the Lagrangian bound."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError, option
from kvalloc.problem import AllocationProblem, Sense
from kvalloc.problem.bounds import NOISE
from kvalloc.problem.solver import Solution, Solver, deadline_after
from kvalloc.solvers._prices import Prices, best_known, best_prices, rule_choices

Options = np.ndarray[Any, np.dtype[Any]]
"""Options of states, in the smallest type that holds them."""


class DP(Solver):
    """Exact multiple-choice knapsack by dynamic programming, one stage a unit.

    A state is the cost of the units so far, in grains (``lattice_bytes``). Its label is their
    smallest loss against best responses at the best price of a byte, which orders choices of one
    cost as value does: ``f_u(s) = min over options k of f_{u-1}(s - c_uk) + loss_uk``.

    A choice's loss and the price of its unspent bytes are its distance from the dual bound. So a
    state beyond the known choice's distance is dropped. For a target the cheapest state that meets
    it is read.

    Parameters
    ----------
    memory_bytes : int
        Largest table; problems that could need more are refused.

    Raises
    ------
    InputError
        If ``memory_bytes`` is below 1.

    References
    ----------
    Dudzinski, Walukiewicz: Exact methods for the knapsack problem and its generalizations (1987).
    Kellerer, Pferschy, Pisinger: Knapsack Problems (2004), sections 11.5 and 11.6.
    """

    name: ClassVar[str] = "dp"
    summary: ClassVar[str] = "dynamic programming over pages; exact for any values and costs"
    reference: ClassVar[str] = "Kellerer et al. 2004, sec. 11.5; Dudzinski and Walukiewicz 1987"
    takes_bits: ClassVar[bool] = True

    def __init__(self, memory_bytes: int = 2**30) -> None:
        if memory_bytes < 1:
            raise InputError(f"dp: a memory of {memory_bytes} bytes holds no table; give more")
        self.memory_bytes = memory_bytes

    def refusal(self, problem: AllocationProblem) -> str:
        """Refuse a table that could be too large."""
        last = problem.max_cost_bytes
        if problem.sense is Sense.MAX_VALUE and problem.capacity_bytes is not None:
            last = min(problem.capacity_bytes, last)
        states = max(0, last - problem.min_cost_bytes) // problem.lattice_bytes + 1
        needed = problem.n_units * states * _option_type(problem.n_options).itemsize
        if needed > self.memory_bytes:
            return (
                f"dp could need a table of {needed:,} bytes and may use {self.memory_bytes:,}; use "
                f"larger pages ({option('page')}), or lagrangian, or ilp"
            )
        return ""

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Return the optimum; when time runs out, a repaired choice and the dual bound."""
        deadline = deadline_after(time_limit_seconds)
        prices = best_prices(problem, deadline)
        known = best_known(problem, prices, deadline, *rule_choices(problem))
        if known is None:
            known = np.argmax(problem.worth, axis=1)
        room = prices.room(problem.objective(known))
        best, states = (known, 0) if room < 0 else _search(prices, known, room, deadline)
        choice = known if best is None else best
        bound = prices.bound if best is None else problem.objective(choice)
        detail = f"{states:,} states of {problem.lattice_bytes:,} bytes"
        return Solution.of(problem, choice, bound=bound, detail=detail, deadline=deadline)


@dataclass(frozen=True, kw_only=True)
class _Stage:
    unit: int
    first: int
    options: Options


def _option_type(n_options: int) -> np.dtype[Any]:
    return np.dtype(np.min_scalar_type(max(1, n_options - 1)))


def _search(
    prices: Prices, known: IntArray, room: float, deadline: float
) -> tuple[IntArray | None, int]:
    """Return the best choice, None if time ran out, and the number of states."""
    problem, kept = prices.problem, prices.worth_keeping(room)
    steps = (problem.costs - problem.costs[:, :1]) // problem.lattice_bytes
    decided = np.where(kept.sum(axis=1) == 1, np.argmax(kept, axis=1), -1)
    fixed = np.flatnonzero(decided >= 0)
    offset = int(steps[fixed, decided[fixed]].sum())
    lost = float(prices.loss[fixed, decided[fixed]].sum())
    # Grains above the floors that a choice worth looking at can cost.
    highest_cost = problem.spendable_bytes if problem.target is None else problem.cost(known)
    last = (highest_cost - problem.min_cost_bytes) // problem.lattice_bytes
    labels, first, stages, visited = np.array([lost]), offset, [], 1
    for unit in np.flatnonzero(decided < 0).tolist():
        if time.monotonic() > deadline:
            return None, visited
        columns = np.flatnonzero(kept[unit])
        labels, options = _advance(labels, steps[unit], prices.loss[unit], columns)
        first += int(steps[unit, columns[0]])
        labels, options, first = _trimmed(labels, options, first, last, room)
        if labels.size == 0:
            return known, visited  # nothing is left that could be better
        stages.append(_Stage(unit=unit, first=first, options=options))
        visited += labels.size
    choice = np.where(decided >= 0, decided, 0).astype(np.int64)
    best = _read(prices, labels, first, stages, choice, steps)
    if best is None or problem.is_better(problem.objective(known), problem.objective(best)):
        return known, visited
    return best, visited


def _advance(
    labels: FloatArray, steps: IntArray, loss: FloatArray, columns: IntArray
) -> tuple[FloatArray, Options]:
    """Return labels and columns of all states after one stage.

    ``labels``, (n_states,), are inf for no state; ``steps`` are grains above the floor.
    """
    shifts = (steps[columns] - steps[columns[0]]).tolist()
    size = labels.size + shifts[-1]
    after = np.full(size, np.inf)
    taken = np.zeros(size, dtype=_option_type(steps.size))
    for column, shift, cost in zip(columns.tolist(), shifts, loss[columns].tolist(), strict=True):
        window = slice(shift, shift + labels.size)
        reached = labels + cost
        better = reached < after[window]
        np.copyto(after[window], reached, where=better)
        np.copyto(taken[window], column, where=better)
    return after, taken


def _trimmed(
    labels: FloatArray, options: Options, first: int, last: int, room: float
) -> tuple[FloatArray, Options, int]:
    """Drop states beyond capacity or room, and empty ones at both ends."""
    end = max(0, min(labels.size, last - first + 1))
    labels = np.where(labels[:end] <= room + NOISE, labels[:end], np.inf)
    alive = np.flatnonzero(np.isfinite(labels))
    if alive.size == 0:
        return labels[:0], options[:0], first
    window = slice(int(alive[0]), int(alive[-1]) + 1)
    return labels[window], options[window], first + int(alive[0])


def _read(
    prices: Prices,
    labels: FloatArray,
    first: int,
    stages: list[_Stage],
    fixed: IntArray,
    steps: IntArray,
) -> IntArray | None:
    """Return the best last state's choice; ``fixed`` has options of units without a stage."""
    # The value is the best responses' net value, less the loss, plus the price of the bytes spent.
    problem = prices.problem
    net = problem.worth - prices.per_byte * (problem.costs - problem.costs[:, :1])
    spent = problem.lattice_bytes * (first + np.arange(labels.size, dtype=np.float64))
    values = math.fsum(net.max(axis=1)) - labels + prices.per_byte * spent
    order = np.array([np.argmax(values)])
    if problem.target is not None:  # the choice itself decides
        slack = 1e-11 * max(1.0, abs(problem.target))
        order = np.flatnonzero(values >= problem.lowest_accepted_value - slack)
    choices = (_traced(stages, fixed, first + state, steps) for state in order.tolist())
    return next((choice for choice in choices if problem.satisfies(choice)), None)


def _traced(stages: list[_Stage], fixed: IntArray, state: int, steps: IntArray) -> IntArray:
    choice = fixed.copy()
    for stage in reversed(stages):
        column = int(stage.options[state - stage.first])
        choice[stage.unit] = column
        state -= int(steps[stage.unit, column])
    return choice
