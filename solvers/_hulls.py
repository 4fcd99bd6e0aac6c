"""Upper convex hulls of all rows at once, and the greedy choice of their segments.

Segments are taken whole, steepest first. One that does not fit within the capacity or a cap is
passed over, and so are the later ones of its row. It takes no linear program and no repair, so it
is the choice that searches start from.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.solvers._choices import Choices


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Steps between neighbours on the hulls, steepest first; ties go to the lower row.

    Attributes
    ----------
    rows : ndarray of int64, (n_segments,)
    before, columns : ndarray of int64, (n_segments,)
        Options that the segment leads from and to.
    bytes : ndarray of int64, (n_segments,)
        Cost, above 0.
    """

    rows: IntArray
    before: IntArray
    columns: IntArray
    bytes: IntArray

    @classmethod
    def of(cls, choices: Choices) -> Segments:
        """Return the segments of all rows."""
        rows, columns = np.nonzero(upper_hull(choices))
        worth, costs = choices.worth[rows, columns], choices.costs[rows, columns]
        same = np.flatnonzero(rows[1:] == rows[:-1])
        gains, bytes_ = np.diff(worth)[same], np.diff(costs)[same]
        # Stable: the segments of a row stay in order, and their slopes fall.
        order = np.argsort(-(gains / bytes_), kind="stable")
        at = same[order]
        return cls(rows=rows[at], before=columns[at], columns=columns[at + 1], bytes=bytes_[order])

    def part(self, places: IntArray) -> Segments:
        """Return some of the segments."""
        return Segments(**{name: array[places] for name, array in vars(self).items()})


def hull_greedy(choices: Choices) -> IntArray:
    """Take whole segments within the limits, as many as fit or as the target needs.

    Returns
    -------
    ndarray of int64, (n_rows,)
        Within capacity and caps; it may miss a target under caps.
    """
    segments = Segments.of(choices)
    segments = segments.part(_fitting(choices, segments))
    if not choices.minimise:
        return _after(choices, segments, segments.rows.size)
    return _least_cost(choices, segments)


def _after(choices: Choices, segments: Segments, count: int) -> IntArray:
    """Return the pick after the first segments."""
    picked = choices.floors.copy()
    picked[segments.rows[:count]] = segments.columns[:count]
    return picked


def _fitting(choices: Choices, segments: Segments) -> IntArray:
    """Return the places of the segments that fit within capacity and caps, in their order."""
    room = [cap.capacity_bytes - cap.load(choices.floors) for cap in choices.caps]
    drawn = []
    for cap in choices.caps:
        place = np.full(choices.n_rows, -1, dtype=np.int64)
        place[cap.rows] = np.arange(cap.rows.size)
        at = place[segments.rows]
        costs = cap.costs[at, segments.columns] - cap.costs[at, segments.before]
        drawn.append(np.where(at >= 0, costs, 0))
    if not choices.minimise:
        room.append(choices.budget_bytes - choices.floor_bytes)
        drawn.append(segments.bytes)
    n_segments = segments.rows.size
    if not room or not n_segments:
        return np.arange(n_segments)
    left, needed = np.array(room), np.stack(drawn)
    beyond = np.any(np.cumsum(needed, axis=1) > left[:, None], axis=0)
    first = int(np.argmax(beyond)) if beyond.any() else n_segments
    taken, stuck = list(range(first)), set()
    left -= needed[:, :first].sum(axis=1)
    for number, row in enumerate(segments.rows[first:].tolist(), start=first):
        if row in stuck:
            continue
        if np.any(needed[:, number] > left):
            stuck.add(row)
        else:
            taken.append(number)
            left -= needed[:, number]
    return np.array(taken, dtype=np.int64)


def _least_cost(choices: Choices, segments: Segments) -> IntArray:
    """Take segments until the target is met; give back those not needed, largest first."""
    counts = range(segments.rows.size)
    taken = bisect_left(
        counts, True, key=lambda count: choices.satisfies(_after(choices, segments, count))
    )
    picked = _after(choices, segments, taken)
    for place in np.argsort(-segments.bytes[:taken], kind="stable").tolist():
        row, column = segments.rows[place], segments.columns[place]
        if picked[row] != column:
            continue  # a later segment of the row stands on this one
        picked[row] = segments.before[place]
        if not choices.satisfies(picked):
            picked[row] = column
    return picked


def upper_hull(choices: Choices) -> BoolArray:
    """Return the options on the upper convex hull of each row, from its cheapest to its best.

    All rows at once: an option under the chord of its two neighbours is under the hull, so all
    such options go in one sweep, until none is left. Options on a chord stay: they can be taken
    where the whole chord does not fit.

    Parameters
    ----------
    choices : Choices

    Returns
    -------
    ndarray of bool, (n_rows, n_columns)
    """
    kept = choices.exists.copy()
    # Beyond the first best option nothing is worth its cost.
    best = np.argmax(choices.worth, axis=1)
    kept &= np.arange(choices.n_columns)[None, :] <= best[:, None]
    rows, columns = np.nonzero(kept)
    worth, costs = choices.worth[rows, columns], choices.costs[rows, columns]
    while True:
        same = rows[1:] == rows[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.diff(worth) / np.diff(costs)
        inner = np.flatnonzero(same[1:] & same[:-1]) + 1
        under = inner[slope[inner - 1] < slope[inner]]
        if under.size == 0:
            break
        stay = np.ones(rows.size, dtype=np.bool_)
        stay[under] = False
        rows, columns, worth, costs = rows[stay], columns[stay], worth[stay], costs[stay]
    hull = np.zeros_like(kept)
    hull[rows, columns] = True
    return hull
