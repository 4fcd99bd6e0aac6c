"""Nested caps (model, rank, layer) on concave curves: minimum-cost flow on a tree."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from kvalloc.errors import InfeasibleError, InputError, SolverError
from kvalloc.problem import (
    AllocationProblem,
    GroupCap,
    Sense,
    SideConstraint,
    Solution,
    Solver,
    bound_at,
)
from kvalloc.problem.constraints import MODEL, cap_tree
from kvalloc.solvers._simplex import NetworkSimplex, tree_prices
from kvalloc.solvers._thresholds import greedy_choice, largest_gains

METHODS = ("thresholds", "network_simplex")

SHOWN_CAPS = 5
"""Pairs of caps, one in the other, that the line about a choice names."""


class Flow(Solver):
    """Most value under caps that nest, or the fewest bytes for a target under them; exact.

    Whole steps flow from the model through every cap (a device, a rank, a layer) to the units,
    and each step of a unit is an arc that carries one and earns its gain: a minimum-cost flow on
    a tree, whose optimum is integral. Concave gains make the arcs of a unit fill in order.

    The sets of steps that nested caps allow form a polymatroid, so taking the largest gains first
    and passing over steps of full groups is optimal. What greedy takes in a group is then the
    beginning of what it would take there if the group were alone, so every cap, the innermost
    first, turns into upper limits of its units, each found by one threshold.

    The bound is that of prices: one for the capacity and one for each full cap.

    Parameters
    ----------
    method : {"thresholds", "network_simplex"}
        Network simplex solves the flow itself, of a few thousand options at a time. It takes
        seconds, and is there to prove a second time what the thresholds decide. Of a target they
        say how many bytes it takes; the prices of the flow within these prove it.

    Raises
    ------
    InputError
        If there is no such method.

    References
    ----------
    Federgruen, Groenevelt: The greedy procedure for resource allocation problems (1986).
    Ahuja, Magnanti, Orlin: Network Flows (1993), section 14 (convex cost flows).
    """

    name: ClassVar[str] = "flow"
    summary: ClassVar[str] = "minimum-cost flow: nested caps (model, rank, layer); exact on concave"
    reference: ClassVar[str] = "Federgruen and Groenevelt 1986; Ahuja et al. 1993, ch. 14"
    takes_bits: ClassVar[bool] = True
    needs_one_step: ClassVar[bool] = True
    needs_concave: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset({GroupCap})

    def __init__(self, method: str = "thresholds") -> None:
        if method not in METHODS:
            raise InputError(f"flow: method is {method!r}, expected one of {', '.join(METHODS)}")
        self.method = method

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """Return True for concave curves of one cost step under nested caps."""
        if (able := super().can_solve(problem)) is not True:
            return able
        try:
            cap_tree(problem.caps)
        except SolverError as error:
            return str(error)
        return True

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Return the optimum; only network simplex needs the time limit.

        Raises
        ------
        InfeasibleError
            If the target cannot be met within the caps.
        """
        caps = problem.caps
        tree = cap_tree(caps)
        limits = problem.last_options.copy()
        for place in reversed([*tree][1:]):  # innermost first, the model left out
            units = np.unique(np.asarray(caps[place].units, dtype=np.int64))
            room = caps[place].capacity_bytes - int(problem.costs[units, 0].sum())
            steps = max(0, room // (problem.step_bytes or 1))
            limits[units] = largest_gains(problem, steps, units, limits[units])
        if problem.target is not None and not problem.meets_target(problem.objective_value(limits)):
            nearest = problem.objective_value(limits)
            raise InfeasibleError(
                f"a target of {problem.target:.15g} cannot be met within the caps: the most is "
                f"{nearest:.15g}; raise the caps or ask for that",
                nearest=nearest,
            )
        choice = greedy_choice(problem, limits)
        if self.method == "network_simplex":
            within, maximise = problem, problem.sense is Sense.MAX_VALUE
            if not maximise:  # with one step less the flow has to miss the target
                less = problem.cost(choice) - (problem.step_bytes or 0)
                within = problem.with_capacity(max(problem.min_cost_bytes, less))
            again = NetworkSimplex().solve(within, time_limit_seconds=time_limit_seconds)
            bound = bound_at(problem, *again.prices)
            choice = again.choice if maximise else choice
            answer = Solution.of(problem, choice, bound=bound, prices=again.prices)
            return dataclasses.replace(answer, detail=again.detail)
        prices = tree_prices(problem, choice)
        nested = [f"{caps[b].name} in {caps[a].name}" for a, b in tree.edges if a != MODEL]
        return Solution.of(
            problem,
            choice,
            bound=bound_at(problem, *prices),
            prices=prices,
            detail="; ".join([f"{len(caps)} caps", *nested[:SHOWN_CAPS]]),
        )
