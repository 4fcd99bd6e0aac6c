"""The Lagrangian solver: its bound, its repair, caps, and what it claims."""

from __future__ import annotations

import pytest
from exact_cases import medium_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError
from kvalloc.problem import GroupCap, Termination, dual_bound
from kvalloc.solvers.lagrangian import Lagrangian


@pytest.mark.parametrize("concave", [False, True])
@pytest.mark.parametrize("target", [False, True])
def test_the_gap_is_tiny_on_many_units(concave: bool, target: bool) -> None:
    problem = medium_problem(
        0, n_layers=80, n_heads=8, n_options=64, concave=concave, target=target
    )
    answer = solve_problem(problem, Lagrangian())
    assert answer.gap <= 1e-5
    assert answer.termination in (Termination.OPTIMAL, Termination.HEURISTIC)
    # Its own bound is as tight as the one that is computed without it.
    assert answer.bound == pytest.approx(dual_bound(problem).bound, rel=1e-9)


def test_a_target_beyond_the_caps_names_them_and_what_can_be_met() -> None:
    cap = GroupCap(name="device 7", units=tuple(range(9)), capacity_bytes=40_000)
    problem = medium_problem(1, target=True, share=0.05, constraints=(cap,))
    with pytest.raises(InfeasibleError, match=r"device 7.*can; raise the caps") as raised:
        solve_problem(problem, Lagrangian())
    nearest = float(raised.value.nearest or 0.0)
    assert 0.0 < nearest < 0.95
    assert solve_problem(problem.with_target(nearest), Lagrangian()).value >= nearest - 1e-12
