"""Nested caps (model, rank, layer) on concave curves: minimum-cost flow on a tree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InfeasibleError, InputError, SolverError
from kvalloc.problem import (
    AllocationProblem,
    GroupCap,
    Sense,
    SideConstraint,
    Solution,
    Solver,
    Termination,
)

VALUE_RANGE = 2**40
"""Gains are mapped to whole costs of arcs up to this size; flows of millions stay within int64."""


THRESHOLD_RESOLUTION = 1e-20
"""Gains closer than this are equal: a billion of them do not add up to a rounding error."""


class Flow(Solver):
    """Most value under caps that nest, or the fewest bytes for a target under them; exact.

    Whole steps flow from the model through every cap (a device, a rank, a layer) to the units,
    and each step of a unit is an arc that carries one and earns its gain: a minimum-cost flow on
    a tree, whose optimum is integral. Concave gains make the arcs of a unit fill in order.

    ``method="tree"`` uses the tree: the sets of steps that nested caps allow form a polymatroid,
    so taking the largest gains first and passing over steps of full groups is optimal. What greedy
    takes in a group is then the beginning of what it would take there if the group were alone, so
    every cap, the innermost first, turns into upper limits of its units, each found by one
    threshold. ``method="network"`` builds the network and gives it to OR-Tools; gains are rounded
    to one part in 2^40, and it needs one arc per option.

    The bound is recomputed from prices: one for the capacity and one for each full cap.

    Parameters
    ----------
    method : {"tree", "network"}

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
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset({GroupCap})

    def __init__(self, method: str = "tree") -> None:
        if method not in ("tree", "network"):
            raise InputError(f"flow: there is no method {method!r}; use tree or network")
        self.method = method

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """True for concave curves of one cost step under nested caps."""
        refusal = super().can_solve(problem)
        if refusal is not True:
            return refusal
        crossing = _crossing([c for c in problem.constraints if isinstance(c, GroupCap)])
        if crossing is not None:
            return (
                f"flow needs caps that nest, and {crossing[0].name} and {crossing[1].name} "
                "overlap; use lagrangian or ilp"
            )
        if problem.n_options > 1 and problem.step_bytes is None:
            return "flow sends steps of one size and these units differ; use lagrangian or ilp"
        if not problem.is_concave:
            return "flow is only exact on concave curves and these are not; use lagrangian or ilp"
        return True

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """The optimum; the time limit is never needed.

        Raises
        ------
        InfeasibleError
            If the target cannot be met within the caps.
        """
        tree = _Tree.of(problem)
        limits = tree.limits()
        if problem.target is not None and not problem.meets_target(problem.objective_value(limits)):
            nearest = problem.objective_value(limits)
            raise InfeasibleError(
                f"a target of {problem.target:g} cannot be met within the caps: the most is "
                f"{nearest:g}; raise the caps or ask for that",
                nearest=nearest,
            )
        choice = tree.greedy(limits) if self.method == "tree" else _by_network(tree)
        objective = problem.objective(choice)
        # A network may hand steps without gain to any unit; the prices are those of the tree.
        bound = tree.bound(choice if self.method == "tree" else tree.greedy(limits), limits)
        slack = 1e-11 * max(1.0, abs(objective))
        closed = abs(bound - objective) <= slack
        return Solution(
            choice=choice,
            objective=objective,
            bound=bound,
            termination=Termination.OPTIMAL if closed else Termination.HEURISTIC,
            detail=f"{self.method}, {len(tree.groups)} caps",
        )


