"""Dynamic programming over pages."""

from __future__ import annotations

import numpy as np
import pytest
from exact_cases import (
    hand_problem,
    medium_problem,
)

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InputError, SolverError
from kvalloc.problem import AllocationProblem
from kvalloc.solvers.dp import DP


def textbook(problem: AllocationProblem) -> float:
    """The recursion over the whole capacity, no state left out."""
    steps = (problem.costs - problem.costs[:, :1]) // problem.lattice_bytes
    most = int(steps[:, -1].sum())
    if problem.capacity_bytes is not None:
        most = (problem.spendable_bytes - problem.min_cost_bytes) // problem.lattice_bytes
    best = np.full(most + 1, -np.inf)
    best[0] = 0.0
    for unit in range(problem.n_units):
        after = np.full_like(best, -np.inf)
        for shift, value in zip(steps[unit].tolist(), problem.values[unit].tolist(), strict=True):
            reached = best[: max(0, best.size - shift)] + problem.weights[unit] * value
            after[shift:] = np.maximum(after[shift:], reached)
        best = after
    if problem.target is None:
        return float(best.max())
    cheapest = int(np.argmax(best >= problem.lowest_accepted_value))
    return float(problem.min_cost_bytes + cheapest * problem.lattice_bytes)


@pytest.mark.parametrize("target", [False, True])
def test_pruning_changes_nothing(target: bool) -> None:
    for seed in range(6):
        problem = medium_problem(seed, target=target, share=0.1 + 0.1 * seed)
        full = textbook(problem)
        assert solve_problem(problem, DP()).objective == pytest.approx(full, abs=1e-13)


def test_a_table_beyond_memory_is_refused_before_anything_is_done() -> None:
    problem = medium_problem(0)
    able = DP(memory_bytes=1000).can_solve(problem)
    assert isinstance(able, str)
    assert "2,250 bytes and may use 1,000" in able
    assert "use larger pages (page), or lagrangian, or ilp" in able
    with pytest.raises(SolverError, match="could need a table"):
        solve_problem(problem, DP(memory_bytes=1000))
    costs = np.array([[1, 3, 5], [1, 3, 4], [1, 3, 10**12]])
    odd = hand_problem(costs=costs, capacity_bytes=10**12)  # one byte is the grain
    assert isinstance(DP().can_solve(odd), str)
    with pytest.raises(InputError, match="holds no table"):
        DP(memory_bytes=0)
