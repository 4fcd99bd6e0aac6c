"""The budget problem as arrays: all that a solver ever sees."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.problem.checks import check_arrays, is_broadcast, valid_options
from kvalloc.problem.constraints import (
    GroupCap,
    MaxDistinct,
    RankBalance,
    SameBudget,
    SideConstraint,
)
from kvalloc.problem.dual import DualBound, concave_response, dense_response, dual_bound
from kvalloc.problem.workloads import (
    TailBound,
    check_scenarios,
    most_tail_value,
    reweighted,
    scenario_values,
    tail_bound,
    tail_places,
    tail_value,
)
from kvalloc.problem.worst_unit import cheapest_reaching, worst_unit_bound

__all__ = [
    "Aggregate",
    "AllocationProblem",
    "DualBound",
    "GroupCap",
    "MaxDistinct",
    "RankBalance",
    "SameBudget",
    "Sense",
    "SideConstraint",
    "TailBound",
    "apportion",
    "concave_response",
    "tail_places",
]


_ARRAYS = ("tokens", "values", "costs", "option_counts", "weights", "layers", "heads")

VALUE_TOLERANCE = 1e-12
"""Values this close are equal: what summing a few thousand float64 terms may lose."""

STEP_TOLERANCE = 1e-12
"""How far one gain may be below 0 or above the one before it through rounding alone."""

CONCAVE_TOLERANCE = 1e-10
"""The same for a whole curve: ten thousand tiny bends in one direction make a convex one."""

CONCAVE_STRIDE = 64
"""Every so many options are looked at for that."""

CONCAVE_BLOCK = 32_768
"""Values that are looked at together, 256 KiB."""


class Sense(Enum):
    """What is optimised: the value within a capacity, or the cost for a target value."""

    MAX_VALUE = "max_value"
    MIN_COST = "min_cost"


class Aggregate(Enum):
    """How the units' weighted values make up the value of a choice."""

    SUM = "sum"
    WORST = "worst"
    TAIL = "tail"
    """The sum, averaged over the worst share of several scenarios (CVaR)."""


