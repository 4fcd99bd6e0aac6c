"""Nested caps on concave curves: minimum-cost flow on a tree."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import (
    AllocationProblem,
    GroupCap,
    Sense,
    SideConstraint,
    Solution,
    Solver,
    bound_at,
)
from kvalloc.problem.arrays import MODEL, cap_tree
from kvalloc.solvers._thresholds import greedy_choice, largest_gains

SHOWN_CAPS = 5
"""Pairs of nested caps that the line about a choice names."""


class Flow(Solver):
    """Most value, or fewest bytes for a target, under nested caps; exact.

    Steps flow from the model through every cap to the units, each an arc that carries one and earns
    its gain. Such a flow on a tree has an integral optimum.

    The sets of steps that nested caps allow form a polymatroid, so greedy is optimal: the largest
    gains first, without steps of full groups. It takes in a group the first steps that it would
    take there alone. So every cap, innermost first, becomes upper limits of its units, by one
    threshold.

    One price for the capacity and one for each full cap prove the bound.

    References
    ----------
    Federgruen, Groenevelt: The greedy procedure for resource allocation problems (1986). Ahuja,
    Magnanti, Orlin: Network Flows (1993), section 14 (convex cost flows).
    """

    name: ClassVar[str] = "flow"
    summary: ClassVar[str] = "minimum-cost flow: nested caps (model, rank, layer); exact on concave"
    reference: ClassVar[str] = "Federgruen and Groenevelt 1986; Ahuja et al. 1993, ch. 14"
    takes_bits: ClassVar[bool] = True
    needs_one_step: ClassVar[bool] = True
    needs_concave: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset({GroupCap})

    def refusal(self, problem: AllocationProblem) -> str:
        """Refuse caps that do not nest."""
        try:
            cap_tree(problem.caps)
        except SolverError as error:
            return str(error)
        return ""

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Return the optimum, without a search."""
        caps = problem.caps
        tree = cap_tree(caps)
        limits = problem.last_options.copy()
        for place in reversed([*tree][1:]):  # innermost first, the model left out
            units = np.unique(np.asarray(caps[place].units, dtype=np.int64))
            room = caps[place].capacity_bytes - problem.cost(np.zeros_like(limits), units)
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
        prices = tree_prices(problem, choice)
        nested = [f"{caps[b].name} in {caps[a].name}" for a, b in tree.edges if a != MODEL]
        return Solution.of(
            problem,
            choice,
            bound=bound_at(problem, *prices),
            prices=prices,
            detail="; ".join([f"{len(caps)} caps", *nested[:SHOWN_CAPS]]),
        )


def tree_prices(problem: AllocationProblem, choice: IntArray) -> tuple[float, ...]:
    """Return prices of a byte of the capacity, then of each cap, that prove a choice.

    The smallest gain taken is the price of a byte, in the model and in each full cap. A cap's price
    is the excess over the next larger cap.
    """
    caps = problem.caps
    full = problem.cost(choice) + problem.lattice_bytes > problem.spendable_bytes
    scarce = problem.sense is Sense.MIN_COST or (full and np.any(choice < problem.last_options))
    units = np.full(problem.n_units, _price(problem, problem.units, choice) if scarce else 0.0)
    prices = [float(units[0]), *(0.0 for _ in caps)]
    for _, place in cap_tree(caps).edges:  # outermost first
        members = np.asarray(caps[place].units, dtype=np.int64)
        if problem.cost(choice, members) + problem.lattice_bytes > caps[place].capacity_bytes:
            outer = float(units[members[0]])
            units[members] = max(outer, _price(problem, members, choice[members]))
            prices[1 + place] = float(units[members[0]]) - outer
    return tuple(prices)


def _price(problem: AllocationProblem, units: IntArray, choice: IntArray) -> float:
    """Return the smallest gain of a byte taken, else the largest untaken one."""
    taken = choice > 0
    before = choice - taken
    after = choice if taken.any() else np.minimum(choice + 1, problem.last_options[units])
    larger = after > before
    gains = problem.gains(before, after, units)[larger]
    bytes_ = (problem.costs[units, after] - problem.costs[units, before])[larger]
    each = np.maximum(gains / bytes_, 0.0)
    return float(each.min() if taken.any() else each.max(initial=0.0))
