"""Nested caps on concave curves."""

from __future__ import annotations

import numpy as np
import pytest
from exact_cases import hand_problem, medium_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, InputError, SolverError
from kvalloc.problem import AllocationProblem, GroupCap, Sense, Termination, bound_at
from kvalloc.solvers._simplex import flow_graph
from kvalloc.solvers.flow import Flow
from kvalloc.testing import brute_force, tiny_problems


def tree_problem(seed: int, *, tight: float = 0.5, target: bool = False) -> AllocationProblem:
    """A model of 6 layers of 3 heads on 2 devices: a cap for each layer and each device."""
    random = np.random.default_rng(seed)
    base = medium_problem(seed, concave=True)

    def cap(name: str, units: range, share: float) -> GroupCap:
        most = int(base.costs[list(units), -1].sum())
        return GroupCap(name=name, units=tuple(units), capacity_bytes=int(most * share))

    layers = [cap(f"layer {n}", range(3 * n, 3 * n + 3), random.uniform(0.2, 1)) for n in range(6)]
    devices = [cap(f"device {n}", range(9 * n, 9 * n + 9), tight) for n in range(2)]
    caps = (*layers, *devices)
    return medium_problem(seed, concave=True, constraints=caps, share=0.4, target=target)


def test_the_line_says_which_cap_lies_in_which() -> None:
    detail = Flow().solve(tree_problem(4)).detail
    assert detail.startswith("8 caps; layer 0 in device 0; layer 1 in device 0; ")
    assert detail.count(" in ") == 5  # not all six


def test_a_target_beyond_the_caps_says_what_can_be_met() -> None:
    problem = tree_problem(4, tight=0.3, target=True)
    most = solve_problem(problem.with_capacity(problem.max_cost_bytes), Flow()).value
    with pytest.raises(InfeasibleError, match="within the caps") as raised:
        solve_problem(problem.with_target(most + 1e-6), Flow())
    assert raised.value.nearest == pytest.approx(most)
    assert solve_problem(problem.with_target(most), Flow()).value == pytest.approx(most)


@pytest.mark.parametrize("sense", Sense)
def test_network_simplex_proves_the_thresholds_a_second_time(sense: Sense) -> None:
    """All of few options at once, and parts of many; its residual distances prove it as prices."""
    kinds = [f"{c}{side}" for c in ("concave", "tied", "weighted") for side in ("", "+nested_caps")]
    simplex = Flow(method="network_simplex")
    proven = 0
    for case, problem in tiny_problems(36, kinds=kinds, seed=17):
        best = brute_force(problem)
        if simplex.can_solve(problem) is not True or problem.sense is not sense or best is None:
            continue
        answer = simplex.solve(problem)
        assert answer.objective == pytest.approx(best.objective, abs=1e-10), case
        assert answer.termination is Termination.OPTIMAL, case
        assert bound_at(problem, *answer.prices) == pytest.approx(best.objective, abs=1e-10), case
        proven += 1
    assert proven >= 12
    for tight in (0.3, 0.6):
        wide = tree_problem(7, tight=tight)
        if sense is Sense.MIN_COST:
            wide = wide.with_target(0.5 * solve_problem(wide, Flow()).value)
        first, second = (solve_problem(wide, one) for one in (Flow(), simplex))
        assert second.objective == pytest.approx(first.objective, abs=1e-10)
        assert second.bound_source == "dual"
        assert "network simplex on" in second.detail


def test_caps_that_are_no_tree_are_no_flow() -> None:
    caps = (
        GroupCap(name="a", units=(0, 1), capacity_bytes=9),
        GroupCap(name="b", units=(1, 2), capacity_bytes=9),
    )
    problem = hand_problem(costs=np.array([[0, 1, 2]] * 3), capacity_bytes=4, constraints=caps)
    with pytest.raises(
        SolverError, match="caps that nest, and a and b overlap; use lagrangian or ilp"
    ):
        flow_graph(problem)
    with pytest.raises(InputError, match="method is 'simplex', expected one of thresholds, netw"):
        Flow(method="simplex")
