"""Concave units under nested caps as a minimum-cost flow, solved by networkx's network simplex.

Whole steps flow from the model through the tree of caps to the units. Each piece of a unit's curve
is an arc to the sink that carries its steps and earns its slope. The least gains of the flow, in
all and under each full cap, are the prices that prove it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.problem import AllocationProblem, Sense, Solution, bound_at
from kvalloc.problem.constraints import MODEL, cap_tree
from kvalloc.solvers._coarse import ByParts

SLOPES = 2**58
"""The largest gain of a unit is mapped to so many whole numbers, which network simplex needs."""

ARCS = 4096
"""Arcs of one program; more options are looked at some at a time."""

SINK = "kept"


class NetworkSimplex(ByParts):
    """Minimum-cost flow by network simplex; of few options at a time, see `ByParts`."""

    name = "flow"
    summary = "network simplex"

    def sizes(self, problem: AllocationProblem) -> tuple[int, int]:
        """Return the options that one program may have, and those of a part."""
        return ARCS, ARCS

    def solve_whole(self, problem: AllocationProblem, deadline: float) -> Solution:
        """Return the optimal flow, rounded down to options, and the prices that prove it."""
        import networkx as nx

        graph = flow_graph(problem)
        _, flow = nx.network_simplex(graph)
        steps = np.array([sum(flow[f"unit {u}"][SINK].values()) for u in problem.units])
        taken = problem.costs[:, 0] + steps * problem.lattice_bytes
        choice = ((problem.costs <= taken[:, None]) & problem.exists).sum(axis=1) - 1
        prices = tree_prices(problem, choice)
        return Solution.of(
            problem,
            choice,
            bound=bound_at(problem, *prices),
            prices=prices,
            detail=f"network simplex on {graph.number_of_edges():,} arcs",
            deadline=deadline,
        )


def flow_graph(problem: AllocationProblem) -> Any:
    """Return the graph of a problem.

    Returns
    -------
    networkx.MultiDiGraph
        The tree of caps and units, and what is kept below all units.

    Raises
    ------
    SolverError
        If the caps are no tree.
    """
    import networkx as nx

    grain = problem.lattice_bytes
    steps = (problem.spendable_bytes - problem.min_cost_bytes) // grain
    graph = nx.MultiDiGraph()
    graph.add_node(MODEL, demand=-steps)
    graph.add_node(SINK, demand=steps)
    graph.add_edge(MODEL, SINK, weight=0)
    above: dict[int, int | str] = dict.fromkeys(range(problem.n_units), MODEL)
    caps = problem.caps
    for outer, place in cap_tree(caps).edges:
        cap = caps[place]
        room = cap.capacity_bytes - int(problem.costs[list(cap.units), 0].sum())
        graph.add_edge(outer, place, weight=0, capacity=room // grain)
        above |= dict.fromkeys(cap.units, place)
    scale = SLOPES / (problem.largest_gain or 1.0)
    for unit, last in enumerate(problem.last_options.tolist()):
        node = f"unit {unit}"
        graph.add_edge(above[unit], node, weight=0)
        widths = np.diff(problem.costs[unit, : last + 1]) // grain
        gains = problem.weights[unit] * np.diff(problem.values[unit, : last + 1])
        weights = np.rint(-scale * gains / widths).astype(np.int64).tolist()
        for width, weight in zip(widths.tolist(), weights, strict=True):
            graph.add_edge(node, SINK, capacity=width, weight=weight)
    return graph


def tree_prices(problem: AllocationProblem, choice: IntArray) -> tuple[float, ...]:
    """Return the price of a byte of the capacity, then of each cap, that prove a choice.

    The price of a byte is the least gain taken, of all units and of those under each full cap. The
    part above what the next larger cap asks is the price of the cap itself.
    """
    caps = problem.caps
    full = problem.cost(choice) + problem.lattice_bytes > problem.spendable_bytes
    scarce = problem.sense is Sense.MIN_COST or (full and np.any(choice < problem.last_options))
    units = np.full(problem.n_units, _price(problem, problem.units, choice) if scarce else 0.0)
    prices = [float(units[0]), *(0.0 for _ in caps)]
    for _, place in cap_tree(caps).edges:  # outermost first
        members = np.asarray(caps[place].units, dtype=np.int64)
        used = int(problem.costs[members, choice[members]].sum())
        if used + problem.lattice_bytes > caps[place].capacity_bytes:
            outer = float(units[members[0]])
            units[members] = max(outer, _price(problem, members, choice[members]))
            prices[1 + place] = float(units[members[0]]) - outer
    return tuple(prices)


def _price(problem: AllocationProblem, units: IntArray, choice: IntArray) -> float:
    """Return the least gain of a byte taken at a choice, else the largest one left."""
    taken = choice > 0
    before = choice - taken
    after = choice if taken.any() else np.minimum(choice + 1, problem.last_options[units])
    larger = after > before
    gains = problem.gains(before, after, units)[larger]
    bytes_ = (problem.costs[units, after] - problem.costs[units, before])[larger]
    each = np.maximum(gains / bytes_, 0.0)
    return float(each.min() if taken.any() else each.max(initial=0.0))
