"""Oracle for tiny problems."""

from __future__ import annotations

import math

import numpy as np

from kvalloc.errors import InputError
from kvalloc.problem import AllocationProblem, Solution

MAX_CHOICES = 200_000
"""Largest number of choices that are tried."""


def brute_force(problem: AllocationProblem) -> Solution | None:
    """Return the optimum by trying every choice; None if none keeps all constraints.

    Raises
    ------
    InputError
        If there are more than 200,000 choices.

    Examples
    --------
    >>> from kvalloc.testing import tiny_problem
    >>> problem = tiny_problem("concave", seed=0)
    >>> optimum = brute_force(problem)
    >>> optimum.objective == problem.objective(optimum.choice)
    True
    """
    counts = problem.option_counts.tolist()
    if (n_choices := math.prod(counts)) > MAX_CHOICES:
        raise InputError(f"{n_choices:,} choices are too many for brute force; use fewer options")
    choices = np.indices(counts).reshape(len(counts), -1).T
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
            return Solution.of(problem, choice, bound=problem.objective(choice))
    return None
