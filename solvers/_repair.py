"""From a pick at some price to a good feasible one: reach the target, then move and exchange."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._prices import Prices

ROUNDS = 1000
"""Most improvements of one pick; a safety net, dozens are common."""

TRIED_PAIRS = 64
"""So many of the best exchanges are checked against the caps in a round."""


def best_known(choices: Choices, prices: Prices, deadline: float) -> IntArray | None:
    """The best pick that repairing finds, keeping capacity, target and caps.

    Parameters
    ----------
    choices : Choices
    prices : Prices
        Its start is repaired.
    deadline : float
        ``time.monotonic()`` at which to stop improving.

    Returns
    -------
    ndarray of int64, (n_rows,), or None
        None when none was found that meets the target within the caps.
    """
    picked: IntArray | None = prices.start
    if not choices.satisfies(prices.start):
        picked = _reach_target(choices, prices.start) if choices.minimise else choices.floors
    if picked is None:
        return None
    for _ in range(ROUNDS):
        if time.monotonic() > deadline:
            break
        room = prices.room(choices, choices.objective(picked))
        if room < 0:
            break
        tried = _changed(choices, prices.worth_keeping(room), picked)
        if tried is None or not choices.satisfies(tried):
            break
        if not choices.better(choices.objective(tried), choices.objective(picked)):
            break  # the last digit of a sum: nothing real is left to gain
        picked = tried
    return picked


def _changed(choices: Choices, kept: BoolArray, picked: IntArray) -> IntArray | None:
    """The pick after the best change of one row, else after the best exchange of two."""
    kept[choices.index, picked] = False
    rows, columns = np.nonzero(kept)
    now = picked[rows]
    worth = choices.worth[rows, columns] - choices.worth[rows, now]
    bytes_ = (choices.costs[rows, columns] - choices.costs[rows, now]).astype(np.float64)
    if choices.minimise:
        gain, use = -bytes_, -worth
        room = np.inf if choices.target is None else choices.value(picked) - choices.target
    else:
        gain, use, room = worth, bytes_, float(choices.budget_bytes - choices.cost(picked))
    able = (use <= room) & (gain > 0)
    if choices.caps and able.any():
        able &= _within_caps(choices, picked)[rows, columns]
    if able.any():
        best = int(np.argmax(np.where(able, gain, -np.inf)))
        changed = picked.copy()
        changed[rows[best]] = columns[best]
        return changed
    order = np.argsort(use, kind="stable")
    rows, columns, gain, use = rows[order], columns[order], gain[order], use[order]
    for one, other in _pairs(rows, gain, use, room):
        changed = picked.copy()
        changed[rows[[one, other]]] = columns[[one, other]]
        if choices.satisfies_caps(changed):
            return changed
    return None


def _pairs(
    rows: IntArray, gain: FloatArray, use: FloatArray, room: float
) -> Iterator[tuple[int, int]]:
    """The exchanges of two rows that gain most, of changes sorted by what they use.

    The partners that a change can still afford are a prefix; the best of each prefix is a running
    maximum. Where that best partner is a change of the same row, the pair is passed over.
    """
    if rows.size < 2:
        return
    running = np.maximum.accumulate(gain)
    fresh = np.concatenate(([True], gain[1:] > running[:-1]))
    leader = np.maximum.accumulate(np.where(fresh, np.arange(gain.size), 0))
    reach = np.searchsorted(use, room - use, side="right") - 1
    partner = leader[np.maximum(reach, 0)]
    total = gain + gain[partner]
    able = (reach >= 0) & (rows[partner] != rows) & (total > 0)
    for one in np.argsort(np.where(able, -total, np.inf), kind="stable")[:TRIED_PAIRS].tolist():
        if able[one]:
            yield one, int(partner[one])


def _within_caps(choices: Choices, picked: IntArray) -> BoolArray:
    """Which options no cap forbids when only their row changes, ``(n_rows, n_columns)``."""
    able: BoolArray = np.ones(choices.worth.shape, dtype=np.bool_)
    for cap in choices.caps:
        spare = cap.capacity_bytes - cap.load(picked)
        now = cap.costs[np.arange(cap.rows.size), picked[cap.rows]]
        able[cap.rows] &= cap.costs - now[:, None] <= spare
    return able


def _reach_target(choices: Choices, start: IntArray) -> IntArray | None:
    """Raise rows within the caps, most worth per byte first, until the target is met."""
    picked = start.copy()
    if not choices.satisfies_caps(picked):
        picked = choices.floors.copy()
    for _ in range(choices.n_rows * choices.n_columns):
        if choices.satisfies(picked):
            return picked
        able = choices.exists & _within_caps(choices, picked)
        now = choices.index, picked
        gain = np.where(able, choices.worth - choices.worth[now][:, None], -np.inf)
        cost = choices.costs - choices.costs[now][:, None]
        rate = np.where((gain > 0) & (cost > 0), gain / np.maximum(cost, 1), -np.inf)
        # A gain without a cost is possible where a dearer option is worth less.
        rate = np.where((gain > 0) & (cost <= 0), np.inf, rate)
        row, column = divmod(int(np.argmax(rate)), choices.n_columns)
        if not rate[row, column] > 0:
            return None
        picked[row] = column
    return None
