"""Layers that share entries: groups as units of a problem, and which adjacent layers to group.

A group of layers that keep the same entries is one unit: its value is what its layers retain
together, its cost what they cost together (`grouped`).

Which layers share is a longest path at every price of a byte (`choose_groups`). With a price on
bytes each run of layers, alone or sharing, is worth what its best budgets net, on its own. Cutting
the layers into at most N runs of the largest total is then a longest path with at most N edges
over the cut points (a directed acyclic graph), which dynamic programming finds exactly; and what
the best cut nets bounds every cut, whatever its budgets (Lagrangian relaxation of the bytes alone).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.rounding import round_up_to_grain
from kvalloc.allocation.curves import RequestCurves
from kvalloc.errors import InfeasibleError, InputError, command, option
from kvalloc.formats.sharing_groups import Groups, groups_fault, segments_of
from kvalloc.problem import AllocationProblem, Sense, dual_bound

ROUNDS = 100
"""Halvings of the price interval."""

CLOSE = 1e-11
"""Smallest price interval, as a share of the highest price."""

TRIED_GROUPINGS = 8
"""Groupings whose own bounds are compared: those that were best at the last prices."""


def grouped(problem: AllocationProblem, curves: RequestCurves) -> AllocationProblem:
    """Return the problem in which the layers of each group keep the same entries.

    A group is one unit (at head level, one for each KV head). Its value is what its layers retain
    together, its cost what they cost together, and it stands where its first layer stood.

    Parameters
    ----------
    problem : AllocationProblem
        Of single layers, without side constraints, with the same options for every unit.
    curves : RequestCurves
        Those of the problem, with the groups' joint curves; its request names the groups.

    Returns
    -------
    AllocationProblem

    Raises
    ------
    InputError
        If there can be no such groups, they were not measured, or the problem is not of that kind.

    References
    ----------
    MPCache, Sec. 4.4.
    """
    scores, groups = curves.scores, curves.request.groups
    _check_groups(problem, groups, scores.shape.full_layers)
    segments = segments_of(scores.shape.full_layers, groups)
    units = [np.flatnonzero(problem.layers == segment[0]) for segment in segments]
    kept = np.concatenate(units)
    lengths = np.concatenate(
        [np.full(rows.size, len(segment)) for rows, segment in zip(units, segments, strict=True)]
    )
    tokens, n_layers = problem.tokens[0], len(scores.shape.full_layers)

    values, weights = problem.values[kept], problem.weights[kept]
    for group in groups:
        values[problem.layers[kept] == group[0]] = curves.group_values(group, tokens)
    # Joint curves are shares of the layers' mass; a head's weight is its own share of one.
    joined = [layer for group in groups for layer in group]
    weights[np.isin(problem.layers[kept], joined)] = 1.0 / n_layers
    return problem.replace(
        tokens=np.broadcast_to(tokens, values.shape),
        values=values,
        costs=lengths[:, None] * problem.costs[0],
        option_counts=problem.option_counts[kept],
        weights=weights,
        layers=problem.layers[kept],
        heads=problem.heads[kept],
    )


def _check_groups(problem: AllocationProblem, groups: Groups, full_layers: tuple[int, ...]) -> None:
    """Raise an `InputError` for groups of layers that a problem cannot have."""
    if (fault := groups_fault(groups, full_layers)) is not None:
        raise InputError(f"layers cannot share entries like that: {fault}; name other layers")
    if problem.constraints or np.any(problem.costs != problem.costs[:1]):
        raise InputError(
            "layers that share entries cannot be combined with caps, few distinct budgets or "
            "options that differ from unit to unit; leave out one of them"
        )


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Groups of layers, and a bound over all groupings.

    Attributes
    ----------
    groups : tuple of tuple of int
        Layers that share; all others stand alone.
    bound : float
        No budgets of any grouping are better: an upper bound on the value, or a lower one on the
        cost.
    """

    groups: Groups
    bound: float


def choose_groups(curves: RequestCurves, problem: AllocationProblem, max_groups: int) -> Grouping:
    """Choose which adjacent layers share entries, in at most ``max_groups`` groups.

    Parameters
    ----------
    curves : RequestCurves
        With joint curves.
    problem : AllocationProblem
        Of single layers, with the target.
    max_groups : int
        Groups of full-attention layers in all; a layer alone counts as one.

    Returns
    -------
    Grouping
        The grouping with the best bound of its own among those that are best near the price at
        which the bytes (the target) are met, and the bound over all groupings.

    Raises
    ------
    InputError
        If no joint curves were measured.
    InfeasibleError
        If so few groups are not possible, or no grouping meets the target.
    """
    _check_groups(problem, (), curves.scores.shape.full_layers)
    problem.check_feasible()
    search = _Search(curves, problem, max_groups)
    bound = search.run()
    tried = search.groupings[-TRIED_GROUPINGS:]
    requests = (replace(curves.request, share_groups=groups) for groups in tried)
    variants = (grouped(problem, replace(curves, request=request)) for request in requests)
    bounds = [dual_bound(variant).bound for variant in variants]
    best = max if problem.sense is Sense.MAX_VALUE else min
    return Grouping(groups=tried[bounds.index(best(bounds))], bound=bound)


