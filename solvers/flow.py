"""Nested caps (model, rank, layer) on concave curves: minimum-cost flow on a tree."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InfeasibleError, InputError, SolverError
from kvalloc.problem import AllocationProblem, Sense, SideConstraint, Solution, Solver, bound_at
from kvalloc.problem.constraints import MODEL, GroupCap, cap_tree, caps_of
from kvalloc.solvers._simplex import NetworkSimplex
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
            cap_tree(caps_of(problem))
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
        tree = _Tree(problem)
        limits = tree.limits
        if problem.target is not None and not problem.meets_target(problem.objective_value(limits)):
            nearest = problem.objective_value(limits)
            raise InfeasibleError(
                f"a target of {problem.target:g} cannot be met within the caps: the most is "
                f"{nearest:g}; raise the caps or ask for that",
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
        prices = tree.prices(choice)
        return Solution.of(
            problem,
            choice,
            bound=bound_at(problem, *prices),
            prices=prices,
            detail=tree.described,
        )


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Units under one cap, and the steps beyond their floors that matter to it.

    Attributes
    ----------
    place : int
        Of the cap among all of them.
    units : ndarray of int64, (n_members,)
    steps : int
        Most steps of all together.
    inner : ndarray of int64, (n_members,)
        Most steps of each unit by the caps inside this one.
    alone : ndarray of int64, (n_members,)
        What greedy takes if the group is alone.
    """

    place: int
    units: IntArray
    steps: int
    inner: IntArray
    alone: IntArray


class _Tree:
    """A problem with its caps in steps, innermost first.

    ``limits`` are the most steps that any optimal choice gives each unit, ``(n_units,)``;
    ``described`` says which cap lies in which.
    """

    def __init__(self, problem: AllocationProblem) -> None:
        self.problem = problem
        self.limits = problem.last_options.copy()
        self.groups: list[_Group] = []
        caps = caps_of(problem)
        tree = cap_tree(caps)
        nested = [f"{caps[b].name} in {caps[a].name}" for a, b in tree.edges if a != MODEL]
        self.described = "; ".join([f"{len(caps)} caps", *nested[:SHOWN_CAPS]])
        for place in reversed([*tree][1:]):  # innermost first, the model left out
            cap = caps[place]
            units = np.unique(np.asarray(cap.units, dtype=np.int64))
            room = cap.capacity_bytes - int(problem.costs[units, 0].sum())
            steps = max(0, room // (problem.step_bytes or 1))
            inner = self.limits[units]
            alone = largest_gains(problem, steps, units, inner)
            self.limits[units] = alone
            self.groups.append(
                _Group(place=place, units=units, steps=steps, inner=inner, alone=alone)
            )

    def prices(self, choice: IntArray) -> tuple[float, ...]:
        """Return the price of a byte of the capacity, then of each cap, that prove a choice.

        The price of a step is the least gain taken, in a group that its cap cuts short the least
        gain that it would take if it were alone. The part above what the next larger group asks
        is the price of the group's own cap.
        """
        problem, step = self.problem, self.problem.step_bytes or 1
        scarce = problem.sense is Sense.MIN_COST or not np.array_equal(choice, self.limits)
        base = _price(problem, problem.units, choice, self.limits) if scarce else 0.0
        units, caps = np.full(problem.n_units, base), np.zeros(len(problem.constraints))
        for group in reversed(self.groups):  # outermost first
            price = outer = float(units[group.units[0]])
            if int(group.inner.sum()) > group.steps:
                price = max(outer, _price(problem, group.units, group.alone, group.inner))
            caps[group.place] = (price - outer) / step
            units[group.units] = price
        return (base / step, *caps.tolist())


def _price(
    problem: AllocationProblem, units: IntArray, choice: IntArray, limits: IntArray
) -> float:
    """Price of a step at a greedy choice: the least gain taken, else the largest one left."""
    taken = choice > 0
    if taken.any():
        last = problem.gains(choice - taken, choice, units)[taken]
        return max(0.0, float(last.min()))
    onward = problem.gains(choice, np.minimum(choice + 1, limits), units)
    return float(onward.max(initial=0.0))
