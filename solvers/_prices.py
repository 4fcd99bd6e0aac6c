"""Best prices of a byte and of each cap's byte, and choices at them.

Without caps the best price is the one of `dual_bound`. With caps it comes from the dual of the
linear relaxation, which has the same optimum (Geoffrion, 1974: a multiple-choice row has the
integrality property). Only options on the upper hull of a unit take part.

Searches start from the choice at the best price and from `hull_greedy`.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.accounting.rounding import round_up_to_grain
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import AllocationProblem, Solver, dual_bound
from kvalloc.problem.bounds import NOISE
from kvalloc.solvers._rules import Rule
from kvalloc.solvers.proportional import Proportional
from kvalloc.solvers.uniform import Uniform


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Steps between neighbours on the hulls, steepest first; ties go to the lower unit."""

    units: IntArray
    before: IntArray
    after: IntArray
    bytes: IntArray

    @classmethod
    def of(cls, problem: AllocationProblem) -> Segments:
        units, columns = np.nonzero(upper_hull(problem))
        worth, costs = problem.worth[units, columns], problem.costs[units, columns]
        same = np.flatnonzero(units[1:] == units[:-1])
        gains, bytes_ = np.diff(worth)[same], np.diff(costs)[same]
        # Stable: the segments of a unit stay in order, and their slopes fall.
        order = np.argsort(-(gains / bytes_), kind="stable")
        at = same[order]
        return cls(units=units[at], before=columns[at], after=columns[at + 1], bytes=bytes_[order])

    def part(self, places: IntArray) -> Segments:
        return Segments(**{name: array[places] for name, array in vars(self).items()})


def hull_greedy(problem: AllocationProblem) -> IntArray:
    """Take whole hull segments, steepest first, until no more fit or the target is met.

    A segment beyond the capacity or a cap is passed over, with all later ones of its unit; for a
    target, superfluous ones are given back, largest first. It may miss a target under caps.
    """
    segments = Segments.of(problem)
    segments = segments.part(_fitting(problem, segments))
    if problem.target is None:
        return _after(problem, segments, segments.units.size)
    return _least_cost(problem, segments)


def _after(problem: AllocationProblem, segments: Segments, count: int) -> IntArray:
    choice = np.zeros(problem.n_units, dtype=np.int64)
    choice[segments.units[:count]] = segments.after[:count]
    return choice


def _fitting(problem: AllocationProblem, segments: Segments) -> IntArray:
    floors = np.zeros(problem.n_units, dtype=np.int64)
    room = [cap.capacity_bytes - problem.cost(floors, cap.units) for cap in problem.caps]
    drawn = [np.where(np.isin(segments.units, c.units), segments.bytes, 0) for c in problem.caps]
    if problem.target is None:
        room.append(problem.spendable_bytes - problem.min_cost_bytes)
        drawn.append(segments.bytes)
    n_segments = segments.units.size
    if not room or not n_segments:
        return np.arange(n_segments)
    left, needed = np.array(room), np.stack(drawn)
    over = np.any(np.cumsum(needed, axis=1) > left[:, None], axis=0)
    first = int(np.argmax(over)) if over.any() else n_segments
    taken, stuck = list(range(first)), set()
    left -= needed[:, :first].sum(axis=1)
    for number, unit in enumerate(segments.units[first:].tolist(), start=first):
        if unit in stuck:
            continue
        if np.any(needed[:, number] > left):
            stuck.add(unit)
        else:
            taken.append(number)
            left -= needed[:, number]
    return np.array(taken, dtype=np.int64)


def _least_cost(problem: AllocationProblem, segments: Segments) -> IntArray:
    counts = range(segments.units.size)
    taken = bisect_left(
        counts, True, key=lambda count: problem.satisfies(_after(problem, segments, count))
    )
    choice = _after(problem, segments, taken)
    for place in np.argsort(-segments.bytes[:taken], kind="stable").tolist():
        unit, option = segments.units[place], segments.after[place]
        if choice[unit] != option:
            continue  # a later segment of the unit stands on this one
        choice[unit] = segments.before[place]
        if not problem.satisfies(choice):
            choice[unit] = option
    return choice


