"""Contract between kvalloc and a solver."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import SolverError, option
from kvalloc.problem.arrays import Aggregate, AllocationProblem, SideConstraint

CLOSED = 1e-11
"""Relative difference, to the larger of 1 and the objective, up to which objective and bound are
equal."""

DEFAULT_LIMIT_SECONDS = 60.0
"""Default time limit of a solver: an exact search may never end."""


def is_closed(objective: float, bound: float) -> bool:
    """Return whether a bound proves an objective."""
    return abs(bound - objective) <= CLOSED * max(1.0, abs(objective))


def deadline_after(seconds: float | None) -> float:
    """Return the ``time.monotonic()`` at which a limit, by default the usual one, ends."""
    return time.monotonic() + (DEFAULT_LIMIT_SECONDS if seconds is None else seconds)


class Termination(Enum):
    """Why a solver stopped."""

    OPTIMAL = "optimal"
    """The bound shows that no choice is better."""

    HEURISTIC = "heuristic"
    """A rule was followed to its end, with no claim about the optimum."""

    GAP_LIMIT = "gap_limit"
    """The requested gap is reached; the bound shows it."""

    TIME_LIMIT = "time_limit"
    """Time ran out; the choice is feasible, the bound is the best proven one."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Answer of a solver.

    Attributes
    ----------
    choice : ndarray of int64, (n_units,)
    objective : float
        ``problem.objective(choice)``; `kvalloc.solve` recomputes it.
    bound : float or None
        Bound on any choice; None if unproven, never 0.
    termination : Termination
    detail : str
        One line: the rule's parameters, the back end's status.
    decided_by : str
        Solver that got the problem from this one.
    prices : tuple of float
        For `bound_at`: value of a byte of capacity (or for the target), then of each `GroupCap`.
        Required only under caps.

    Raises
    ------
    SolverError
        If optimality, or a gap, is claimed without a bound.
    """

    choice: IntArray
    objective: float
    bound: float | None
    termination: Termination
    detail: str = ""
    decided_by: str = ""
    prices: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        proven = (Termination.OPTIMAL, Termination.GAP_LIMIT)
        if self.termination in proven and self.bound is None:
            claim = "be optimal" if self.termination is Termination.OPTIMAL else "reach its gap"
            raise SolverError(f"a solution claims to {claim} without a bound that shows it")

    @classmethod
    def of(
        cls,
        problem: AllocationProblem,
        choice: IntArray,
        *,
        bound: float | None = None,
        detail: str = "",
        deadline: float = math.inf,
        prices: tuple[float, ...] = (),
        gap: float = 0.0,
    ) -> Solution:
        """Return a choice as a solution, optimal if the bound meets its objective.

        Parameters
        ----------
        problem, choice, bound, detail, prices
            As in the class.
        deadline : float
            ``time.monotonic()`` when time runs out.
        gap : float
            The requested relative gap.
        """
        objective = problem.objective(choice)
        missing = math.inf if bound is None else abs(bound - objective)
        if bound is not None and is_closed(objective, bound):
            termination = Termination.OPTIMAL
        elif gap and missing <= gap * abs(objective) * (1 + 1e-9):
            termination = Termination.GAP_LIMIT
        elif time.monotonic() > deadline:
            termination = Termination.TIME_LIMIT
        else:
            termination = Termination.HEURISTIC
        return cls(
            choice=choice.astype(np.int64),
            objective=objective,
            bound=bound,
            termination=termination,
            detail=detail,
            prices=prices,
        )


class Solver(ABC):
    """Base of solvers.

    A solver takes its options as keyword arguments and keeps no state between calls. Subclasses set
    `name` and `summary`, and declare in `handles` the side constraints they respect; others are
    refused.
    """

    name: ClassVar[str]
    """Name for ``--solver``."""

    summary: ClassVar[str]
    """One line for ``kvalloc list solvers``."""

    reference: ClassVar[str] = ""
    """Paper and equation."""

    handles: ClassVar[frozenset[type[SideConstraint]]] = frozenset()
    """Kinds of side constraints it respects."""

    aggregates: ClassVar[frozenset[Aggregate]] = frozenset({Aggregate.SUM})
    """Objectives it optimises: the sum over units, the worst unit."""

    takes_bits: ClassVar[bool] = False
    """Whether it takes options that differ in bits too, so that tokens need not rise with cost."""

    needs_heads: ClassVar[bool] = False
    """Whether its units have to be single KV heads."""

    needs_one_step: ClassVar[bool] = False
    """Whether neighbouring options of all units have to be one cost apart."""

    needs_concave: ClassVar[bool] = False
    """Whether no entry may gain more than the previous one."""

    def can_solve(self, problem: AllocationProblem) -> bool | str:
        """Return True, or a sentence: the reason, and another solver to use."""
        if not self.handles.issuperset(map(type, problem.constraints)):
            unknown = [c for c in problem.constraints if type(c) not in self.handles]
            names = {option(c.keyword) if c.keyword else type(c).__name__ for c in unknown}
            way_out = "use ilp" if all(c.keyword for c in unknown) else "write a solver that does"
            return f"{self.name} does not handle {', '.join(sorted(names))}; {way_out}"
        if problem.bits is not None and not self.takes_bits:
            return (
                f"{self.name} chooses tokens and no bits; use dp, lagrangian or ilp, or leave out "
                f"{option('bits')}"
            )
        if problem.aggregate not in self.aggregates:
            if problem.aggregate is Aggregate.WORST:
                return f"{self.name} maximises a sum, not the worst unit; use max_min"
            return f"{self.name} does not maximise a plain sum over units; use greedy or ilp"
        if self.needs_heads and np.any(problem.heads < 0):
            level = option("level", "head")
            return f"{self.name} decides single KV heads, not whole layers; use {level}, or greedy"
        if self.needs_one_step and problem.n_options > 1 and problem.step_bytes is None:
            return (
                f"{self.name} needs one cost step for all units and these differ; use ilp, which "
                "takes unequal costs"
            )
        if self.needs_concave and not problem.is_concave:
            return (
                f"{self.name} needs concave curves, of which every entry gains no more than the "
                "one before it, and these are not; use ilp"
            )
        return self.refusal(problem) or True

    def refusal(self, problem: AllocationProblem) -> str:
        """Return a reason for refusal beyond the attributes, and the way out; empty for none."""
        return ""

    @abstractmethod
    def solve(
        self, problem: AllocationProblem, *, time_limit_seconds: float | None = None
    ) -> Solution:
        """Pick one option per unit.

        Parameters
        ----------
        problem : AllocationProblem
            A feasible problem that `can_solve` accepted.
        time_limit_seconds : float, optional
            Stop then with the best choice so far; kvalloc's solvers take `DEFAULT_LIMIT_SECONDS` by
            default (`deadline_after`).

        Raises
        ------
        InfeasibleError
            If its choices cannot meet the target within the side constraints.
        SolverError
            If it finds no choice, or cannot go on.
        """
