"""Placing units whose budgets are decided on tensor-parallel ranks."""

from __future__ import annotations

import time

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.problem import AllocationProblem, RankBalance
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._ilp_program import Limits, Program, Row

TOTALS = 10_000
"""Totals looked at for one that ranks can share."""

PLACEMENT_SECONDS = 2.0
"""Longest search for a placement of decided budgets."""

SWEEPS = 50
"""Most passes of exchanges over all layers."""


def even_total(choices: Choices, balance: RankBalance, start: int, *, up: bool) -> int | None:
    """The first total cost that ranks can share, as far as arithmetic tells.

    Loads are multiples of what divides all costs: of 7 pages on 2 ranks one holds at least 4,
    which is 14% above the mean.

    Parameters
    ----------
    choices : Choices
    balance : RankBalance
    start : int
        Bytes; the cost of some pick, or above it.
    up : bool
        Look above it rather than below.

    Returns
    -------
    int or None
        Bytes; None when no pick has such a cost.
    """
    problem = choices.problem
    there = np.arange(problem.n_options)[None, :] < problem.option_counts[:, None]
    unit = max(1, int(np.gcd.reduce(problem.costs[there])))
    most = int(np.where(choices.exists, choices.costs, 0).max(axis=1).sum())
    steps = (start - choices.floor_bytes) // choices.grain
    for step in range(TOTALS):
        total = choices.floor_bytes + (steps + (step if up else -step)) * choices.grain
        if not choices.floor_bytes <= total <= most:
            return None
        if balance.largest_allowed(total) // unit * unit * balance.n_ranks >= total:
            return total
    return start


def spread(problem: AllocationProblem, choice: IntArray, balance: RankBalance) -> IntArray:
    """A placement with loads as even as exchanges make them.

    The largest unit of each layer goes to the least loaded rank that the layer has room on
    (largest processing time first), then units of a layer trade places while that evens out two
    ranks.

    Parameters
    ----------
    problem : AllocationProblem
    choice : ndarray of int64, (n_units,)
    balance : RankBalance

    Returns
    -------
    ndarray of int64, (n_units,)
        Rank of each unit; every layer is spread, the balance may still be missed.
    """
    costs = problem.costs[np.arange(problem.n_units), choice]
    layers = [np.flatnonzero(problem.layers == layer) for layer in np.unique(problem.layers)]
    ranks = np.zeros(problem.n_units, dtype=np.int64)
    loads = np.zeros(balance.n_ranks, dtype=np.int64)
    for units in sorted(layers, key=lambda units: -int(costs[units].max())):
        most = -(-units.size // balance.n_ranks)
        room = np.full(balance.n_ranks, most)
        for unit in units[np.argsort(-costs[units], kind="stable")].tolist():
            rank = int(np.argmin(np.where(room > 0, loads, np.iinfo(np.int64).max)))
            ranks[unit] = rank
            room[rank] -= 1
            loads[rank] += costs[unit]
    for _ in range(SWEEPS):
        if not any(_trade(units, costs, ranks, loads) for units in layers):
            break
    return ranks


def _trade(units: IntArray, costs: IntArray, ranks: IntArray, loads: IntArray) -> bool:
    """Exchange units of a layer, or move one to a free place, wherever that evens out two ranks."""
    most = -(-units.size // loads.size)
    changed = False
    for first in units.tolist():
        for second in units.tolist():
            a, b = int(ranks[first]), int(ranks[second])
            shift = int(costs[first] - costs[second])
            if 0 < shift < int(loads[a] - loads[b]):
                ranks[first], ranks[second] = b, a
                loads[a] -= shift
                loads[b] += shift
                changed = True
        held = np.bincount(ranks[units], minlength=loads.size)
        rank, cost = int(ranks[first]), int(costs[first])
        free = int(np.argmin(np.where(held < most, loads, np.iinfo(np.int64).max)))
        if held[free] < most and 0 < cost < int(loads[rank] - loads[free]):
            ranks[first] = free
            loads[rank] -= cost
            loads[free] += cost
            changed = True
    return changed


def placement_program(
    problem: AllocationProblem, choice: IntArray, balance: RankBalance
) -> Program:
    """The placement of decided budgets as a program: any solution is a balanced placement.

    Parameters
    ----------
    problem : AllocationProblem
    choice : ndarray of int64, (n_units,)
    balance : RankBalance

    Returns
    -------
    Program
        Variable ``unit * n_ranks + rank`` says that the unit sits on the rank.
    """
    n_ranks = balance.n_ranks
    costs = problem.costs[np.arange(problem.n_units), choice]
    most = balance.largest_allowed(int(costs.sum()))
    variables = np.arange(problem.n_units * n_ranks).reshape(problem.n_units, n_ranks)
    rows = [Row(variables=variables[:, r], coefficients=costs, upper=most) for r in range(n_ranks)]
    for layer in np.unique(problem.layers):
        units = np.flatnonzero(problem.layers == layer)
        per_rank = -(-units.size // n_ranks)
        rows += [
            Row(variables=variables[units, r], coefficients=np.ones_like(units), upper=per_rank)
            for r in range(n_ranks)
        ]
    return Program(
        n_variables=variables.size,
        one_of=list(variables),
        implied=[],
        rows=rows,
        objective=np.zeros(variables.size, dtype=np.int64),
        maximise=False,
        hint=None,
    )


def limits_for_placement(seconds: float, workers: int) -> Limits:
    """Little time: where there is no placement, that is often hard to show and not needed."""
    until = time.monotonic() + min(0.2 * seconds, PLACEMENT_SECONDS)
    return Limits(deadline=until, absolute_gap=0.0, workers=workers)
