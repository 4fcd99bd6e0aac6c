"""Concave units under nested caps as a minimum-cost flow, solved by networkx's network simplex.

Whole steps flow from the model through the tree of caps to the units. Each piece of a unit's curve
is an arc to the sink that carries its steps and earns its slope. The distances from the source in
the residual graph are the dual: they give a price of the capacity and of each cap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvalloc.problem import AllocationProblem, Solution, bound_at
from kvalloc.problem.constraints import MODEL, cap_tree, caps_of
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

        graph, slope = flow_graph(problem)
        _, flow = nx.network_simplex(graph)
        steps = np.array([sum(flow[f"unit {u}"][SINK].values()) for u in problem.units])
        taken = problem.costs[:, 0] + steps * problem.lattice_bytes
        choice = ((problem.costs <= taken[:, None]) & problem.exists).sum(axis=1) - 1
        prices = _prices(problem, graph, flow, slope)
        return Solution.of(
            problem,
            choice,
            bound=bound_at(problem, *prices),
            prices=prices,
            detail=f"network simplex on {graph.number_of_edges():,} arcs",
            deadline=deadline,
        )


def flow_graph(problem: AllocationProblem) -> tuple[Any, float]:
    """Return the graph of a problem, and the slope of value per step that one unit of cost is.

    Returns
    -------
    networkx.MultiDiGraph
        The tree of caps and units, and what is kept below all units.
    float

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
    caps = caps_of(problem)
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
    return graph, 1.0 / scale


def _prices(
    problem: AllocationProblem, graph: Any, flow: dict[Any, Any], slope: float
) -> tuple[float, ...]:
    """Return the price of a byte of the capacity, then of each cap, from residual distances."""
    import networkx as nx

    residual = nx.DiGraph()
    for before, after, key, arc in graph.edges(keys=True, data=True):
        used = flow[before][after][key]
        ways = [(before, after, arc["weight"])] if used < arc.get("capacity", np.inf) else []
        for one, other, weight in ways + [(after, before, -arc["weight"])] * (used > 0):
            known = residual.get_edge_data(one, other, {"weight": weight})["weight"]
            residual.add_edge(one, other, weight=min(weight, known))
    distance = nx.single_source_bellman_ford_path_length(residual, MODEL)
    per_byte = slope / problem.lattice_bytes
    prices = [-per_byte * distance[SINK], *(0.0 for _ in problem.constraints)]
    for place in (node for node in graph if isinstance(node, int)):
        [outer] = graph.predecessors(place)
        # One that lets nothing in cannot be reached: beyond it nothing is worth its price.
        beyond = distance.get(place, distance.get(outer, 0) + SLOPES)
        prices[1 + place] = max(0.0, per_byte * (beyond - distance.get(outer, beyond)))
    return tuple(max(0.0, price) for price in prices)
