"""From a pick at some price to a good feasible one: reach the target, then move and exchange."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._prices import Prices

ROUNDS = 1000
"""Most improvements of one pick; a safety net, dozens are common."""

TRIED_PAIRS = 64
"""With caps, so many of the best exchanges are checked against them in a round."""


@dataclass(frozen=True, kw_only=True)
class _Moves:
    """Changes of one row each: what they gain and what they use up."""

    rows: IntArray
    columns: IntArray
    gain: FloatArray
    use: FloatArray
    room: float


def best_known(choices: Choices, prices: Prices, deadline: float) -> IntArray | None:
    """The best pick that repairing finds, keeping capacity, target and caps.

    Parameters
    ----------
    choices : Choices
    prices : Prices
        Its starts are repaired.
    deadline : float
        ``time.monotonic()`` at which to stop improving.

    Returns
    -------
    ndarray of int64, (n_rows,), or None
        None when none was found that meets the target within the caps.
    """
    best: IntArray | None = None
    for start in prices.starts:
        if not choices.minimise:
            start = start if choices.satisfies(start) else choices.floors
        elif not choices.satisfies(start):
            reached = _reach_target(choices, start)
            if reached is None:
                continue
            start = reached
        found = _improve(choices, prices, start, deadline)
        if best is None or choices.better(choices.objective(found), choices.objective(best)):
            best = found
        if prices.room(choices, choices.objective(best)) < 0:
            break
    return best


def _improve(choices: Choices, prices: Prices, picked: IntArray, deadline: float) -> IntArray:
    """Make the best single change, else the best exchange of two rows, until there is none."""
    picked = picked.copy()
    for _ in range(ROUNDS):
        if time.monotonic() > deadline:
            break
        room = prices.room(choices, choices.objective(picked))
        if room < 0:
            break
        moves = _moves(choices, prices.worth_keeping(room), picked)
        change = _single(choices, moves, picked) or _pair(choices, moves, picked)
        if change is None:
            break
        tried = picked.copy()
        for row, column in change:
            tried[row] = column
        gained = choices.objective(tried) - choices.objective(picked)
        if not choices.satisfies(tried) or not (gained < 0 if choices.minimise else gained > 0):
            break  # the last digit of a sum: nothing real is left to gain
        picked = tried
    return picked


def _moves(choices: Choices, kept: BoolArray, picked: IntArray) -> _Moves:
    rows, columns = np.nonzero(kept)
    now = picked[rows]
    worth = choices.worth[rows, columns] - choices.worth[rows, now]
    bytes_ = (choices.costs[rows, columns] - choices.costs[rows, now]).astype(np.float64)
    moved = columns != now
    if choices.minimise:
        gain, use = -bytes_, -worth
        room = np.inf
        if choices.target is not None:
            room = choices.value(picked) - choices.target
    else:
        gain, use = worth, bytes_
        room = float(choices.budget_bytes - choices.cost(picked))
    return _Moves(
        rows=rows[moved], columns=columns[moved], gain=gain[moved], use=use[moved], room=room
    )


def _single(choices: Choices, moves: _Moves, picked: IntArray) -> list[tuple[int, int]] | None:
    """The change of one row that gains most."""
    able = (moves.use <= moves.room) & (moves.gain > 0)
    if choices.caps and able.any():
        able &= _within_caps(choices, picked)[moves.rows, moves.columns]
    if not able.any():
        return None
    best = int(np.argmax(np.where(able, moves.gain, -np.inf)))
    return [(int(moves.rows[best]), int(moves.columns[best]))]


def _pair(choices: Choices, moves: _Moves, picked: IntArray) -> list[tuple[int, int]] | None:
    """The exchange of two rows that gains most.

    With the changes sorted by what they use, the partners that a change can still afford are a
    prefix; the best of each prefix is a running maximum. Where that best partner is a change of
    the same row, the pair is passed over.
    """
    order = np.argsort(moves.use, kind="stable")
    rows, gain, use = moves.rows[order], moves.gain[order], moves.use[order]
    if rows.size < 2:
        return None
    running = np.maximum.accumulate(gain)
    fresh = np.concatenate(([True], gain[1:] > running[:-1]))
    leader = np.maximum.accumulate(np.where(fresh, np.arange(gain.size), 0))
    reach = np.searchsorted(use, moves.room - use, side="right") - 1
    partner = leader[np.maximum(reach, 0)]
    total = gain + gain[partner]
    able = (reach >= 0) & (rows[partner] != rows) & (total > 0)
    if not able.any():
        return None
    columns = moves.columns[order]
    total = np.where(able, total, -np.inf)
    tried = [int(np.argmax(total))]
    if choices.caps:
        tried = np.argsort(-total, kind="stable")[:TRIED_PAIRS].tolist()
    for one in tried:
        if not able[one]:
            break
        other = int(partner[one])
        change = [(int(rows[one]), int(columns[one])), (int(rows[other]), int(columns[other]))]
        if not choices.caps or _caps_hold(choices, picked, change):
            return change
    return None


def _caps_hold(choices: Choices, picked: IntArray, change: list[tuple[int, int]]) -> bool:
    tried = picked.copy()
    for row, column in change:
        tried[row] = column
    return choices.satisfies_caps(tried)


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
