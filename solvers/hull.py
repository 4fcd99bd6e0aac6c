"""Convex hull and marginal greedy: LU-KV's rule, with the bound of its linear relaxation."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.problem import AllocationProblem, SameBudget, SideConstraint, Solution
from kvalloc.solvers._choices import Choices
from kvalloc.solvers._coarse import ByParts
from kvalloc.solvers._prices import best_prices, upper_hull


class Hull(ByParts):
    """Upper convex hull of each unit's curve, then the steepest hull segment first.

    Segments are taken whole, by falling gain per byte over all units, while the capacity lasts or
    until the target is met. The first one that does not fit is left out and later ones that do
    fit are still taken; for a target, segments that are not needed are given back. Taking the
    first one in part would solve the linear relaxation exactly. Its optimum is that of the
    Lagrangian dual, and the bound. Optimal is claimed only when the bound meets the objective.

    References
    ----------
    LU-KV: convex hull of offline utility curves and marginal greedy (the nearest prior art).
    Dyer: An O(n) algorithm for the multiple-choice knapsack linear program (1984); Zemel (1984);
    Sinha, Zoltners: The multiple-choice knapsack problem (1979).
    """

    name: ClassVar[str] = "hull"
    summary: ClassVar[str] = "convex hull of each curve and marginal greedy, with the LP bound"
    reference: ClassVar[str] = "LU-KV; Dyer 1984; Zemel 1984"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset({SameBudget})

    def solve_whole(self, problem: AllocationProblem, deadline: float) -> Solution:
        """Return the hull greedy's choice and the bound of the relaxation; see the base class."""
        choices = Choices.of(problem)
        prices = best_prices(choices)
        segments = _segments(choices)
        picked = (
            _least_cost(choices, segments) if choices.minimise else _most_value(choices, segments)
        )
        return Solution.of(
            problem,
            choices.expand(picked),
            bound=prices.bound,
            prices=(prices.per_byte,),
            detail=f"{segments.rows.size:,} hull segments",
        )


@dataclass(frozen=True, kw_only=True)
class _Segments:
    """Steps between neighbours on the hulls, steepest first; ties go to the lower row.

    Attributes
    ----------
    rows : ndarray of int64, (n_segments,)
    columns : ndarray of int64, (n_segments,)
        Option that the segment leads to.
    gains : ndarray of float64, (n_segments,)
        Worth, above 0.
    bytes : ndarray of int64, (n_segments,)
        Cost, above 0.
    """

    rows: IntArray
    columns: IntArray
    gains: FloatArray
    bytes: IntArray


def _segments(choices: Choices) -> _Segments:
    rows, columns = np.nonzero(upper_hull(choices))
    worth, costs = choices.worth[rows, columns], choices.costs[rows, columns]
    same = rows[1:] == rows[:-1]
    gains, bytes_ = np.diff(worth)[same], np.diff(costs)[same]
    rows, columns = rows[1:][same], columns[1:][same]
    # Stable: the segments of a row stay in order, and their slopes fall.
    order = np.argsort(-(gains / bytes_), kind="stable")
    return _Segments(
        rows=rows[order], columns=columns[order], gains=gains[order], bytes=bytes_[order]
    )


def _most_value(choices: Choices, segments: _Segments) -> IntArray:
    """Take whole segments while they fit; a row whose segment did not fit takes no later one."""
    picked = choices.floors.copy()
    left = choices.budget_bytes - choices.floor_bytes
    fitting = int(np.searchsorted(np.cumsum(segments.bytes), left, side="right"))
    picked[segments.rows[:fitting]] = segments.columns[:fitting]
    left -= int(segments.bytes[:fitting].sum())
    stuck: set[int] = set()
    least = int(segments.bytes.min()) if segments.bytes.size else 1
    rest = (part[fitting:].tolist() for part in (segments.rows, segments.columns, segments.bytes))
    for row, column, bytes_ in zip(*rest, strict=True):
        if left < least:
            break
        if bytes_ > left:
            stuck.add(row)
        elif row not in stuck:
            picked[row] = column
            left -= bytes_
    return picked


def _least_cost(choices: Choices, segments: _Segments) -> IntArray:
    """Take whole segments until the target is met; give back those not needed, largest first."""

    def after(count: int) -> IntArray:
        picked = choices.floors.copy()
        picked[segments.rows[:count]] = segments.columns[:count]
        return picked

    counts = range(segments.rows.size)
    taken = bisect_left(counts, True, key=lambda count: choices.satisfies(after(count)))
    picked = after(taken)
    before, earlier = [], choices.floors.copy()
    for row, column in zip(segments.rows[:taken], segments.columns[:taken], strict=True):
        before.append(int(earlier[row]))
        earlier[row] = column
    for place in np.argsort(-segments.bytes[:taken], kind="stable").tolist():
        row = int(segments.rows[place])
        if picked[row] != segments.columns[place]:
            continue  # a later segment of the row stands on this one
        picked[row] = before[place]
        if not choices.satisfies(picked):
            picked[row] = segments.columns[place]
    return picked
