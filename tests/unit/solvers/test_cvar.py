"""The worst share of several workloads: near the optimum, honest about it, and exact with ilp."""

from __future__ import annotations

import time

import numpy as np
import pytest
from exact_cases import workloads
from factories import make_problem

from kvalloc.allocation.infeasibility import diagnose
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate
from kvalloc.solvers.cvar import CVaR
from kvalloc.solvers.ilp import ILP


@pytest.mark.parametrize("tail_share", [0.25, 0.4, 0.75])
@pytest.mark.parametrize("concave", [True, False])
def test_the_gap_is_small_where_there_are_many_options(tail_share: float, concave: bool) -> None:
    for seed in range(3):
        problem = workloads(seed, tail_share=tail_share, concave=concave, n_options=64)
        answer = solve_problem(problem, CVaR())
        assert answer.bound_source == "dual"
        assert answer.gap < (1e-3 if concave else 5e-3)
        cheap = solve_problem(problem.with_target(answer.value), CVaR())
        # What the capacity bought costs no more than the capacity, up to a few steps; and a few
        # steps less at most would do, too.
        assert cheap.cost_bytes <= answer.cost_bytes + 4 * 4096
        assert cheap.cost_bytes - cheap.bound <= (2 if concave else 10) * 4096


def test_what_the_worst_workloads_can_reach_together() -> None:
    # Each workload can have 1 alone; no choice gives both more than 0.45.
    scenarios = np.array([[[0.0, 1.0, 0.45]], [[0.0, 0.1, 1.0]]])
    problem = make_problem(
        scenarios.mean(axis=0),
        aggregate=Aggregate.TAIL,
        scenarios=scenarios,
        tail_share=0.5,
        target=0.5,
    )
    with pytest.raises(InfeasibleError, match="cannot be met in the worst workloads; ask for less"):
        solve_problem(problem, ILP())
    assert diagnose(problem, deadline=time.monotonic() + 60) == (pytest.approx(0.45), True)
