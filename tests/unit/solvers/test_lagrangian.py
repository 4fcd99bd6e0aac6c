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


def test_caps_each_get_a_price() -> None:
    base = medium_problem(3)
    half = int(0.4 * base.max_cost_bytes / 2)
    caps = (
        GroupCap(name="device 0", units=tuple(range(9)), capacity_bytes=half),
        GroupCap(name="device 1", units=tuple(range(9, 18)), capacity_bytes=int(1.2 * half)),
        GroupCap(name="both", units=tuple(range(4, 14)), capacity_bytes=half),
    )
    capped = medium_problem(3, constraints=caps, share=1.0)
    answer = solve_problem(capped, Lagrangian())
    assert (answer.bound_source, len(answer.prices)) == ("dual", 1 + len(caps))
    assert answer.gap < 0.01
    wide = tuple(GroupCap(name=c.name, units=c.units, capacity_bytes=2**40) for c in caps)
    free = solve_problem(medium_problem(3, constraints=wide), Lagrangian())
    alone = solve_problem(base, Lagrangian())
    assert free.choice.tolist() == alone.choice.tolist()


def test_a_target_beyond_the_caps_names_them_and_what_can_be_met() -> None:
    cap = GroupCap(name="device 7", units=tuple(range(9)), capacity_bytes=40_000)
    problem = medium_problem(1, target=True, share=0.05, constraints=(cap,))
    with pytest.raises(InfeasibleError, match=r"device 7.*can; raise the caps") as raised:
        solve_problem(problem, Lagrangian())
    nearest = float(raised.value.nearest or 0.0)
    assert 0.0 < nearest < 0.95
    assert solve_problem(problem.with_target(nearest), Lagrangian()).value >= nearest - 1e-12
