"""The oracle: every choice there is, for problems so small that this can be done."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError
from kvalloc.problem import AllocationProblem, RankBalance

MOST_CHOICES = 200_000
"""Choices that are looked at before a problem counts as too large."""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best that any choice can do.

    Attributes
    ----------
    objective : float
        The largest value, or the least cost in bytes.
    choice : ndarray of int64, (n_units,)
        A choice that has it.
    ranks : ndarray of int64, (n_units,), or None
        Its placement, where the problem asks for one.
    """

    objective: float
    choice: IntArray
    ranks: IntArray | None


def brute_force(problem: AllocationProblem) -> Optimum | None:
    """The optimum of a tiny problem, by looking at every choice and every placement.

    Parameters
    ----------
    problem : AllocationProblem
        With at most 200,000 choices.

    Returns
    -------
    Optimum or None
        None when no choice keeps every constraint.

    Raises
    ------
    InputError
        If the problem is too large.

    Examples
    --------
    >>> from kvalloc.testing import tiny_problem
    >>> problem = tiny_problem("concave", seed=0)
    >>> optimum = brute_force(problem)
    >>> optimum.objective == problem.objective(optimum.choice)
    True
    """
    counts = problem.option_counts.tolist()
    if (n_choices := int(np.prod(problem.option_counts.astype(np.float64)))) > MOST_CHOICES:
        raise InputError(f"{n_choices:,} choices are too many for brute force; use fewer options")
    choices = np.stack(
        [axis.ravel() for axis in np.meshgrid(*(np.arange(n) for n in counts), indexing="ij")],
        axis=1,
    )
    units = np.arange(problem.n_units)
    costs = problem.costs[units, choices].sum(axis=1)
    if problem.capacity_bytes is not None:
        kept = np.flatnonzero(costs <= problem.capacity_bytes)
        objectives = np.array([-problem.objective_value(choice) for choice in choices[kept]])
    else:
        meets = [problem.meets_target(problem.objective_value(choice)) for choice in choices]
        kept = np.flatnonzero(meets)
        objectives = costs[kept].astype(np.float64)
    for index in np.argsort(objectives, kind="stable").tolist():
        choice = choices[kept[index]].astype(np.int64)
        placed = _placed(problem, choice)
        if placed is not None:
            objective = problem.objective(choice)
            return Optimum(
                objective=objective, choice=choice, ranks=placed if placed.size else None
            )
    return None


def _placed(problem: AllocationProblem, choice: IntArray) -> IntArray | None:
    """Ranks with which a choice keeps every side constraint (empty: none needed), or None."""
    n_ranks = max((c.n_ranks for c in problem.constraints if isinstance(c, RankBalance)), default=0)
    if not n_ranks:
        return None if problem.side_fault(choice) else np.zeros(0, dtype=np.int64)
    others = (c for c in problem.constraints if not isinstance(c, RankBalance))
    if any(c.fault(problem, choice, None) for c in others):
        return None
    for ranks in itertools.product(range(n_ranks), repeat=problem.n_units):
        placed = np.array(ranks, dtype=np.int64)
        if problem.side_fault(choice, placed) is None:
            return placed
    return None