def _crossing(caps: list[GroupCap]) -> tuple[GroupCap, GroupCap] | None:
    """Two caps that share some units, none of them inside the other; None where all nest."""
    members = [set(cap.units) for cap in caps]
    for at, first in enumerate(members):
        for after, second in enumerate(members[at + 1 :], start=at + 1):
            shared = len(first & second)
            if shared and shared < min(len(first), len(second)):
                return caps[at], caps[after]
    return None


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Units under one cap and the steps it holds beyond their floors."""

    units: IntArray
    steps: int


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """A problem with its caps in steps, innermost first."""

    problem: AllocationProblem
    groups: list[_Group]

    @classmethod
    def of(cls, problem: AllocationProblem) -> _Tree:
        step = problem.step_bytes or 1
        caps = [c for c in problem.constraints if isinstance(c, GroupCap)]
        groups = []
        for cap in sorted(caps, key=lambda cap: len(set(cap.units))):
            units = np.unique(np.asarray(cap.units, dtype=np.int64))
            room = cap.capacity_bytes - int(problem.costs[units, 0].sum())
            groups.append(_Group(units=units, steps=max(0, room // step)))
        return cls(problem=problem, groups=groups)

    def limits(self) -> IntArray:
        """The most that any optimal choice gives each unit: every cap taken alone."""
        limits = self.problem.last_options.copy()
        for group in self.groups:
            if int(limits[group.units].sum()) > group.steps:
                limits[group.units] = _largest_gains(
                    self.problem, group.units, limits[group.units], group.steps
                )
        return limits

    def greedy(self, limits: IntArray) -> IntArray:
        """The largest gains within the limits, as many as fit or as the target needs."""
        problem = self.problem
        everyone = np.arange(problem.n_units)
        if problem.sense is Sense.MAX_VALUE:
            steps = (problem.spendable_bytes - problem.min_cost_bytes) // (problem.step_bytes or 1)
            return _largest_gains(problem, everyone, limits, steps)
        low, high = 0, int(limits.sum())
        while low < high:
            middle = (low + high) // 2
            choice = _largest_gains(problem, everyone, limits, middle)
            if problem.meets_target(problem.objective_value(choice)):
                high = middle
            else:
                low = middle + 1
        return _largest_gains(problem, everyone, limits, low)

    def bound(self, choice: IntArray, limits: IntArray) -> float:
        """A dual bound from one price for all steps and one for each full cap.

        The price of a step is the least gain taken, in a group that its cap cuts short the least
        gain that it would take if it were alone. The part above what the next larger group asks
        is the price of the group's own cap.
        """
        problem = self.problem
        everyone = np.arange(problem.n_units)
        scarce = problem.sense is Sense.MIN_COST or not np.array_equal(choice, limits)
        base = _price(problem, everyone, choice, limits) if scarce else 0.0
        asked = np.full(problem.n_units, base)
        own = []
        for group in reversed(self.groups):  # outermost first
            if group.units.size == 0:
                own.append(0.0)
                continue
            outer = float(asked[group.units[0]])
            price = outer
            inner = self._inner(group)
            if int(inner.sum()) > group.steps:
                alone = _largest_gains(problem, group.units, inner, group.steps)
                price = max(outer, _price(problem, group.units, alone, inner))
            own.append(price - outer)
            asked[group.units] = price
        return self._dual(base, asked, own)

    def _inner(self, group: _Group) -> IntArray:
        """Limits of a group's units from the caps inside it only."""
        limits = self.problem.last_options.copy()
        for inner in self.groups:
            if inner is group:
                break
            if int(limits[inner.units].sum()) > inner.steps:
                limits[inner.units] = _largest_gains(
                    self.problem, inner.units, limits[inner.units], inner.steps
                )
        return limits[group.units]

    def _dual(self, base: float, asked: FloatArray, own: list[float]) -> float:
        problem = self.problem
        response = _beyond(problem, np.arange(problem.n_units), asked, problem.last_options)
        value = problem.objective_value(response)
        net = value - math.fsum(asked * response)
        caps = math.fsum(
            price * group.steps for price, group in zip(own, reversed(self.groups), strict=True)
        )
        step = problem.step_bytes or 1
        if problem.sense is Sense.MAX_VALUE:
            room = (problem.spendable_bytes - problem.min_cost_bytes) // step
            return net + caps + base * room
        if base <= 0.0:
            return float(problem.min_cost_bytes)
        steps = math.ceil((problem.lowest_accepted_value - net - caps) / base - 1e-6)
        return float(problem.min_cost_bytes + max(0, steps) * step)


def _beyond(
    problem: AllocationProblem, units: IntArray, price: FloatArray, limits: IntArray
) -> IntArray:
    """Steps of each unit whose gain is above its price, none beyond its limit."""
    low = np.zeros(units.size, dtype=np.int64)
    high = limits.copy()
    last = problem.last_options[units]
    for _ in range(int(problem.n_options).bit_length() + 1):
        middle = (low + high) >> 1
        after = np.minimum(middle + 1, last)
        gains = problem.weights[units] * (
            problem.values[units, after] - problem.values[units, middle]
        )
        passes = (gains > price) & (middle < high)
        low = np.where(passes, middle + 1, low)
        high = np.where(passes, high, middle)
    return low


def _gains_before(problem: AllocationProblem, units: IntArray, choice: IntArray) -> FloatArray:
    """Gain of the last step each unit took; inf where it took none."""
    before = np.maximum(choice - 1, 0)
    gains = problem.weights[units] * (problem.values[units, choice] - problem.values[units, before])
    return np.where(choice > 0, gains, np.inf)


