"""Which unit sits on which tensor-parallel rank: the largest first, to the emptiest rank."""

from __future__ import annotations

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.problem import AllocationProblem

EXCHANGES = 200
"""Exchanges tried after the first placing; a few are enough."""


def place(problem: AllocationProblem, choice: IntArray, n_ranks: int) -> IntArray:
    """Spread the units of every layer evenly over the ranks, the bytes as evenly as it finds.

    Parameters
    ----------
    problem : AllocationProblem
    choice : ndarray of int64, (n_units,)
        Option of each unit.
    n_ranks : int
        Number of ranks, at least 1.

    Returns
    -------
    ndarray of int64, (n_units,)
        Rank of each unit; no rank holds more than ``ceil(units of a layer / n_ranks)`` of a
        layer. That is what `kvalloc.problem.RankBalance` asks for, apart from its tolerance.
    """
    costs = problem.costs[np.arange(problem.n_units), choice]
    ranks = np.zeros(problem.n_units, dtype=np.int64)
    loads = np.zeros(n_ranks, dtype=np.int64)
    layers = [np.flatnonzero(problem.layers == layer) for layer in np.unique(problem.layers)]
    # Layers whose units differ most first: equal ones cannot even anything out.
    layers.sort(key=lambda units: -int(np.ptp(costs[units])))
    for units in layers:
        most = -(-units.size // n_ranks)
        room = np.full(n_ranks, most)
        for unit in units[np.argsort(-costs[units], kind="stable")].tolist():
            rank = int(np.argmin(np.where(room > 0, loads, np.iinfo(np.int64).max)))
            ranks[unit] = rank
            loads[rank] += costs[unit]
            room[rank] -= 1
    for _ in range(EXCHANGES):
        if not _exchange(problem, costs, ranks, loads):
            break
    return ranks


def _exchange(
    problem: AllocationProblem, costs: IntArray, ranks: IntArray, loads: IntArray
) -> bool:
    """Swap two units of a layer between the fullest and the emptiest rank, if that evens out."""
    full, empty = int(np.argmax(loads)), int(np.argmin(loads))
    apart = int(loads[full] - loads[empty])
    heavy, light = np.flatnonzero(ranks == full), np.flatnonzero(ranks == empty)
    if apart <= 0 or heavy.size == 0 or light.size == 0:
        return False
    moved = costs[heavy][:, None] - costs[light][None, :]
    useful = (problem.layers[heavy][:, None] == problem.layers[light][None, :]) & (moved > 0)
    useful &= moved < apart
    if not useful.any():
        return False
    # Moving half of what they are apart makes both equal.
    off = np.where(useful, np.abs(2 * moved - apart), np.iinfo(np.int64).max)
    first, second = divmod(int(np.argmin(off)), light.size)
    shift = int(moved[first, second])
    ranks[heavy[first]], ranks[light[second]] = empty, full
    loads[full] -= shift
    loads[empty] += shift
    return True
