"""The oracle: every choice there is, for problems so small that this can be done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError
from kvalloc.problem import AllocationProblem

MAX_CHOICES = 200_000
"""Largest number of choices that is looked at."""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best that any choice can do.

    Attributes
    ----------
    objective : float
        The largest value, or the least cost in bytes.
    choice : ndarray of int64, (n_units,)
        A choice that has it.
    """

    objective: float
    choice: IntArray


def brute_force(problem: AllocationProblem) -> Optimum | None:
    """Return the optimum of a tiny problem, by looking at every choice.

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
    if (n_choices := int(np.prod(problem.option_counts.astype(np.float64)))) > MAX_CHOICES:
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
        if problem.side_fault(choice) is None:
            return Optimum(objective=problem.objective(choice), choice=choice)
    return None
