"""The budget problem as arrays: everything that a solver sees."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.accounting.costs import MOST_BYTES
from kvalloc.errors import InfeasibleError, InputError, SolverError

VALUE_TOLERANCE = 1e-12
"""Values this close are equal: the rounding error of a sum of a few thousand float64 terms."""

STEP_TOLERANCE = 1e-12
"""Largest rounding error by which a gain may be below 0 or above the previous one."""

CONCAVE_TOLERANCE = 1e-10
"""The same for a whole curve: ten thousand tiny bends in one direction make a convex one."""

CONCAVE_STRIDE = 64
"""Options between two points of that coarse check."""

CONCAVE_BLOCK = 32_768
"""Values that are checked together, 256 KiB."""

_PER_OPTION = ("tokens", "costs", "bits")
_PER_UNIT = ("option_counts", "weights", "layers", "heads")
_ARRAYS = ("tokens", "values", "costs", *_PER_UNIT, "bits")

BOUND = "dual_bound"
"""Key under which `kvalloc.problem.dual_bound` stores its result in a problem; `replace` drops it.
"""

_OF_VALUES = frozenset((*_ARRAYS, "aggregate"))
_CACHED = ("exists", "worth", "max_value", "is_concave", "best_so_far", "largest_gain")
"""Cached properties by the fields that they depend on: `replace` keeps them if none of these
changes."""


class Sense(Enum):
    """Goal: the most value within a capacity, or the least cost for a target."""

    MAX_VALUE = "max_value"
    MIN_COST = "min_cost"


class Aggregate(Enum):
    """Aggregation of the units' weighted values."""

    SUM = "sum"
    WORST = "worst"


@dataclass(frozen=True, kw_only=True)
class SideConstraint(ABC):
    """Constraint beyond one capacity; solvers refuse kinds that they do not declare."""

    keyword: ClassVar[str] = ""
    """The keyword of `kvalloc.solve` that requests it, if any."""

    compares_tokens: ClassVar[bool] = False
    """Whether it compares budgets in tokens, which excludes a choice of bits."""

    @abstractmethod
    def fault(self, problem: AllocationProblem, choice: IntArray) -> str | None:
        """Return a choice's violation, ``(n_units,)``, as half a sentence, or None."""

    def stated(self) -> tuple[str, str]:
        """Return name and limit in a few words."""
        return type(self).__name__, str(self)


@dataclass(frozen=True, kw_only=True)
class GroupCap(SideConstraint):
    """A capacity for some units: a layer, a rank, a device; caps may nest or overlap.

    Attributes
    ----------
    name : str
        Name in messages, such as ``"device 0"``.
    units : tuple of int
    capacity_bytes : int
    """

    keyword: ClassVar[str] = "cap"

    name: str
    units: tuple[int, ...]
    capacity_bytes: int

    def __post_init__(self) -> None:
        if len(self.units) != len(set(self.units)):
            raise InputError(f"the cap of {self.name} names a unit twice; name it once")

    def stated(self) -> tuple[str, str]:
        """See `SideConstraint`."""
        return f"cap of {self.name}", f"{self.capacity_bytes:,} bytes"

    def fault(self, problem: AllocationProblem, choice: IntArray) -> str | None:
        """See `SideConstraint`."""
        if (cost := problem.cost(choice, self.units)) > self.capacity_bytes:
            return f"{self.name} takes {cost:,} bytes of {self.capacity_bytes:,}"
        return None