def upper_hull(problem: AllocationProblem) -> BoolArray:
    """Return the mask of each unit's upper convex hull, from its cheapest option to its best.

    Options under the chord of their neighbours go in one sweep, until none is left; options on a
    chord stay, since they may fit where the full chord does not.
    """
    # Beyond the first best option nothing is worth its cost.
    best = np.argmax(problem.worth, axis=1)
    kept: BoolArray = problem.exists & (np.arange(problem.n_options)[None, :] <= best[:, None])
    units, columns = np.nonzero(kept)
    worth, costs = problem.worth[units, columns], problem.costs[units, columns]
    while True:
        same = units[1:] == units[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.diff(worth) / np.diff(costs)
        inner = np.flatnonzero(same[1:] & same[:-1]) + 1
        under = inner[slope[inner - 1] < slope[inner]]
        if under.size == 0:
            break
        stay = np.ones(units.size, dtype=np.bool_)
        stay[under] = False
        units, columns, worth, costs = units[stay], columns[stay], worth[stay], costs[stay]
    hull = np.zeros(kept.shape, dtype=np.bool_)
    hull[units, columns] = True
    return hull


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of a byte, the bound they prove, and the loss of every option at them.

    ``relaxed_bytes`` is the bound on the cost before rounding and raising to the floors. ``loss``,
    (n_units, n_options), is the net value below a unit's best, inf in the padding. ``start`` is
    feasible if possible.
    """

    problem: AllocationProblem
    bound: float
    relaxed_bytes: float
    per_byte: float
    per_cap: tuple[float, ...]
    loss: FloatArray
    start: IntArray

    def room(self, known: float, gap: float = 0.0) -> float:
        """Return the largest loss of an option in a better choice; negative if none can exist.

        Improvements below ``gap``, a share, are ignored.
        """
        tolerance = self.tolerance(known, gap)
        if self.problem.target is None:
            return self.bound - known - tolerance + NOISE * max(1.0, abs(known))
        grain = self.problem.lattice_bytes
        better = known - max(grain, tolerance)
        return self.per_byte * (better - self.relaxed_bytes + 1e-6 * grain)

    def tolerance(self, known: float, gap: float) -> float:
        return gap * min(abs(known), abs(self.bound)) if known * self.bound > 0 else 0.0

    def bound_outside(self, known: float, gap: float) -> float:
        """Return a bound on choices that lose more than the room."""
        tolerance = self.tolerance(known, gap)
        if self.problem.target is None:
            return min(self.bound, known + tolerance)
        # Costs are whole grains: none is between the known one and the next.
        return max(self.bound, known - tolerance * (tolerance > self.problem.lattice_bytes))

    def bound_beyond(self, loss: float) -> float:
        """Return a bound on choices that lose this much."""
        if self.problem.target is None:
            return self.bound - loss
        return _rounded_up(self.problem, self.relaxed_bytes + loss / self.per_byte)

    def worth_keeping(self, room: float) -> BoolArray:
        """Return the mask of options with a loss within the room."""
        kept: BoolArray = (self.loss <= max(room, 0.0) + NOISE) & self.problem.exists
        return kept


def _rounded_up(problem: AllocationProblem, relaxed_bytes: float) -> float:
    """Return the smallest possible cost not below a relaxed one."""
    floors = problem.min_cost_bytes
    return float(floors + round_up_to_grain(relaxed_bytes - floors, problem.lattice_bytes))


def best_prices(problem: AllocationProblem, deadline: float = math.inf) -> Prices:
    """Return the prices of the tightest Lagrangian bound.

    Limits on distinct budgets are ignored; the bound holds with them. After ``deadline`` caps have
    no price.
    """
    floors = np.zeros(problem.n_units, dtype=np.int64)
    if problem.target is not None and problem.meets_target(problem.objective_value(floors)):
        return _prices_of_floors(problem, floors)
    if not problem.caps:
        dual = dual_bound(problem)
        return prices_at(problem, dual.multiplier, np.zeros(0), dual.choice)
    if problem.target is None and problem.fits(free := np.argmax(problem.worth, axis=1)):
        return prices_at(problem, 0.0, np.zeros(len(problem.caps)), free)
    return _by_linear_program(problem, upper_hull(problem), deadline)


def _prices_of_floors(problem: AllocationProblem, floors: IntArray) -> Prices:
    """Return prices if only the cost counts: losses are costs above the cheapest."""
    loss = np.where(problem.exists, problem.costs - problem.costs[:, :1], np.inf)
    cheapest = float(problem.min_cost_bytes)
    return Prices(
        problem=problem,
        bound=cheapest,
        relaxed_bytes=cheapest,
        per_byte=1.0,
        per_cap=(0.0,) * len(problem.caps),
        loss=loss,
        start=floors,
    )


def prices_at(
    problem: AllocationProblem, per_byte: float, per_cap: FloatArray, start: IntArray
) -> Prices:
    """Return the Lagrangian bound and the losses at prices, one for each cap or none."""
    # Costs above the floors, so that large costs at small prices do not eat the digits.
    above = problem.costs - problem.costs[:, :1]
    net = problem.worth - per_byte * above
    paid = 0.0
    for price, cap in zip(per_cap.tolist(), problem.caps, strict=False):
        units = list(cap.units)
        net[units] -= price * above[units]
        paid += price * (cap.capacity_bytes - int(problem.costs[units, 0].sum()))
    best = net.max(axis=1)
    best_worth = math.fsum(best) + paid
    if problem.target is None:
        relaxed = 0.0
        bound = best_worth + per_byte * (problem.spendable_bytes - problem.min_cost_bytes)
    else:
        # Not clipped at the floors: losses add to it even where it lies below them.
        relaxed = problem.min_cost_bytes + (problem.lowest_accepted_value - best_worth) / per_byte
        bound = _rounded_up(problem, relaxed)
    return Prices(
        problem=problem,
        bound=bound,
        relaxed_bytes=relaxed,
        per_byte=per_byte,
        per_cap=tuple(per_cap.tolist()) or (0.0,) * len(problem.caps),
        loss=best[:, None] - net,
        start=start,
    )


def _by_linear_program(problem: AllocationProblem, among: BoolArray, deadline: float) -> Prices:
    """Return prices of the linear relaxation over some options, its solution rounded down."""
    from scipy import sparse
    from scipy.optimize import linprog

    rows, columns = np.nonzero(among)
    n, minimise = rows.size, problem.target is not None
    costs = problem.costs[rows, columns].astype(np.float64)
    worth = problem.worth[rows, columns]
    worth_scale = max(float(np.abs(worth).max()), 1e-300)
    cost_scale = max(float(costs.max()), 1.0)
    limit = problem.spendable_bytes / cost_scale
    if minimise:
        limit = -problem.lowest_accepted_value / worth_scale
    limits = np.array([limit, *(cap.capacity_bytes / cost_scale for cap in problem.caps)])
    one = sparse.csr_matrix((np.ones(n), (rows, np.arange(n))), shape=(problem.n_units, n))
    goods = (-worth / worth_scale, costs / cost_scale)
    limited = [goods[1 - int(minimise)]]  # the capacity or the target, then the caps
    limited += [np.where(np.isin(rows, cap.units), goods[1], 0.0) for cap in problem.caps]
    answer = linprog(
        goods[int(minimise)],
        A_ub=sparse.csr_matrix(np.stack(limited)),
        b_ub=limits,
        A_eq=one,
        b_eq=np.ones(problem.n_units),
        method="highs-ds",
        options={"time_limit": min(1e9, max(0.01, deadline - time.monotonic()))},
    )
    if answer.status == 2 and minimise:
        if np.array_equal(among, problem.exists):
            raise _beyond_caps(problem, deadline)
        # Too few options to meet the target; with all of them it may be met.
        return _by_linear_program(problem, problem.exists, deadline)
    if answer.status != 0:  # no time, or it does not know: any prices give a bound
        dual = dual_bound(problem)
        floors = np.zeros(problem.n_units, dtype=np.int64)
        return prices_at(problem, dual.multiplier, np.zeros(len(problem.caps)), floors)
    duals = np.maximum(0.0, -answer.ineqlin.marginals)
    if minimise:  # duals are bytes per unit of worth: turn them round
        per_byte = worth_scale / (max(float(duals[0]), 1e-12) * cost_scale)
        per_cap = duals[1:] * per_byte
    else:
        per_byte = float(duals[0]) * worth_scale / cost_scale
        per_cap = duals[1:] * worth_scale / cost_scale
    shares = np.zeros(problem.worth.shape)
    shares[rows, columns] = answer.x
    # The cheapest option that a unit takes a share of: all costs fall, so capacity and caps hold.
    down = np.argmax(shares > 1e-7, axis=1).astype(np.int64)
    return prices_at(problem, per_byte, per_cap, down)


def _beyond_caps(problem: AllocationProblem, deadline: float) -> InfeasibleError:
    free = problem.with_capacity(problem.max_cost_bytes)
    prices = best_prices(free, deadline)
    priced = [cap.name for cap, price in zip(free.caps, prices.per_cap, strict=True) if price > 0]
    tight = priced or [cap.name for cap in free.caps]
    names = ", ".join(tight[:5]) + (f" and {len(tight) - 5} more" if len(tight) > 5 else "")
    nearest = free.objective_value(prices.start)
    return InfeasibleError(
        f"a target of {problem.target:.15g} cannot be met within the caps of {names}; "
        f"{nearest:.15g} can; raise the caps or ask for that",
        nearest=nearest,
    )


ROUNDS = 2000
"""Largest number of improvements of one choice; dozens are common."""

NEAR = 4096
"""Number of options that a change may lead to: the smallest losses at the prices."""

PAIRED = 128
"""Number of options exchanged in pairs: the smallest losses at the prices."""

TRIED = 64
"""Best changes of a round that are checked against capacity, target and caps."""

MARGIN = 1e-13
"""Relative gain, to the larger of 1 and the sum, below which rounding may be the cause."""


class SameBytes(Uniform):
    """Equal bytes for every unit, at least the entries of equal budgets at one width."""

    takes_bits: ClassVar[bool] = True

    def rule(self, problem: AllocationProblem, deadline: float) -> tuple[Rule, int]:
        costs = np.unique(problem.costs[problem.exists])
        rows = list(zip(problem.costs, problem.option_counts.tolist(), strict=True))

        def same(place: int) -> IntArray:
            within = [row[:n].searchsorted(costs[place], side="right") for row, n in rows]
            return np.maximum(np.array(within, dtype=np.int64) - 1, 0)

        return same, costs.size - 1


def equal_choices(problem: AllocationProblem) -> list[IntArray]:
    """Return equal budgets (equal bytes with bits), if they satisfy everything."""
    return _choices_of(problem, Uniform() if problem.bits is None else SameBytes())


def rule_choices(problem: AllocationProblem) -> list[IntArray]:
    """Return equal and proportional budgets, if they satisfy everything."""
    return [*equal_choices(problem), *_choices_of(problem, Proportional())]


def _choices_of(problem: AllocationProblem, rule: Solver) -> list[IntArray]:
    if rule.can_solve(problem) is True:
        with contextlib.suppress(InfeasibleError, SolverError):
            return [rule.solve(problem).choice]
    return []


def best_of(problem: AllocationProblem, *choices: IntArray) -> IntArray | None:
    """Return the best choice; None if none satisfies everything."""
    known = [choice for choice in choices if problem.satisfies(choice)]
    return max(known, key=lambda choice: _merit(problem, choice), default=None)


def best_known(
    problem: AllocationProblem, prices: Prices, deadline: float, *known: IntArray
) -> IntArray | None:
    """Return the best choice that repair reaches from two starts, or a better known one, if any."""
    starts = (prices.start, hull_greedy(problem))
    repaired = (_repaired(problem, prices, start, deadline) for start in starts)
    return best_of(problem, *repaired, *known)


def _repaired(
    problem: AllocationProblem, prices: Prices, start: IntArray, deadline: float
) -> IntArray:
    choice = start
    for _ in range(ROUNDS):
        if time.monotonic() > deadline or not problem.satisfies(choice):
            break
        room = prices.room(problem.objective(choice))
        improved = None if room < 0 else _improved(problem, prices, choice, room)
        if improved is None:
            break
        choice = improved
    return choice


def _improved(
    problem: AllocationProblem, prices: Prices, choice: IntArray, room: float
) -> IntArray | None:
    """Return the choice after the best change of one unit, else of two, or None.

    No option loses more than ``room``.
    """
    kept = prices.worth_keeping(room)
    kept[problem.units, choice] = False
    units, options = np.nonzero(kept)
    lost = prices.loss[units, options] - prices.loss[units, choice[units]]
    near = np.argsort(lost, kind="stable")[:NEAR]
    units, options = units[near], options[near]
    gained = problem.gains(choice[units], options, units)
    bytes_ = problem.costs[units, options] - problem.costs[units, choice[units]]
    pairs = np.stack(np.triu_indices(min(units.size, PAIRED), k=1), axis=1)
    pairs = pairs[units[pairs[:, 0]] != units[pairs[:, 1]]]
    for moves in (np.arange(units.size)[:, None], pairs):
        scores = _scores(problem, choice, gained[moves].sum(axis=1), bytes_[moves].sum(axis=1))
        if moves is not pairs:
            for cap in problem.caps:
                too_large = bytes_ > cap.capacity_bytes - problem.cost(choice, cap.units)
                scores[too_large & np.isin(units, cap.units)] = -np.inf
        for best in np.argsort(-scores, kind="stable")[:TRIED].tolist():
            if not np.isfinite(scores[best]):
                break
            changed = choice.copy()
            changed[units[moves[best]]] = options[moves[best]]
            if problem.satisfies(changed) and _merit(problem, changed) > _merit(problem, choice):
                return changed
    return None


def _merit(problem: AllocationProblem, choice: IntArray) -> tuple[float, float]:
    """Return the objective, higher is better; of equal costs the higher value."""
    value = problem.objective_value(choice)
    return (value, 0.0) if problem.target is None else (-float(problem.cost(choice)), value)


def _scores(
    problem: AllocationProblem, choice: IntArray, gained: FloatArray, bytes_: IntArray
) -> FloatArray:
    """Return merits of changes; -inf without an improvement."""
    now = problem.objective_value(choice)
    values, margin = now + gained, MARGIN * max(1.0, abs(now))
    if problem.target is None:
        able = (bytes_ <= problem.spendable_bytes - problem.cost(choice)) & (gained > margin)
        return np.where(able, values, -np.inf)
    able = (bytes_ < 0) | ((bytes_ == 0) & (gained > margin))
    able &= values >= problem.lowest_accepted_value - margin
    # Bytes first; among equal ones the change that leaves most to give back.
    spread = float(np.ptp(values)) if values.size else 0.0
    return np.where(
        able, -bytes_ + 0.5 * (values - values.min(initial=0.0)) / (spread or 1.0), -np.inf
    )