class _Search:
    """Best cuts of the layers at prices of a byte."""

    def __init__(self, curves: RequestCurves, problem: AllocationProblem, max_groups: int) -> None:
        scores = curves.scores
        if scores.shared_runs is None:
            raise InputError(
                "the score profile has no curves of layers that share entries; measure again with "
                f"{command('profile', share_length=2)}"
            )
        self.problem, self.layers = problem, scores.shape.full_layers
        self.max_groups = min(max_groups, len(self.layers))
        runs = [(first, 1) for first in self.layers] + scores.shared_runs.tolist()
        every = (tuple(range(first, first + length)) for first, length in runs)
        self.segments: list[tuple[int, ...]] = sorted(every, key=lambda segment: segment[-1])
        places = [self.layers.index(segment[0]) for segment in self.segments]
        self.spans = [
            (place, place + len(segment))
            for place, segment in zip(places, self.segments, strict=True)
        ]
        fewest = len(self._best_path(np.full(len(self.spans), -1.0), len(self.layers)))
        if fewest > max_groups:
            raise InfeasibleError(
                f"{max_groups} groups cannot hold the {len(self.layers)} layers: the first two "
                f"stand alone and the longest measured runs leave at least "
                f"{fewest}; ask for at least {option('share_groups', fewest)}",
                nearest=fewest,
            )
        tokens = problem.tokens[0]
        alone = problem.weights[:, None] * problem.values
        self.values: FloatArray = np.stack(
            [
                alone[problem.layers == segment[0]]
                if len(segment) == 1
                else curves.group_values(segment, tokens) / len(self.layers)
                for segment in self.segments
            ]
        )
        lengths = np.array([len(segment) for segment in self.segments])
        self.costs: IntArray = lengths[:, None] * (problem.costs[0] - problem.costs[0, 0])
        self.groupings: list[Groups] = []

    def run(self) -> float:
        """Return the bound over all groupings, and collect those that are best near its price."""
        problem = self.problem
        gain = float(self.values.max() - self.values.min())
        top = 2.0 * (gain + 1e-300) / problem.lattice_bytes
        low, high = 0.0, top
        bounds = [self._bound_at(high)[0]]
        if problem.sense is Sense.MAX_VALUE:
            bound, enough = self._bound_at(0.0)
            bounds.append(bound)
            if not enough:
                return bound
        for _ in range(ROUNDS):
            middle = 0.5 * (low + high)
            if middle in (low, high) or high - low <= CLOSE * top:
                break
            bound, enough = self._bound_at(middle)
            bounds.append(bound)
            low, high = (middle, high) if enough else (low, middle)
        return min(bounds) if problem.sense is Sense.MAX_VALUE else max(bounds)

    def _bound_at(self, price: float) -> tuple[float, bool]:
        """Return the bound at a price, and whether its best cut spends (reaches) enough."""
        problem = self.problem
        net = self.values - price * self.costs[:, None, :]
        picked = np.argmax(net, axis=2)
        worth = np.take_along_axis(net, picked[:, :, None], axis=2)[:, :, 0].sum(axis=1)
        path = self._best_path(worth)
        groups = tuple(self.segments[n] for n in path if len(self.segments[n]) > 1)
        if groups in self.groupings:
            self.groupings.remove(groups)
        self.groupings.append(groups)
        total = math.fsum(worth[path])
        above = sum(int(self.costs[n, picked[n]].sum()) for n in path)
        value = total + price * above
        if problem.target is None:
            room = problem.spendable_bytes - problem.min_cost_bytes
            return total + price * room, above > room
        enough = problem.meets_target(value)
        if price <= 0.0:
            return float(problem.min_cost_bytes), enough
        short = (problem.lowest_accepted_value - total) / price
        above = round_up_to_grain(short, problem.lattice_bytes)
        return float(problem.min_cost_bytes + above), enough

    def _best_path(self, worth: FloatArray, max_groups: int | None = None) -> list[int]:
        """Return the segments of the cut with the largest net worth.

        That is a shortest path in a directed acyclic graph. Its nodes are cut points with the
        number of segments before them, and its arcs segments.
        """
        import networkx as nx

        most, end_point = max_groups or self.max_groups, "cut"
        graph = nx.DiGraph()
        graph.add_node((0, 0))
        for number, (first, end) in enumerate(self.spans):  # by rising end
            for count in range(most):
                if (first, count) in graph:
                    graph.add_edge((first, count), (end, count + 1), weight=-worth[number])
        graph.add_edges_from(
            ((len(self.layers), count), end_point, {"weight": 0.0})
            for count in range(1, most + 1)
            if (len(self.layers), count) in graph
        )
        nodes = nx.bellman_ford_path(graph, (0, 0), end_point)[:-1]
        places = [place for place, _ in nodes]
        return [self.spans.index(span) for span in pairwise(places)]
