"""General exact solver."""

from __future__ import annotations

import time
from typing import ClassVar

from kvalloc.errors import InfeasibleError, InputError, SolverError
from kvalloc.problem import Aggregate, AllocationProblem, SideConstraint
from kvalloc.problem.arrays import EVERY_KIND
from kvalloc.problem.solver import Solution
from kvalloc.solvers._coarse import ByParts
from kvalloc.solvers._ilp_program import BACKENDS
from kvalloc.solvers._ilp_search import Search
from kvalloc.solvers.lagrangian import Lagrangian


class ILP(ByParts):
    """Multiple-choice integer program, solved to proven optimality.

    Each option is a 0/1 variable, each unit takes one, and the capacity (or the target) and each
    cap are a row. Under a limit on different budgets, each budget has one more variable.

    Losses at the best Lagrangian prices and a repaired choice show which options a better one could
    have (a core). The program over these has the optimum of all. Under a limit on budgets, a
    dynamic program bounds every set, and only sets that could be best are solved. Values become
    whole numbers, rounded down by at most one part in 2^50 of their range; the bound includes that.

    Parameters
    ----------
    gap : float
        Relative gap to stop at; 0 proves the optimum.
    workers : int
        Threads; 1 is reproducible.
    backend : {"auto", "cp_sat", "highs"}
        OR-Tools CP-SAT, or HiGHS in floating point, to about 1e-11 of the values' range. By default
        HiGHS under caps, else CP-SAT.

    Raises
    ------
    InputError
        If an option is out of range.

    References
    ----------
    Kellerer, Pferschy, Pisinger: Knapsack Problems (2004), chapter 11.
    """

    name: ClassVar[str] = "ilp"
    summary: ClassVar[str] = "integer program (CP-SAT or HiGHS) after dual reduction; exact"
    reference: ClassVar[str] = "Kellerer et al. 2004, ch. 11; OR-Tools CP-SAT"
    takes_bits: ClassVar[bool] = True
    handles: ClassVar[frozenset[type[SideConstraint]]] = EVERY_KIND
    aggregates: ClassVar[frozenset[Aggregate]] = frozenset(Aggregate)

    def __init__(self, gap: float = 0.0, workers: int = 1, backend: str = "auto") -> None:
        if not gap >= 0 or workers < 1:
            raise InputError(f"ilp: gap {gap:g} must be >= 0 and workers {workers} >= 1")
        if backend != "auto" and backend not in BACKENDS:
            raise InputError(
                f"ilp: there is no back end {backend!r}; use auto, {', '.join(BACKENDS)}"
            )
        self.gap = gap
        self.workers = workers
        self.backend = backend

    def rough(self, problem: AllocationProblem) -> ByParts:
        """Return `lagrangian` if it can."""
        prices = Lagrangian()
        return prices if prices.can_solve(problem) is True else self

    def solve_whole(self, problem: AllocationProblem, deadline: float) -> Solution:
        """Return the optimum, or the best choice and bound when time runs out."""
        seconds = deadline - time.monotonic()
        backend = self.backend
        if backend == "auto":
            backend = "highs" if problem.caps else "cp_sat"
        search = Search(problem, deadline, BACKENDS[backend], gap=self.gap, workers=self.workers)
        result = search.run()
        if result.infeasible:
            raise _infeasible(problem)
        if result.choice is None:
            raise SolverError(
                "ilp found no choice that satisfies the side constraints in the time it had, and "
                "has not shown that there is none; give it more time"
            )
        return Solution.of(
            problem,
            result.choice,
            bound=result.bound,
            prices=search.prices,
            detail=f"{result.status} on {result.n_options:,} of "
            f"{int(problem.option_counts.sum()):,} options",
            deadline=deadline - 0.1 * seconds,  # back ends stop a little before they have to
            gap=self.gap,
        )


def _infeasible(problem: AllocationProblem) -> InfeasibleError:
    goal = (
        f"a capacity of {problem.capacity_bytes:,} bytes"
        if problem.target is None
        else f"a target of {problem.target:.15g}"
    )
    sides = [f"{name} ({limit})" for name, limit in (c.stated() for c in problem.constraints)]
    more = f" and {len(sides) - 3} more" if len(sides) > 3 else ""
    return InfeasibleError(
        f"no choice can work: {goal} with {', '.join(sides[:3])}{more}; relax one of them"
    )
