"""Loss curves that are right around a choice: measured there, and shaped as before elsewhere.

Measured are the neighbours of the choice: for each unit one option that costs less and one that
costs more, with all other units as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvalloc.accounting import BoolArray, FloatArray, IntArray
from kvalloc.problem import AllocationProblem

FACTOR = 1.6
"""A neighbour keeps so many times the evictable entries, or as many times fewer."""

LEAST_SHARE = 0.03
"""... but is at least this share of all evictable entries away."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Options to measure, one a row, each with all other units at the choice.

    Attributes
    ----------
    units, options : ndarray of int64, (n_figures,)
        Which unit, and which of its options.
    """

    units: IntArray
    options: IntArray

    @property
    def size(self) -> int:
        """How many."""
        return int(self.units.size)


def neighbours(problem: AllocationProblem, choice: IntArray) -> Figures:
    """The options around a choice, a step below and a step above in each unit.

    Only options that differ from the choice in tokens alone are neighbours of it; where options
    also differ in policy or bits (`kinds_of`), the option of each other kind that costs about as
    much is one, too.

    Parameters
    ----------
    problem : AllocationProblem
    choice : ndarray of int64, (n_units,)

    Returns
    -------
    Figures
        By unit, then by option.
    """
    kinds = kinds_of(problem)
    evictable = problem.context_tokens - problem.protected_tokens
    units: list[int] = []
    options: list[int] = []
    for unit, chosen in enumerate(choice.tolist()):
        count = int(problem.option_counts[unit])
        kept = (problem.tokens[unit, :count] - problem.protected_tokens).astype(np.float64)
        own = kinds[unit, :count]
        step = LEAST_SHARE * evictable
        wanted = (
            min(kept[chosen] / FACTOR, kept[chosen] - step),
            max(kept[chosen] * FACTOR, kept[chosen] + step),
        )
        found = {_nearest(kept, own == own[chosen], where) for where in wanted}
        costs = problem.costs[unit, :count].astype(np.float64)
        found |= {_nearest(costs, own == kind, costs[chosen]) for kind in set(own.tolist())}
        found.discard(chosen)
        units += [unit] * len(found)
        options += sorted(found)
    return Figures(units=np.array(units, dtype=np.int64), options=np.array(options, dtype=np.int64))


def most_undecided(
    problem: AllocationProblem, choice: IntArray, figures: Figures, price: float, most: int
) -> Figures:
    """The figures that may change the solution most easily.

    At a price of a byte, changing a unit from its chosen option to another one loses some value;
    the less it loses, the less it is decided.

    Parameters
    ----------
    problem : AllocationProblem
    choice : ndarray of int64, (n_units,)
    figures : Figures
    price : float
        Value of a byte.
    most : int
        How many to keep.

    Returns
    -------
    Figures
        In their order.
    """
    if figures.size <= most:
        return figures
    units, chosen = figures.units, choice[figures.units]
    costs = problem.costs[units, chosen] - problem.costs[units, figures.options]
    lost = expected_changes(problem, choice, figures) - price * costs
    kept = np.sort(np.argsort(lost, kind="stable")[:most])
    return Figures(units=units[kept], options=figures.options[kept])


def expected_changes(problem: AllocationProblem, choice: IntArray, figures: Figures) -> FloatArray:
    """What the curves say that each figure adds to the loss of the choice, ``(n_figures,)``."""
    units, values = figures.units, problem.values
    changes: FloatArray = values[units, choice[units]] - values[units, figures.options]
    return problem.weights[units] * changes


def kinds_of(problem: AllocationProblem) -> IntArray:
    """What else than tokens an option is, as a number, ``(n_units, n_options)``.

    Options of one kind differ in their tokens only.
    """
    kinds: IntArray = 100 * policies_at(problem) + bits_at(problem)
    return kinds


def bits_at(problem: AllocationProblem) -> IntArray:
    """Bit width of each option, ``(n_units, n_options)``; 16 where there is one."""
    return np.full_like(problem.tokens, 16) if problem.bits is None else problem.bits


def policies_at(problem: AllocationProblem) -> IntArray:
    """Place of the policy behind each option, ``(n_units, n_options)``; 0 where there is one."""
    return np.zeros_like(problem.tokens) if problem.policies is None else problem.policies


def _nearest(sizes: FloatArray, allowed: BoolArray, where: float) -> int:
    distance = np.where(allowed, np.abs(sizes - where), np.inf)
    return int(np.argmin(distance))


@dataclass(frozen=True, kw_only=True)
class Region(Figures):
    """The options of each unit that measurements around a choice say something about.

    Attributes
    ----------
    units, options : ndarray of int64, (n_allowed,)
        Sorted by unit, then option.
    shares : ndarray of float64, (n_allowed, n_figures)
        Change of the loss at such an option, as a sum over measured figures of these shares.
    """

    shares: FloatArray


def region(
    problem: AllocationProblem, choice: IntArray, figures: Figures, reach: float = 1.0
) -> Region:
    """What lies between the choice and its measured neighbours, and how it is interpolated.

    Between the choice and a neighbour the loss changes as the curve so far does, scaled to end at
    what was measured; where that curve does not go one way in between, in proportion to the
    tokens. Beyond the neighbours nothing was measured and nothing is offered.

    Parameters
    ----------
    problem : AllocationProblem
        Its values are the curves so far.
    choice : ndarray of int64, (n_units,)
    figures : Figures
    reach : float
        How far towards its neighbours a unit may move, above 0 and up to 1.

    Returns
    -------
    Region
    """
    kinds, one = kinds_of(problem), np.eye(figures.size)
    rows: dict[tuple[int, int], FloatArray] = {}
    for unit, chosen in enumerate(choice.tolist()):
        rows[unit, chosen] = np.zeros(figures.size)
    for figure in range(figures.size):
        unit, end = int(figures.units[figure]), int(figures.options[figure])
        chosen = int(choice[unit])
        if kinds[unit, end] != kinds[unit, chosen]:
            rows[unit, end] = one[figure]
            continue
        between = _between(problem, kinds, unit, chosen, end)
        for option, share, way in zip(*between, strict=True):
            if way <= reach + 1e-9 or option == between[0][0]:
                rows[unit, int(option)] = share * one[figure]
    places = sorted(rows)
    return Region(
        units=np.array([unit for unit, _ in places], dtype=np.int64),
        options=np.array([option for _, option in places], dtype=np.int64),
        shares=np.stack([rows[place] for place in places]),
    )


def corrected(
    problem: AllocationProblem, allowed: Region, loss: float, changes: FloatArray
) -> tuple[AllocationProblem, IntArray]:
    """The problem on corrected curves, with the options of a region only.

    Parameters
    ----------
    problem : AllocationProblem
    allowed : Region
    loss : float
        Measured at the choice, all units together, nats per token.
    changes : ndarray of float64, (n_figures,)
        Change of the loss at each figure.

    Returns
    -------
    problem : AllocationProblem
        The value of a choice is less its predicted loss.
    options : ndarray of int64, (n_units, n_options)
        Which option of the given problem each of its options is.
    """
    counts = np.bincount(allowed.units, minlength=problem.n_units).astype(np.int64)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    places = first[:, None] + np.minimum(np.arange(int(counts.max())), counts[:, None] - 1)
    options = allowed.options[places]
    units = np.arange(problem.n_units)[:, None]
    values = -(loss / problem.n_units + allowed.shares @ changes)[places]
    tables = {name: getattr(problem, name) for name in ("tokens", "costs", "bits", "policies")}
    picked: dict[str, Any] = {
        name: table[units, options] for name, table in tables.items() if table is not None
    }
    weights = np.ones(problem.n_units)
    small = replace(problem, **picked, values=values, option_counts=counts, weights=weights)
    return small, options


def moved(
    problem: AllocationProblem, allowed: Region, choice: IntArray, changes: FloatArray
) -> AllocationProblem:
    """The curves for the next round: those so far, corrected where something was measured.

    Outside the region a curve keeps its shape and moves to join the corrected part.

    Parameters
    ----------
    problem : AllocationProblem
        With the curves so far.
    allowed : Region
        Of that problem and choice, with a reach of 1.
    choice : ndarray of int64, (n_units,)
    changes : ndarray of float64, (n_figures,)

    Returns
    -------
    AllocationProblem
        The same with other values.
    """
    kinds, values = kinds_of(problem), problem.values.copy()
    found = -(allowed.shares @ changes)
    for unit, chosen in enumerate(choice.tolist()):
        mine = allowed.units == unit
        options, new = allowed.options[mine], found[mine]
        base = float(problem.weights[unit] * problem.values[unit, chosen])
        row = problem.weights[unit] * problem.values[unit]
        for kind in np.unique(kinds[unit]):
            same = kinds[unit, options] == kind
            if not same.any():
                continue
            known = options[same]
            shift = base + new[same] - row[known]
            every = np.flatnonzero(kinds[unit] == kind)
            tokens = problem.tokens[unit]
            row[every] += np.interp(tokens[every], tokens[known], shift)
        values[unit] = row
    return replace(problem, values=values, weights=np.ones(problem.n_units))


def _between(
    problem: AllocationProblem, kinds: IntArray, unit: int, chosen: int, end: int
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Options from the choice (left out) to a neighbour, the share of its change, and the way."""
    count = int(problem.option_counts[unit])
    low, high = min(chosen, end), min(count - 1, max(chosen, end))
    inside = np.arange(low, high + 1)
    inside = inside[(kinds[unit, inside] == kinds[unit, chosen]) & (inside != chosen)]
    if end < chosen:
        inside = inside[::-1]
    tokens, values = problem.tokens[unit].astype(np.float64), problem.values[unit]
    way = (tokens[inside] - tokens[chosen]) / (tokens[end] - tokens[chosen])
    rise = values[end] - values[chosen]
    steps = np.diff(np.concatenate([[values[chosen]], values[inside]]))
    one_way = rise != 0 and bool(np.all(steps * np.sign(rise) >= 0))
    share = (values[inside] - values[chosen]) / rise if one_way else way
    return inside, share, way