@dataclass(frozen=True, kw_only=True)
class AllocationProblem:
    """A multiple-choice problem: pick one option for each unit.

    Maximise ``sum_u weights[u] * values[u, k_u]`` subject to
    ``sum_u costs[u, k_u] <= capacity_bytes``, or minimise that cost subject to the value reaching
    ``target`` (XKV, Eq. 17 and Eq. 18).

    Attributes
    ----------
    tokens : ndarray of int64, (n_units, n_options)
        Budget in tokens that an option gives every KV head of its unit, sinks and window
        included; strictly rising along a row, unless ``bits`` says what else differs.
    values : ndarray of float64, (n_units, n_options)
        Value of each option.
    costs : ndarray of int64, (n_units, n_options)
        Bytes of each option; strictly rising along a row. ``tokens`` and ``costs`` may be
        broadcast views of one row.
    bits : ndarray of int64, (n_units, n_options), or None
        Bit width of each option, where that is chosen too; a dearer option may then keep fewer
        tokens, and a solver has to say that it takes such problems (`Solver.takes_bits`).
    policies : ndarray of int64, (n_units, n_options), or None
        Place of the policy behind each option's value, where units choose among several; solvers
        need not look at it.
    option_counts : ndarray of int64, (n_units,)
        Options that a unit really has: ``values[u, :option_counts[u]]``; the rest is padding.
    weights : ndarray of float64, (n_units,)
        Weight of each unit's value in the objective.
    layers, heads : ndarray of int64, (n_units,)
        Which layer and KV head a unit is; head -1 means all heads of the layer.
    sense : Sense
        Maximise value or minimise cost.
    aggregate : Aggregate
        The value is the sum over units, the worst unit's, or the mean of the sums in the worst
        share of several scenarios.
    capacity_bytes : int or None
        Bytes available to the units (MAX_VALUE).
    target : float or None
        Value to reach (MIN_COST).
    context_tokens, protected_tokens : int
        Context the options are for; sinks plus window inside every option.
    constraints : tuple of SideConstraint
        What else must hold.
    scenarios : ndarray of float64, (n_scenarios, n_units, n_options), or None
        With `Aggregate.TAIL`: the values in each of several equally likely scenarios (workloads),
        whose mean ``values`` is. May be a view.
    tail_share : float
        Share of the scenarios, the worst ones, whose mean counts: 1 is the mean of all, at most
        ``1 / n_scenarios`` the worst one (Rockafellar and Uryasev, 2000).

    Raises
    ------
    InputError
        If arrays do not fit each other, a unit has no option, values are not finite, costs do not
        rise, or sense, capacity and target contradict each other.
    """

    tokens: IntArray
    values: FloatArray
    costs: IntArray
    bits: IntArray | None = None
    policies: IntArray | None = None
    option_counts: IntArray
    weights: FloatArray
    layers: IntArray
    heads: IntArray
    sense: Sense
    aggregate: Aggregate = Aggregate.SUM
    capacity_bytes: int | None = None
    target: float | None = None
    context_tokens: int
    protected_tokens: int
    constraints: tuple[SideConstraint, ...] = ()
    scenarios: FloatArray | None = None
    tail_share: float = 1.0

    def __post_init__(self) -> None:
        check_arrays(self)
        check_scenarios(self)
        if self.sense is Sense.MAX_VALUE and (
            self.capacity_bytes is None or self.target is not None
        ):
            raise InputError("a problem that maximises value needs a capacity and no target")
        if self.sense is Sense.MIN_COST and (
            self.target is None or self.capacity_bytes is not None
        ):
            raise InputError("a problem that minimises cost needs a target and no capacity")
        if self.target is not None and not math.isfinite(self.target):
            raise InputError(f"the target is {self.target}, expected a finite number")
        for constraint in self.constraints:
            named = constraint.members()
            if named and not 0 <= min(named) <= max(named) < self.n_units:
                raise InputError(
                    f"problem: {constraint.stated()[0]} names units {min(named)}..{max(named)} of "
                    f"0..{self.n_units - 1}"
                )
        if self.bits is not None:
            self.bits.flags.writeable = False
            compared = [c for c in self.constraints if isinstance(c, (SameBudget, MaxDistinct))]
            if compared:
                raise InputError(
                    f"{type(compared[0]).__name__} compares budgets in tokens, and with bits two "
                    "budgets of the same tokens can differ; leave one of them out"
                )
        for name in _ARRAYS:  # a solver must not change what its answer is checked against
            getattr(self, name).flags.writeable = False
        for array in (self.scenarios, self.policies):
            if array is not None:
                array.flags.writeable = False

    @property
    def n_units(self) -> int:
        """Number of units."""
        return int(self.values.shape[0])

    @property
    def n_options(self) -> int:
        """Number of option columns."""
        return int(self.values.shape[1])

    @property
    def last_options(self) -> IntArray:
        """Index of each unit's most expensive option, ``(n_units,)``."""
        return self.option_counts - 1

    @cached_property
    def min_cost_bytes(self) -> int:
        """Cost of the cheapest choice: what floors alone take."""
        return int(self.costs[:, 0].sum())

    @cached_property
    def max_cost_bytes(self) -> int:
        """Cost of keeping everything."""
        return self.cost(self.last_options)

    @cached_property
    def max_value(self) -> float:
        """No choice has a larger value; where curves rise, keeping everything has this one."""
        if self.aggregate is Aggregate.TAIL:
            return most_tail_value(self)
        if self.is_concave:  # rising rows end at their best option
            return self.objective_value(self.last_options)
        rows = zip(self.values, self.option_counts.tolist(), strict=True)
        bests = np.array([row[:count].max() for row, count in rows])
        return self._aggregated(self.weights * bests)

    @cached_property
    def step_bytes(self) -> int | None:
        """The one cost step between neighbouring options of all units, or None."""
        if self.n_options == 1:
            return None
        rows = self.costs[:1] if is_broadcast(self.costs) else self.costs
        steps = rows[:, 1:] - rows[:, :-1]
        if rows.shape[0] > 1 and int(self.option_counts.min()) < self.n_options:
            steps = steps[valid_options(self)[:, 1:]]
        first = int(steps.flat[0]) if steps.size else 0
        return first if first and bool(np.all(steps == first)) else None

    @cached_property
    def lattice_bytes(self) -> int:
        """Greatest common divisor of all cost differences: the grain of the total cost."""
        if self.step_bytes is not None:
            return self.step_bytes
        rows = self.costs[:1] if is_broadcast(self.costs) else self.costs
        differences = (rows - rows[:, :1])[:, 1:]
        return max(1, int(np.gcd.reduce(differences, axis=None))) if differences.size else 1

    @cached_property
    def is_concave(self) -> bool:
        """Whether every unit's value rises, by ever less for each step of equal cost."""
        if self.step_bytes is None:
            return self.n_options == 1
        return self._rows_are_concave(self.values)

    @cached_property
    def scenarios_are_concave(self) -> bool:
        """Whether that holds in every scenario, and so for every weighted mean of them."""
        if self.scenarios is None or self.step_bytes is None:
            return self.scenarios is not None and self.n_options == 1
        return all(self._rows_are_concave(values) for values in self.scenarios)

    def _rows_are_concave(self, values: FloatArray) -> bool:
        # Two buffers for all, as many rows as fit in the cache: all may be gigabytes.
        together = max(1, min(self.n_units, CONCAVE_BLOCK // self.n_options))
        buffers = (np.empty((together, self.n_options)), np.empty((together, self.n_options)))
        if int(self.option_counts.min()) < self.n_options:
            counts = self.option_counts.tolist()
            return all(
                _rows_are_concave(row[None, :count], *buffers)
                for row, count in zip(values, counts, strict=True)
            )
        # The first alone: where curves are not concave, one is mostly enough to see it.
        return _rows_are_concave(values[:1], *buffers) and all(
            _rows_are_concave(values[first : first + together], *buffers)
            for first in range(0, self.n_units, together)
        )

    @cached_property
    def is_rising(self) -> bool:
        """Whether no option of any unit is worth less than a cheaper one."""
        rows = zip(self.values, self.option_counts.tolist(), strict=True)
        return all(bool(np.all(row[1:count] >= row[: count - 1])) for row, count in rows)

    @cached_property
    def largest_gain(self) -> float:
        """No change of one unit's option adds more weighted value than this."""
        if self.is_concave:  # rising rows: from the first option to the last
            units = np.arange(self.n_units)
            rise = self.values[units, self.last_options] - self.values[:, 0]
            return max(0.0, float((self.weights * rise).max()))
        return float(self.values.max() - self.values.min()) * float(self.weights.max())

    @property
    def spendable_bytes(self) -> int:
        """The capacity rounded down to what a choice can really cost."""
        if self.capacity_bytes is None:
            raise InputError("this problem has a target, not a capacity")
        room = min(self.capacity_bytes, self.max_cost_bytes) - self.min_cost_bytes
        return self.min_cost_bytes + room // self.lattice_bytes * self.lattice_bytes

    def with_capacity(self, capacity_bytes: int) -> AllocationProblem:
        """The same units under another capacity, maximising value; arrays are not checked again."""
        return self._with_goal(Sense.MAX_VALUE, capacity_bytes, None)

    def with_target(self, target: float) -> AllocationProblem:
        """The same units with a target to reach at least cost; arrays are not checked again."""
        if not math.isfinite(target):
            raise InputError(f"the target is {target}, expected a finite number")
        return self._with_goal(Sense.MIN_COST, None, target)

    def _with_goal(
        self, sense: Sense, capacity_bytes: int | None, target: float | None
    ) -> AllocationProblem:
        other = copy.copy(self)  # shares arrays and everything already computed from them
        for name, value in (("sense", sense), ("capacity_bytes", capacity_bytes)):
            object.__setattr__(other, name, value)
        object.__setattr__(other, "target", target)
        return other

    def cost(self, choice: IntArray) -> int:
        """Bytes of a choice, ``choice`` being one option index per unit, ``(n_units,)``."""
        return int(self.costs[np.arange(self.n_units), choice].sum())

    def objective_value(self, choice: IntArray) -> float:
        """Value of a choice: its units' weighted values, summed without loss, or the worst.

        With scenarios, the mean of the sums in the worst share of them.
        """
        if self.aggregate is Aggregate.TAIL:
            return tail_value(scenario_values(self, choice), self.tail_share)
        return self._aggregated(self.weights * self.values[np.arange(self.n_units), choice])

    def _aggregated(self, worth: FloatArray) -> float:
        if self.aggregate is Aggregate.WORST:
            return float(worth.min())
        return math.fsum(worth)

    def objective(self, choice: IntArray) -> float:
        """What the sense optimises: the value, or the cost in bytes."""
        if self.sense is Sense.MAX_VALUE:
            return self.objective_value(choice)
        return float(self.cost(choice))

    def scenario_values(self, choice: IntArray) -> FloatArray:
        """Value of a choice in each scenario, ``(n_scenarios,)``."""
        return scenario_values(self, choice)

    def reweighted(self, weights: FloatArray) -> AllocationProblem:
        """The problem for one weighted mean of its scenarios, as a sum over units."""
        return reweighted(self, weights)

    def chosen_tokens(self, choice: IntArray) -> IntArray:
        """Budget of each unit in tokens per KV head, ``(n_units,)``."""
        return self.tokens[np.arange(self.n_units), choice]

    def chosen_bits(self, choice: IntArray) -> IntArray | None:
        """Bit width of each unit, ``(n_units,)``; None where it is not chosen."""
        return None if self.bits is None else self.bits[np.arange(self.n_units), choice]

    def chosen_policies(self, choice: IntArray) -> IntArray | None:
        """Place of each unit's policy, ``(n_units,)``; None where it is not chosen."""
        return None if self.policies is None else self.policies[np.arange(self.n_units), choice]

    def meets_target(self, value: float) -> bool:
        """Whether a value reaches the target, within `VALUE_TOLERANCE`."""
        return self.target is None or value >= self.lowest_accepted_value

    @property
    def lowest_accepted_value(self) -> float:
        """The target less `VALUE_TOLERANCE`."""
        if self.target is None:
            raise InputError("this problem has a capacity, not a target")
        return self.target - VALUE_TOLERANCE

    def options_within(self, tokens: FloatArray | IntArray) -> IntArray:
        """Each unit's largest option of at most the given tokens, ``(n_units,)``.

        A unit whose smallest option is larger gets that one.
        """
        if is_broadcast(self.tokens):
            found = np.searchsorted(self.tokens[0], tokens, side="right") - 1
        else:
            found = (self.tokens <= np.asarray(tokens)[:, None]).sum(axis=1) - 1
        return np.clip(found, 0, self.last_options).astype(np.int64)

    def check_feasible(self) -> None:
        """Raise when no choice at all can meet the capacity or the target.

        Raises
        ------
        InfeasibleError
            With the nearest capacity or target that can be met.
        """
        if self.capacity_bytes is not None and self.capacity_bytes < self.min_cost_bytes:
            raise InfeasibleError(
                f"a capacity of {self.capacity_bytes:,} bytes is below the floors: sinks, window "
                f"and minimum budgets alone take {self.min_cost_bytes:,} bytes; ask for at least "
                "that, or lower the floors",
                nearest=self.min_cost_bytes,
            )
        if self.target is not None and not self.meets_target(self.max_value):
            raise InfeasibleError(
                f"a target of {self.target:g} cannot be met: keeping everything gives "
                f"{self.max_value:g}; ask for at most that",
                nearest=self.max_value,
            )
        for constraint in self.constraints:
            fault = constraint.floor_fault(self)
            if fault is not None:
                raise InfeasibleError(f"no choice can work: {fault}; raise it or lower the floors")

    def side_fault(self, choice: IntArray, ranks: IntArray | None = None) -> str | None:
        """The first side constraint that a choice violates, as half a sentence, or None.

        Parameters
        ----------
        choice : ndarray of int64, (n_units,)
        ranks : ndarray of int64, (n_units,), optional
            Tensor-parallel rank of each unit.
        """
        faults = (constraint.fault(self, choice, ranks) for constraint in self.constraints)
        return next((fault for fault in faults if fault is not None), None)

    def best_response(self, multiplier: float) -> IntArray:
        """Each unit's best option when a byte costs ``multiplier`` of value, ``(n_units,)``.

        The smallest option among equals.
        """
        if self.is_concave and self.step_bytes is not None:
            return concave_response(self, multiplier * self.step_bytes, strict=True)
        return dense_response(self, multiplier)

    def dual_bound(self) -> DualBound:
        """A bound on the objective that owes nothing to a solver.

        By Lagrangian duality, tightened to the grain of the costs; for a worst unit, the exact
        optimum; for a tail of scenarios, by duality over their weights too. Side constraints are
        left out, so it holds with and without them.
        """
        if self.aggregate is Aggregate.TAIL:
            return self.tail_bound()
        if self.aggregate is Aggregate.WORST:
            return worst_unit_bound(self)
        return dual_bound(self)

    def tail_bound(self) -> TailBound:
        """The same for a tail of scenarios, with the weights of the scenarios that prove it."""
        return tail_bound(self)

    def cheapest_reaching(self, level: float) -> IntArray | None:
        """Each unit's cheapest option of at least a weighted value; None if one has none."""
        return cheapest_reaching(self, level)

    def digest(self) -> str:
        """SHA-256 over everything that defines the problem."""
        hasher = hashlib.sha256()
        for name in _ARRAYS:
            array = getattr(self, name)
            rows = array[:1] if is_broadcast(array) else array
            hasher.update(f"{name}{array.shape}".encode())
            hasher.update(np.ascontiguousarray(rows).data)
        if self.bits is not None:
            hasher.update(b"bits" + np.ascontiguousarray(self.bits).data)
        if self.policies is not None:
            hasher.update(b"policies" + np.ascontiguousarray(self.policies).data)
        goal = (self.sense.value, self.aggregate.value, self.capacity_bytes, self.target)
        where = (self.context_tokens, self.protected_tokens, self.constraints)
        hasher.update(repr((*goal, *where)).encode())
        if self.scenarios is not None:
            hasher.update(f"scenarios{self.scenarios.shape}{self.tail_share!r}".encode())
            for values in self.scenarios:
                hasher.update(np.ascontiguousarray(values).data)
        return hasher.hexdigest()


def _rows_are_concave(rows: FloatArray, first: FloatArray, second: FloatArray) -> bool:
    """Whether no row falls or bends upwards; the buffers are at least as large as the rows."""
    n_rows, steps = rows.shape[0], rows.shape[1] - 1
    if steps < 1:
        return True
    gains = np.subtract(rows[:, 1:], rows[:, :-1], out=first[:n_rows, :steps])
    bends = np.subtract(gains[:, 1:], gains[:, :-1], out=second[:n_rows, : steps - 1])
    if gains.min() < -STEP_TOLERANCE or bends.max(initial=0.0) > STEP_TOLERANCE:
        return False
    if steps <= 2 * CONCAVE_STRIDE:
        return True
    coarse = np.diff(rows[:, ::CONCAVE_STRIDE], axis=1)
    falling = np.minimum.accumulate(coarse, axis=1)
    rises = np.maximum((coarse - falling).sum(axis=1), -falling[:, -1] * coarse.shape[1])
    return bool(rises.max() <= CONCAVE_TOLERANCE)