def _gains_after(
    problem: AllocationProblem, units: IntArray, choice: IntArray, limits: IntArray
) -> FloatArray:
    """Gain of the next step of each unit; -inf where its limit is reached."""
    after = np.minimum(choice + 1, limits)
    gains = problem.weights[units] * (problem.values[units, after] - problem.values[units, choice])
    return np.where(choice < limits, gains, -np.inf)


def _price(
    problem: AllocationProblem, units: IntArray, choice: IntArray, limits: IntArray
) -> float:
    """Price of a step at a greedy choice: the least gain taken, else the largest one left."""
    taken = float(_gains_before(problem, units, choice).min())
    if math.isfinite(taken):
        return max(0.0, taken)
    return max(0.0, float(_gains_after(problem, units, choice, limits).max()))


def _largest_gains(
    problem: AllocationProblem, units: IntArray, limits: IntArray, steps: int
) -> IntArray:
    """The given number of largest gains of some units; ties go to the lower unit."""
    if int(limits.sum()) <= steps:
        return limits.copy()
    high = 1.0 + float(_gains_after(problem, units, np.zeros_like(limits), limits).max())
    low, inside, outside = -1.0, np.zeros_like(limits), limits
    # Gains that are exactly zero are common (entries without any score): look there first.
    middle = 0.0
    while low < middle < high:
        choice = _beyond(problem, units, np.full(units.size, middle), limits)
        taken = int(choice.sum())
        if taken == steps:
            return choice
        if taken < steps:
            high, inside = middle, choice
        else:
            low, outside = middle, choice
        if high - low <= THRESHOLD_RESOLUTION or np.array_equal(inside, outside):
            break
        middle = 0.5 * (low + high)
    missing = steps - int(inside.sum())
    room = outside - inside
    before = np.cumsum(room) - room
    filled: IntArray = inside + np.clip(missing - before, 0, room)
    return filled


def _by_network(tree: _Tree) -> IntArray:
    """The same by OR-Tools' minimum-cost flow; for a target, by bisection on the flow."""
    problem = tree.problem
    if problem.sense is Sense.MAX_VALUE:
        steps = (problem.spendable_bytes - problem.min_cost_bytes) // (problem.step_bytes or 1)
        return _flow_of(tree, steps)
    low, high = 0, int(problem.last_options.sum())
    while low < high:
        middle = (low + high) // 2
        choice = _flow_of(tree, middle)
        if problem.meets_target(problem.objective_value(choice)):
            high = middle
        else:
            low = middle + 1
    return _flow_of(tree, low)


def _flow_of(tree: _Tree, steps: int) -> IntArray:
    """Most gain of at most so many steps through the tree."""
    from ortools.graph.python import min_cost_flow

    problem = tree.problem
    n, n_groups = problem.n_units, len(tree.groups)
    # Nodes: units, then groups, then the model as a whole, then the sink.
    model, sink = n + n_groups, n + n_groups + 1
    parent = np.full(n + n_groups, model)
    for at in range(n_groups - 1, -1, -1):  # the innermost group is written last
        units = set(tree.groups[at].units.tolist())
        inside = [n + i for i in range(at) if units.issuperset(tree.groups[i].units.tolist())]
        parent[inside] = n + at
        parent[tree.groups[at].units] = n + at
    tails, heads, room, cost = [], [], [], []

    def add(tail: int, head: int, most: int, price: int) -> None:
        tails.append(tail)
        heads.append(head)
        room.append(most)
        cost.append(price)

    gains = problem.weights[:, None] * np.diff(problem.values, axis=1)
    largest = max(float(np.abs(gains).max(initial=0.0)), 1e-300)
    for node in range(n + n_groups):
        most = steps if node < n else min(steps, tree.groups[node - n].steps)
        add(int(parent[node]), node, most, 0)
    for unit in range(n):
        for option in range(int(problem.last_options[unit])):
            add(unit, sink, 1, -round(float(gains[unit, option]) / largest * VALUE_RANGE))
    add(model, sink, steps, 0)  # steps that nobody takes
    flow = min_cost_flow.SimpleMinCostFlow()
    arcs = flow.add_arcs_with_capacity_and_unit_cost(
        np.array(tails), np.array(heads), np.array(room), np.array(cost)
    )
    flow.set_node_supply(model, steps)
    flow.set_node_supply(sink, -steps)
    status = flow.solve()
    if status != flow.OPTIMAL:
        raise SolverError(f"flow: OR-Tools cannot solve the network: {status}; use method=tree")
    first = n + n_groups
    through = flow.flows(arcs)[first : first + int(problem.last_options.sum())]
    owner = np.repeat(np.arange(n), problem.last_options)
    return np.bincount(owner, weights=through, minlength=n).astype(np.int64)
