"""PyramidKV: budgets that fall linearly from the first layer to the last."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import InputError
from kvalloc.problem import AllocationProblem, Sense, Solution, Solver
from kvalloc.solvers._rules import (
    fewest_for_target,
    mean_budget_tokens,
    share_out,
    tokens_per_step,
)


class Pyramid(Solver):
    """Lower layers keep more, in an arithmetic series, whatever the scores say.

    Of a mean budget B with w protected tokens (sinks and window; the window in the paper),
    ``c = B - w`` entries are shared out: the last layer gets ``c / beta``, the first
    ``2c - c / beta``, the rest lie on the line between, and w is added to each.

    Parameters
    ----------
    beta : float
        Steepness, more than 1; 20 in the reference code.
    exact : bool
        True keeps the sum at the budget with the one rounding rule. False reproduces the
        reference code's whole-number step, which overspends: at B 128, w 8 and 32 layers by 4.6% of
        the entries shared out.

    Raises
    ------
    InputError
        If beta is not above 1.

    References
    ----------
    PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, Sec. 3.
    """

    name: ClassVar[str] = "pyramid"
    summary: ClassVar[str] = "budgets fall linearly from the first layer to the last"
    reference: ClassVar[str] = "PyramidKV, Sec. 3"
    needs_one_step: ClassVar[bool] = True

    def __init__(self, beta: float = 20.0, exact: bool = True) -> None:
        if not beta > 1:
            raise InputError(f"pyramid: beta is {beta:g}, expected more than 1")
        self.beta = beta
        self.exact = exact
        self.may_exceed_capacity = not exact

    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """The pyramid of all the capacity, or the smallest one that meets the target."""
        _, unit_layer = np.unique(problem.layers, return_inverse=True)
        if self.exact:
            return share_out(
                problem,
                lambda steps: self._shared(problem, unit_layer, steps),
                detail=f"beta {self.beta:g}, exact sum",
            )

        def reference(tokens: int) -> IntArray:
            schedule = reference_schedule(
                tokens,
                int(unit_layer.max()) + 1,
                context_tokens=problem.context_tokens,
                protected_tokens=problem.protected_tokens,
                beta=self.beta,
            )
            return problem.options_within(schedule[unit_layer])

        if problem.sense is Sense.MIN_COST:
            low = int(problem.tokens[:, 0].min())
            tokens = fewest_for_target(problem, reference, low, problem.context_tokens)
        else:
            tokens = int(mean_budget_tokens(problem, problem.spendable_steps))
        detail = f"beta {self.beta:g}, reference rounding, mean budget {tokens} tokens"
        return Solution.of(problem, reference(tokens), detail=detail)

    def _shared(self, problem: AllocationProblem, unit_layer: IntArray, steps: int) -> IntArray:
        line = pyramid_line(
            mean_budget_tokens(problem, steps),
            int(unit_layer.max()) + 1,
            context_tokens=problem.context_tokens,
            protected_tokens=problem.protected_tokens,
            beta=self.beta,
        )
        options = (line[unit_layer] - problem.tokens[:, 0]) / tokens_per_step(problem)
        return apportion(options, steps, maximum=problem.last_options)


def pyramid_line(
    budget_tokens: float,
    n_layers: int,
    *,
    context_tokens: int,
    protected_tokens: int,
    beta: float = 20.0,
) -> FloatArray:
    """PyramidKV's budgets before any rounding.

    Parameters
    ----------
    budget_tokens : float
        Mean budget B, protected tokens included.
    n_layers : int
        L.
    context_tokens : int
        q, the most a layer can keep.
    protected_tokens : int
        w, part of every budget.
    beta : float
        Steepness.

    Returns
    -------
    ndarray of float64, (n_layers,)
        Falling, with mean B.

    Examples
    --------
    >>> pyramid_line(128, 4, context_tokens=1000, protected_tokens=8).tolist()
    [242.0, 166.0, 90.0, 14.0]
    """
    shared = budget_tokens - protected_tokens
    room = context_tokens - protected_tokens
    low = shared / beta
    if 2 * shared - low > room:
        low = 2 * shared - room
    if n_layers == 1:
        return np.array([float(budget_tokens)])
    return np.linspace(2 * shared - low, low, n_layers) + protected_tokens


def reference_schedule(
    budget_tokens: int,
    n_layers: int,
    *,
    context_tokens: int,
    protected_tokens: int,
    beta: float = 20.0,
) -> IntArray:
    """PyramidKV's budgets as its reference code rounds them, overspending included.

    Parameters
    ----------
    budget_tokens, n_layers, context_tokens, protected_tokens, beta
        As in `pyramid_line`; the budget is a whole number.

    Returns
    -------
    ndarray of int64, (n_layers,)

    Examples
    --------
    >>> int(reference_schedule(128, 32, context_tokens=9000, protected_tokens=8).sum())
    4272
    >>> 32 * 128
    4096
    """
    shared = budget_tokens - protected_tokens
    room = context_tokens - protected_tokens
    least = int(shared / beta)
    most = 2 * shared - least
    if most >= room:
        most, least = room, 2 * shared - room
    step = (most - least) // max(1, n_layers - 1)
    return most - np.arange(n_layers, dtype=np.int64) * step + protected_tokens
