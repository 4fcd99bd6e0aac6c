"""Which options are measured around a choice: for each unit one cheaper and one dearer."""

from __future__ import annotations

from dataclasses import dataclass

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
    also differ in something else (`kinds_of`), the option of each other kind that costs about as
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
        found |= {_nearest(kept, own == kind, kept[chosen]) for kind in set(own.tolist())}
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
    at = (figures.units, figures.options)
    chosen = (figures.units, choice[figures.units])
    weights = problem.weights[figures.units]
    values = weights * (problem.values[chosen] - problem.values[at])
    costs = problem.costs[chosen] - problem.costs[at]
    lost = values - price * costs
    kept = np.sort(np.argsort(lost, kind="stable")[:most])
    return Figures(units=figures.units[kept], options=figures.options[kept])


def kinds_of(problem: AllocationProblem) -> IntArray:
    """What else than tokens an option is, as a number, ``(n_units, n_options)``.

    Options of one kind differ in their tokens only.
    """
    bits = np.zeros_like(problem.tokens) if problem.bits is None else problem.bits
    kinds: IntArray = 100 * policies_at(problem) + bits
    return kinds


def policies_at(problem: AllocationProblem) -> IntArray:
    """Place of the policy behind each option, ``(n_units, n_options)``; 0 where there is one."""
    return np.zeros_like(problem.tokens) if problem.policies is None else problem.policies


def _nearest(kept: FloatArray, allowed: BoolArray, where: float) -> int:
    distance = np.where(allowed, np.abs(kept - where), np.inf)
    return int(np.argmin(distance))
