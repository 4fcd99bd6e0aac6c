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
from kvalloc.solvers.dp import DP


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
