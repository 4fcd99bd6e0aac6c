"""Upper convex hulls of all units at once, and the greedy choice of their segments.

Segments are taken whole, steepest first. One that does not fit within the capacity or a cap is
passed over, and so are the later ones of its unit. It takes no linear program and no repair, so it
is the choice that searches start from.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.problem import AllocationProblem


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Steps between neighbours on the hulls, steepest first; ties go to the lower unit.

    Attributes
    ----------
    units : ndarray of int64, (n_segments,)
    before, after : ndarray of int64, (n_segments,)
        Options that the segment leads from and to.
    bytes : ndarray of int64, (n_segments,)
        Cost, above 0.
    """

    units: IntArray
    before: IntArray
    after: IntArray
    bytes: IntArray

    @classmethod
    def of(cls, problem: AllocationProblem) -> Segments:
        """Return the segments of all units."""
        units, columns = np.nonzero(upper_hull(problem))
        worth, costs = problem.worth[units, columns], problem.costs[units, columns]
        same = np.flatnonzero(units[1:] == units[:-1])
        gains, bytes_ = np.diff(worth)[same], np.diff(costs)[same]
        # Stable: the segments of a unit stay in order, and their slopes fall.
        order = np.argsort(-(gains / bytes_), kind="stable")
        at = same[order]
        return cls(units=units[at], before=columns[at], after=columns[at + 1], bytes=bytes_[order])

    def part(self, places: IntArray) -> Segments:
        """Return some of the segments."""
        return Segments(**{name: array[places] for name, array in vars(self).items()})


def hull_greedy(problem: AllocationProblem) -> IntArray:
    """Take whole segments within the limits until no more fit or the target is met.

    Returns
    -------
    ndarray of int64, (n_units,)
        Within capacity and caps; it may miss a target under caps.
    """
    segments = Segments.of(problem)
    segments = segments.part(_fitting(problem, segments))
    if problem.target is None:
        return _after(problem, segments, segments.units.size)
    return _least_cost(problem, segments)


def _after(problem: AllocationProblem, segments: Segments, count: int) -> IntArray:
    """Return the choice after the first segments."""
    choice = np.zeros(problem.n_units, dtype=np.int64)
    choice[segments.units[:count]] = segments.after[:count]
    return choice


def _fitting(problem: AllocationProblem, segments: Segments) -> IntArray:
    """Return the places of the segments that fit within capacity and caps, in their order."""
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
    """Take segments until the target is met; give back those not needed, largest first."""
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
    """Return the options on the upper convex hull of each unit, from its cheapest to its best.

    All units at once: an option under the chord of its two neighbours is under the hull, so all
    such options go in one sweep, until none is left. Options on a chord stay: they can be taken
    if the whole chord does not fit.

    Returns
    -------
    ndarray of bool, (n_units, n_options)
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