@dataclass(frozen=True, kw_only=True)
class AllocationProblem:
    """Multiple-choice problem: one option for each unit.

    Maximise ``sum_u weights[u] * values[u, k_u]`` subject to ``sum_u costs[u, k_u] <=
    capacity_bytes``, or minimise that cost for a value of ``target`` (XKV, Eq. 17, 18).

    Attributes
    ----------
    tokens, costs : ndarray of int64, (n_units, n_options)
        Tokens of each of a unit's KV heads, sinks and window included, and its bytes. Rows rise
        strictly (tokens only without ``bits``) and may be broadcast views of one.
    values : ndarray of float64, (n_units, n_options)
    bits : ndarray of int64, (n_units, n_options), or None
        Bit widths, if chosen too; see `Solver.takes_bits`.
    weights : ndarray of float64, (n_units,)
    option_counts, layers, heads : ndarray of int64, (n_units,)
        Columns from ``option_counts[u]`` on are padding. Head -1 means all of the layer.
    aggregate : Aggregate
    capacity_bytes : int or None
    target : float or None
    context_tokens, protected_tokens : int
        Context; sinks plus window in each option.
    constraints : tuple of SideConstraint
    n_units, n_options : int
        Shape of ``values``, computed as all later fields.
    units, last_options : ndarray of int64, (n_units,)
        ``arange(n_units)``; most expensive options.
    is_ragged : bool
        Whether there is padding.
    min_cost_bytes, max_cost_bytes : int
        Cost of the floors (cheapest choice), and of everything.
    step_bytes : int or None
        The one cost step between all neighbouring options, if any.
    lattice_bytes : int
        Grain: greatest common divisor of cost differences.
    spendable_bytes : int
        Capacity, at most ``max_cost_bytes`` (the default), rounded down to a possible cost.
    lowest_accepted_value : float
        Target less `VALUE_TOLERANCE`; minus infinity without one.
    caps : tuple of GroupCap
        In ``constraints``' order.

    Raises
    ------
    InputError
        If arrays do not fit, a unit has no option, values are not finite, costs do not rise, or not
        exactly one of capacity and target is set.
    """

    tokens: IntArray
    values: FloatArray
    costs: IntArray
    bits: IntArray | None = None
    option_counts: IntArray
    weights: FloatArray
    layers: IntArray
    heads: IntArray
    aggregate: Aggregate = Aggregate.SUM
    capacity_bytes: int | None = None
    target: float | None = None
    context_tokens: int
    protected_tokens: int
    constraints: tuple[SideConstraint, ...] = ()

    n_units: int = field(init=False, repr=False)
    n_options: int = field(init=False, repr=False)
    units: IntArray = field(init=False, repr=False)
    last_options: IntArray = field(init=False, repr=False)
    is_ragged: bool = field(init=False, repr=False)
    min_cost_bytes: int = field(init=False, repr=False)
    max_cost_bytes: int = field(init=False, repr=False)
    step_bytes: int | None = field(init=False, repr=False)
    lattice_bytes: int = field(init=False, repr=False)
    spendable_bytes: int = field(init=False, repr=False)
    lowest_accepted_value: float = field(init=False, repr=False)
    caps: tuple[GroupCap, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check(changed=_OF_VALUES)

    def replace(self, **changes: Any) -> AllocationProblem:
        """Return the problem with fields changed and checked; other results stay.

        Raises
        ------
        InputError
            As for a new problem.
        """
        if unknown := changes.keys() - {one.name for one in dataclasses.fields(self) if one.init}:
            raise TypeError(f"a problem has no field {', '.join(sorted(unknown))}")
        other = object.__new__(AllocationProblem)
        other.__dict__.update(self.__dict__ | changes)
        for name in (BOUND, *(_CACHED if not _OF_VALUES.isdisjoint(changes) else ())):
            other.__dict__.pop(name, None)
        other._check(changed=changes.keys())
        return other

    def with_capacity(self, capacity_bytes: int) -> AllocationProblem:
        """Return the same units under another capacity, maximising value."""
        return self.replace(capacity_bytes=capacity_bytes, target=None)

    def with_target(self, target: float) -> AllocationProblem:
        """Return the same units with a target, minimising cost."""
        return self.replace(capacity_bytes=None, target=target)

    @property
    def sense(self) -> Sense:
        """MAX_VALUE without a target, else MIN_COST."""
        return Sense.MAX_VALUE if self.target is None else Sense.MIN_COST

    def _check(self, changed: Set[str]) -> None:
        if not _OF_VALUES.isdisjoint(changed):
            self._check_arrays()
            if not changed.isdisjoint(("tokens", "costs", "bits", "option_counts")):
                self._measure_options()
            for name in _ARRAYS:  # a solver must not change what its answer is checked against
                if (array := getattr(self, name)) is not None:
                    array.flags.writeable = False
        if (self.capacity_bytes is None) == (self.target is None):
            raise InputError("a problem needs a capacity or a target; give one of them")
        if self.target is not None and not math.isfinite(self.target):
            raise InputError(f"the target is {self.target}, expected a finite number")
        floors, room = self.min_cost_bytes, self.max_cost_bytes - self.min_cost_bytes
        if self.capacity_bytes is not None:
            room = min(room, self.capacity_bytes - floors) // self.lattice_bytes
            room *= self.lattice_bytes
        accepted = -math.inf if self.target is None else self.target - VALUE_TOLERANCE
        self.__dict__.update(
            spendable_bytes=floors + room,
            lowest_accepted_value=accepted,
            caps=tuple(one for one in self.constraints if isinstance(one, GroupCap)),
        )
        for cap in self.caps:
            if cap.units and not 0 <= min(cap.units) <= max(cap.units) < self.n_units:
                raise InputError(
                    f"problem: the {cap.stated()[0]} names units {min(cap.units)}.."
                    f"{max(cap.units)} of 0..{self.n_units - 1}"
                )
        for one in self.constraints:
            if self.bits is not None and one.compares_tokens:
                raise InputError(
                    f"{type(one).__name__} compares budgets in tokens, and with bits two budgets "
                    "of the same tokens can differ; leave one of them out"
                )

    def _check_arrays(self) -> None:
        shape = self.values.shape
        if len(shape) != 2 or 0 in shape:
            raise InputError(f"problem: values are shaped {shape}, expected (units, options)")
        for name in _PER_OPTION:
            array = getattr(self, name)
            if array is not None and (array.shape != shape or array.dtype != np.int64):
                raise InputError(
                    f"problem: {name} are {array.dtype} shaped {array.shape}, expected int64 "
                    f"shaped {shape}"
                )
        for name in _PER_UNIT:
            if getattr(self, name).shape != shape[:1]:
                raise InputError(f"problem: {name} must have one number for each unit")
        counts = self.option_counts
        if int(counts.min()) < 1 or int(counts.max()) > shape[1]:
            unit = int(np.argmin(counts))
            raise InputError(f"problem: unit {unit} has {int(counts[unit])} options, expected >= 1")
        if not math.isfinite(float(self.values.sum())):
            raise InputError("problem: values are not all finite numbers")
        if not math.isfinite(float(self.weights.sum())) or float(self.weights.min()) < 0:
            raise InputError("problem: weights must be finite and not negative")

    def _measure_options(self) -> None:
        """Check tokens and costs; compute the dependent fields."""
        n_units, n_options = self.values.shape
        last, is_ragged = self.option_counts - 1, int(self.option_counts.min()) < n_options
        units = np.arange(n_units)
        last.flags.writeable = units.flags.writeable = False
        self.__dict__.update(
            n_units=n_units,
            n_options=n_options,
            units=units,
            last_options=last,
            is_ragged=is_ragged,
        )
        for name, array in (("tokens", self.tokens), ("costs", self.costs)):
            rows = _distinct_rows(array)
            jumps = steps = np.diff(rows, axis=1)
            if is_ragged and rows.shape[0] == n_units:
                steps = steps[self.exists[:, 1:]]
            may_fall = name == "tokens" and self.bits is not None
            if not (may_fall or bool(np.all(steps > 0))) or int(rows[:, 0].min()) < 0:
                raise InputError(f"problem: {name} must be >= 0 and rise from option to option")
        largest = sum(self.costs[units, last].tolist())  # these cannot overflow
        if largest > MOST_BYTES:
            raise InputError(
                f"problem: costs add up to more than the {MOST_BYTES:,} bytes that can be counted "
                "with"
            )
        first = int(steps.flat[0]) if steps.size else 0
        step = first if first and bool(np.all(steps == first)) else None
        grain = step or max(1, int(np.gcd.reduce(jumps, axis=None)) if jumps.size else 1)
        floors = int(self.costs[:, 0].sum())
        self.__dict__.update(
            min_cost_bytes=floors, max_cost_bytes=largest, step_bytes=step, lattice_bytes=grain
        )

    @cached_property
    def exists(self) -> BoolArray:
        """Mask of options, false in the padding, ``(n_units, n_options)``."""
        mask: BoolArray = np.arange(self.n_options) < self.option_counts[:, None]
        return mask

    @cached_property
    def worth(self) -> FloatArray:
        """Weighted values, ``(n_units, n_options)``; -inf in the padding."""
        weighted = self.weights[:, None] * self.values
        return np.where(self.exists, weighted, -np.inf) if self.is_ragged else weighted

    @cached_property
    def max_value(self) -> float:
        """Largest value of a choice of any cost."""
        if self.is_concave:  # rising rows end at their best option
            return self.objective_value(self.last_options)
        rows = zip(self.values, self.option_counts.tolist(), strict=True)
        best = self.weights * np.array([row[:count].max() for row, count in rows])
        return float(best.min()) if self.aggregate is Aggregate.WORST else math.fsum(best)

    @cached_property
    def is_concave(self) -> bool:
        """Whether costs have one step and gains neither rise nor are negative."""
        if self.step_bytes is None:
            return self.n_options == 1
        # Two buffers for all, as many rows as fit in the cache: all may be gigabytes.
        n_rows = max(1, min(self.n_units, CONCAVE_BLOCK // self.n_options))
        buffers = (np.empty((n_rows, self.n_options)), np.empty((n_rows, self.n_options)))
        if self.is_ragged:
            rows = zip(self.values, self.option_counts.tolist(), strict=True)
            return all(_rows_are_concave(row[None, :count], *buffers) for row, count in rows)
        # The first row alone: where curves are not concave, one row mostly shows it.
        first, end = 0, 1
        while first < self.n_units:
            if not _rows_are_concave(self.values[first:end], *buffers):
                return False
            first, end = end, end + n_rows
        return True

    @cached_property
    def best_so_far(self) -> FloatArray:
        """The largest value up to each option, ``(n_units, n_options)``."""
        rises = all(bool(np.all(row[1:] >= row[:-1])) for row in self.values)
        return self.values if rises else np.maximum.accumulate(self.values, axis=1)

    @cached_property
    def largest_gain(self) -> float:
        """Upper bound on the weighted gain by another option of one unit."""
        if self.is_concave:  # rising rows: from the first option to the last
            return max(0.0, float(self.gains(0, self.last_options).max()))
        return float(self.values.max() - self.values.min()) * float(self.weights.max())

    @property
    def spendable_steps(self) -> int:
        """Steps above the floors that the capacity holds."""
        return (self.spendable_bytes - self.min_cost_bytes) // (self.step_bytes or 1)

    def cost(self, choice: IntArray, units: Sequence[int] | IntArray | None = None) -> int:
        """Return a choice's bytes, in all or some units."""
        rows = self.units if units is None else np.asarray(units, dtype=np.int64)
        return int(self.costs[rows, choice[rows]].sum())

    def gains(
        self, before: IntArray | int, after: IntArray, units: IntArray | None = None
    ) -> FloatArray:
        """Return each unit's weighted gain from one option to another."""
        rows, weights = self.units, self.weights
        if units is not None:
            rows, weights = units, weights[units]
        gains: FloatArray = weights * (self.values[rows, after] - self.values[rows, before])
        return gains

    def objective_value(self, choice: IntArray) -> float:
        """Return the exact sum of weighted values, or the worst."""
        worth = self.weights * self.values[self.units, choice]
        return float(worth.min()) if self.aggregate is Aggregate.WORST else math.fsum(worth)

    def objective(self, choice: IntArray) -> float:
        """Return a choice's value, or its cost under a target."""
        if self.sense is Sense.MAX_VALUE:
            return self.objective_value(choice)
        return float(self.cost(choice))

    def is_better(self, first: float, second: float, slack: float = 0.0) -> bool:
        """Return whether an objective beats another by more than a relative slack."""
        room = slack * max(1.0, abs(second))
        return first > second + room if self.sense is Sense.MAX_VALUE else first < second - room

    def chosen_tokens(self, choice: IntArray) -> IntArray:
        """Return each unit's budget in tokens per KV head."""
        return self.tokens[self.units, choice]

    def meets_target(self, value: float) -> bool:
        """Return whether a value reaches the target, within `VALUE_TOLERANCE`."""
        return value >= self.lowest_accepted_value

    def fits(self, choice: IntArray) -> bool:
        """Return whether a choice keeps capacity and caps."""
        within = self.cost(choice) <= self.spendable_bytes
        return within and all(cap.fault(self, choice) is None for cap in self.caps)

    def satisfies(self, choice: IntArray) -> bool:
        """Return whether a choice keeps capacity, target and side constraints."""
        met = self.meets_target(self.objective_value(choice))
        within = self.cost(choice) <= self.spendable_bytes
        return met and within and self.side_fault(choice) is None

    def with_options(self, columns: IntArray, counts: IntArray) -> AllocationProblem:
        """Return the problem with the options ``columns[u, :counts[u]]``, cheapest first."""
        arrays = {name: getattr(self, name) for name in ("values", *_PER_OPTION)}
        part = {
            name: a[self.units[:, None], columns] for name, a in arrays.items() if a is not None
        }
        return self.replace(**part, option_counts=counts)

    def options_within(self, tokens: FloatArray | IntArray) -> IntArray:
        """Return each unit's largest option within these tokens, else its smallest."""
        rows = _distinct_rows(self.tokens)
        if rows.shape[0] == 1:
            options = np.searchsorted(rows[0], tokens, side="right") - 1
        else:
            options = (rows <= np.asarray(tokens)[:, None]).sum(axis=1) - 1
        return np.clip(options, 0, self.last_options).astype(np.int64)

    def check_feasible(self) -> None:
        """Refuse a capacity or a cap below its floors, and a target above `max_value`.

        Raises
        ------
        InfeasibleError
            With the nearest possible capacity or target.
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
                f"a target of {self.target:.15g} cannot be met: keeping everything gives "
                f"{self.max_value:.15g}; ask for at most that",
                nearest=self.max_value,
            )
        for cap in self.caps:
            floors = self.cost(np.zeros_like(self.units), cap.units)
            if floors > cap.capacity_bytes:
                raise InfeasibleError(
                    f"no choice can work: the cap of {cap.name}, {cap.capacity_bytes:,} bytes, is "
                    f"below its floors of {floors:,} bytes; raise it or lower the floors"
                )

    def side_fault(self, choice: IntArray) -> str | None:
        """Return the first violation by a choice, see `SideConstraint.fault`."""
        for constraint in self.constraints:
            if (fault := constraint.fault(self, choice)) is not None:
                return fault
        return None

    def digest(self) -> str:
        """Return the SHA-256 of everything that defines the problem."""
        hasher = hashlib.sha256()
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None:
                hasher.update(f"{name}{array.shape}".encode())
                hasher.update(np.ascontiguousarray(_distinct_rows(array)).data)
        goal = (self.sense.value, self.aggregate.value, self.capacity_bytes, self.target)
        where = (self.context_tokens, self.protected_tokens, self.constraints)
        hasher.update(repr((*goal, *where)).encode())
        return hasher.hexdigest()


def first_where(holds: Callable[[IntArray], BoolArray], low: IntArray, high: IntArray) -> IntArray:
    """Return each row's first place that passes a test, else ``high``, by bisection.

    Parameters
    ----------
    holds : callable
        Tests one place of each row; along a row, true stays true.
    low, high : ndarray of int64, (n_rows,)
    """
    for _ in range(int((high - low).max(initial=0)).bit_length()):
        middle = (low + high) >> 1
        is_true = holds(middle)
        low = np.where(is_true, low, np.minimum(middle + 1, high))
        high = np.where(is_true, middle, high)
    return high


def _distinct_rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return one row if all are views of it."""
    return array[:1] if array.ndim == 2 and array.strides[0] == 0 else array


def _rows_are_concave(rows: FloatArray, first: FloatArray, second: FloatArray) -> bool:
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


@dataclass(frozen=True, kw_only=True)
class MaxDistinct(SideConstraint):
    """Limit, at least 1, on the number of different token budgets.

    Attributes
    ----------
    maximum : int
    """

    keyword: ClassVar[str] = "max_distinct"
    compares_tokens: ClassVar[bool] = True

    maximum: int

    def __post_init__(self) -> None:
        if self.maximum < 1:
            raise InputError(f"at most {self.maximum} different budgets is not possible; ask for 1")

    def stated(self) -> tuple[str, str]:
        """See `SideConstraint`."""
        return "different budgets", f"at most {self.maximum}"

    def fault(self, problem: AllocationProblem, choice: IntArray) -> str | None:
        """See `SideConstraint`."""
        distinct = np.unique(problem.chosen_tokens(choice)).size
        if distinct > self.maximum:
            return f"{distinct} different budgets, at most {self.maximum} are allowed"
        return None


MODEL = "model"
"""The root of a tree of caps."""

EVERY_KIND: frozenset[type[SideConstraint]] = frozenset({GroupCap, MaxDistinct})
"""All kinds of side constraints of kvalloc."""


def cap_tree(caps: Sequence[GroupCap]) -> Any:
    """Return the tree of caps: each one's parent is the smallest around it.

    Returns
    -------
    networkx.DiGraph
        From `MODEL` through the caps' indices, outermost first.

    Raises
    ------
    SolverError
        If two caps overlap and neither contains the other.
    """
    import networkx as nx

    inner: dict[int, int | str] = {}  # the innermost cap of each unit so far
    tree = nx.DiGraph()
    tree.add_node(MODEL)
    for place in sorted(range(len(caps)), key=lambda at: -len(caps[at].units)):
        cap, around = caps[place], {inner.get(unit, MODEL) for unit in caps[place].units}
        if len(around) > 1:
            outer = (caps[at] for at in around if isinstance(at, int))
            other = next(one for one in outer if not {*cap.units} <= {*one.units})
            raise SolverError(
                f"flow needs caps that nest, and {other.name} and {cap.name} overlap; use "
                "lagrangian or ilp"
            )
        tree.add_edges_from((outer, place) for outer in around)
        inner |= dict.fromkeys(cap.units, place)
    return tree


def padded(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return rows as one array, each padded with its last number."""
    longest = max(map(len, rows))
    return np.array([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])


def undominated(values: FloatArray, costs: IntArray) -> tuple[IntArray, IntArray]:
    """Return each unit's options by cost, each worth more than all cheaper ones.

    No optimum within a capacity (a cap) or for a target changes. Under a limit on different budgets
    it would: that excludes bits.

    Parameters
    ----------
    values : ndarray of float64, (n_units, n_options)
    costs : ndarray of int64, (n_options,)
        In any order.

    Returns
    -------
    options : ndarray of int64, (n_units, n_kept)
        Padded with the last one.
    counts : ndarray of int64, (n_units,)

    Examples
    --------
    >>> options, counts = undominated(np.array([[0.5, 0.4, 1.0]]), np.array([4, 5, 8]))
    >>> options.tolist(), counts.tolist()
    ([[0, 2]], [2])
    """
    rows = []
    for worth in values:
        order = np.lexsort((-worth, costs))  # of one cost, the best first
        reached = np.maximum.accumulate(worth[order])
        better = np.ones(order.size, dtype=np.bool_)
        better[1:] = worth[order][1:] > reached[:-1]
        rows.append(order[better])
    counts = np.array([row.size for row in rows], dtype=np.int64)
    return padded(rows), counts
