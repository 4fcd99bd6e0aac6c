"""PrefixKV against hand-computed cases, and the worst unit against brute force."""

import pytest
from factories import make_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError
from kvalloc.problem import Aggregate, GroupCap, SameBudget, Termination
from kvalloc.problem.registry import get_solver

MAX_MIN = get_solver("max_min")
STEEP = [0.0, 0.8, 0.9, 1.0]
FLAT = [0.0, 0.4, 0.7, 1.0]


def worst(values, **changes):
    return make_problem(values, aggregate=Aggregate.WORST, **changes)


@pytest.mark.parametrize(
    ("values", "goal", "choice"),
    [
        ([STEEP, FLAT], {"capacity": 2}, [1, 1]),  # p = 0.4
        ([STEEP, FLAT], {"capacity": 3}, [1, 2]),  # p = 0.7: the flat one needs 2
        ([STEEP, FLAT], {"capacity": 4}, [1, 3]),  # p = 0.8: the flat one has no 0.8, it needs all
        ([STEEP, FLAT], {"capacity": 5}, [2, 3]),
        ([STEEP, FLAT], {"capacity": 6}, [3, 3]),
        ([STEEP, FLAT], {"capacity": 0}, [0, 0]),
        # The lowest level that meets a target.
        ([STEEP, FLAT], {"target": 1.2}, [1, 1]),
        ([STEEP, FLAT], {"target": 1.5}, [1, 2]),
        ([STEEP, FLAT], {"target": 1.8}, [1, 3]),
        ([STEEP, FLAT], {"target": 2.0}, [3, 3]),
        # Of the last rows only as many rise as the target needs.
        ([[0.0, 0.5, 1.0]] * 4, {"target": 2.5}, [2, 1, 1, 1]),
        # p = 0.5 takes 2 entries; with the third, unit 0 cannot reach the next level (it needs
        # two more), unit 1 can rise.
        ([[0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.6, 1.0]], {"capacity": 3}, [1, 2]),
        # Entries that are worth nothing stay unspent.
        ([[0.0, 1.0, 1.0, 1.0]] * 2, {"capacity": 6}, [1, 1]),
    ],
)
def test_the_published_rule_by_hand(values, goal, choice):
    assert solve_problem(make_problem(values, **goal), MAX_MIN).choice.tolist() == choice


def test_the_rule_looks_at_shares_whatever_the_mass_and_weight():
    problem = make_problem([[0.0, 8.0, 9.0, 10.0], FLAT], capacity=3, weights=[0.1, 5.0])
    answer = solve_problem(problem, MAX_MIN)
    assert answer.choice.tolist() == [1, 2]
    assert answer.termination is Termination.HEURISTIC
    assert answer.bound_source == "dual"


CAP = GroupCap(name="device 0", units=(0, 1), capacity_bytes=3)
SAME = SameBudget(groups=((0, 1),))


@pytest.mark.parametrize(
    ("values", "changes", "choice", "objective"),
    [
        ([STEEP, FLAT], {"capacity": 3}, [1, 2], 0.7),
        # A unit that cannot rise does not hold the others back.
        ([[0.2, 0.2, 0.2], [0.0, 0.5, 0.9]], {"capacity": 2}, [0, 2], 0.2),
        ([STEEP, FLAT], {"target": 0.75}, [1, 3], 4),
        # The worst of the capped two is 0.7; the third is not held back by them.
        ([STEEP, FLAT, FLAT], {"capacity": 9, "constraints": (CAP,)}, [1, 2, 3], 0.7),
        ([STEEP, FLAT, FLAT], {"capacity": 5, "constraints": (SAME,)}, [2, 2, 1], 0.4),
    ],
)
def test_the_worst_unit_is_solved_to_the_optimum(values, changes, choice, objective):
    answer = solve_problem(worst(values, **changes), MAX_MIN)
    assert answer.choice.tolist() == choice
    assert answer.objective == answer.bound == objective
    assert answer.termination is Termination.OPTIMAL


def test_a_target_that_the_caps_rule_out_says_what_can_be_had():
    problem = worst([STEEP, FLAT], target=0.8, constraints=(CAP,))
    with pytest.raises(InfeasibleError, match=r"0\.7 within the side constraints") as caught:
        solve_problem(problem, MAX_MIN)
    assert caught.value.nearest == 0.7
