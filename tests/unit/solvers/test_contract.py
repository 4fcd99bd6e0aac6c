"""Every built-in solver: the contract of plug-ins, what it claims, what it refuses, and when."""

import functools
import importlib.metadata
import json

import numpy as np
import pytest
from exact_cases import (
    ALL_KINDS,
    check_all,
    hand_problem,
    kinds,
    medium_problem,
    put_every_option_in_the_program,
)
from factories import make_problem

from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InfeasibleError, SolverError
from kvalloc.problem import Aggregate, GroupCap, SideConstraint, Termination, registry
from kvalloc.problem.arrays import MaxDistinct
from kvalloc.testing import SolverContract, tiny_problems

# Options for tiny problems, and what a rule does not promise.
OPTIONS = {"head_classes": {"recent_tokens": 1, "sink_tokens": 4}}
EXACT = {"greedy", "dp", "flow", "ilp", "auto"}
RULES = {"uniform", "pyramid", "adaptive_head", "proportional", "head_classes", "max_min"}
MAY_GIVE_UP = RULES | {"hull", "lagrangian"}
NOT_MONOTONE = MAY_GIVE_UP - {"uniform", "head_classes"}

BUILT_IN = sorted(
    point.name
    for point in importlib.metadata.entry_points(group=registry.SOLVERS)
    if point.value.startswith("kvalloc.")
)


def contract_of(name):
    class TestContract(SolverContract):
        problems_per_kind = 2
        seed = 10
        exact = name in EXACT
        may_give_up = name in MAY_GIVE_UP
        monotone = name not in NOT_MONOTONE

        @pytest.fixture
        def solver(self):
            return registry.get_solver(name, **OPTIONS.get(name, {}))

    TestContract.__name__ = TestContract.__qualname__ = f"Test_{name}"
    return TestContract


for _name in BUILT_IN:
    globals()[f"Test_{_name}"] = contract_of(_name)


def test_all_are_covered():
    assert {"uniform", "pyramid", "greedy", "adaptive_head", "ilp"} <= set(BUILT_IN)


# --- against every choice there is -----------------------------------------------------------

CONCAVE = kinds("plain", "nested_caps", curves=("concave", "paged", "tied", "weighted"))
WORST = [
    *(f"worst:{curves}" for curves in ("concave", "non_concave", "unequal_costs")),
    *("worst:unequal_options", "worst:losses+nested_caps", "worst:unequal_costs+crossing_caps"),
]
BITS = ["bits", "bits+nested_caps", "bits+crossing_caps", "worst:bits"]


@functools.cache
def cases_of(count, which, seed):
    """Tiny problems, made once for all solvers."""
    return list(tiny_problems(count, kinds=which, seed=seed))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("backend", ["cp_sat", "highs"])
def test_every_back_end_with_and_without_reduction(backend, whole, monkeypatch):
    if whole:
        put_every_option_in_the_program(monkeypatch)
    solver = registry.get_solver("ilp", backend=backend)
    ends = check_all(solver, cases_of(112, ALL_KINDS, 3000), exact=True)
    assert ends["optimal"] >= 91


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which", "count", "seed", "optimal", "refused", "gave_up"),
    [  # how many must be proven optimal at least, how many refused and given up at most
        ("dp", ALL_KINDS, 2240, 20_000, 220, 2016, 0),
        ("flow", ALL_KINDS, 2240, 20_000, 300, 1924, 0),
        ("lagrangian", ALL_KINDS, 2240, 20_000, 510, 1568, 30),
        ("hull", ALL_KINDS, 2240, 20_000, 200, 2016, 0),
        # a program each time: half as many take as long as all of the others
        ("ilp", ALL_KINDS, 1120, 20_000, 1050, 0, 0),
        ("greedy", CONCAVE, 320, 200, 160, 160, 0),
        ("flow", CONCAVE, 320, 900, 281, 19, 0),
        ("max_min", WORST, 140, 100, 130, 0, 0),
        *((n, BITS, 160, 0, 150, 0, 0) for n in ("ilp", "auto")),
        ("dp", BITS[:3], 120, 0, 40, 80, 0),
        ("lagrangian", BITS[:3], 120, 0, 40, 0, 10),
        ("hull", BITS[:3], 120, 0, 15, 80, 0),
        ("max_min", BITS[3:], 40, 0, 40, 0, 0),
    ],
)
def test_no_misses_in_thousands_of_problems(name, which, count, seed, optimal, refused, gave_up):
    """Not one claim that is not true; whoever is exact proves every answer."""
    exact, cases = name in EXACT or name == "max_min", cases_of(count, tuple(which), seed)
    ends = check_all(registry.get_solver(name), cases, exact=exact)
    proven, able = ends["optimal"], count - ends["refused"]
    row = {"what": name, "figure": f"{proven:,}", "problems": f"{able:,}", "note": "none wrongly"}
    print(f"\n{json.dumps(row)}")
    assert sum(ends.values()) == count
    assert ends["optimal"] >= optimal
    assert ends["refused"] <= refused
    assert ends["gave up"] <= gave_up
    if which is ALL_KINDS and name in ("flow", "ilp"):  # without limits every target is in reach
        assert ends["infeasible"] > 5  # and each of those has no choice at all


DEVICES = (
    GroupCap(name="device 0", units=tuple(range(9)), capacity_bytes=8 * 60),
    GroupCap(name="device 1", units=tuple(range(6, 18)), capacity_bytes=8 * 75),
)
TREE = tuple(
    GroupCap(name=f"{size} from {first}", units=tuple(range(first, first + size)),
             capacity_bytes=8 * room)
    for size, room in ((3, 20), (9, 50)) for first in range(0, 18, size)
)  # fmt: skip


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize(
    ("constraints", "concave", "agree"),
    [
        ((), False, {"dp", "ilp", "auto"}),
        ((), True, {"dp", "flow", "greedy", "ilp", "auto"}),
        (TREE, True, {"flow", "ilp", "auto"}),
        ((MaxDistinct(maximum=2),), False, {"ilp", "auto"}),
        ((MaxDistinct(maximum=3), *DEVICES), False, {"ilp", "auto"}),
        (DEVICES, False, {"ilp", "auto"}),
    ],
    ids=["any", "concave", "tree", "few", "few+caps", "caps"],
)
def test_exact_solvers_agree_beyond_brute_force(constraints, concave, agree, target):
    for seed in range(2):
        goal = {"target": target, "share": 0.6 if target and constraints else 0.3}
        problem = medium_problem(
            seed, n_options=10, concave=concave, constraints=constraints, **goal
        )
        able = {name for name in EXACT if registry.get_solver(name).can_solve(problem) is True}
        assert able == agree
        answers = {name: solve_problem(problem, registry.get_solver(name)) for name in able}
        for name, answer in answers.items():
            assert answer.termination is Termination.OPTIMAL, name
            assert answer.objective == pytest.approx(answers["ilp"].objective, rel=1e-10), name


# --- refusals, and time ----------------------------------------------------------------------


class OnlyEven(SideConstraint):
    """What nobody knows."""

    def fault(self, problem, choice):
        return "odd" if np.any(choice % 2) else None


CROSSING = (
    GroupCap(name="device 0", units=(0, 1), capacity_bytes=100),
    GroupCap(name="layer 1", units=(1, 2), capacity_bytes=100),
)
FEW = MaxDistinct(maximum=2)
CAPPED = hand_problem(constraints=CROSSING[:1])
WORST_UNIT = hand_problem(aggregate=Aggregate.WORST)
DENTED = make_problem([[0.0, 0.1, 0.9]], capacity=1)
UNEVEN = make_problem([[0.0, 0.5], [0.0, 0.5]], costs=[[0, 1], [0, 2]], capacity=2)
UNKNOWN = make_problem([[0.0, 0.5, 0.75]] * 2, capacity=2, constraints=(OnlyEven(),))


@pytest.mark.parametrize(
    ("name", "problem", "message"),
    [
        *((name, CAPPED, "use ilp") for name in ("dp", "hull")),
        *((name, WORST_UNIT, "use max_min") for name in ("dp", "hull", "lagrangian")),
        ("lagrangian", hand_problem(constraints=(FEW,)), "use ilp"),
        ("flow", medium_problem(0), "flow needs concave curves, .* and these are not; use ilp"),
        (
            "flow",
            hand_problem(),
            "flow needs one cost step for all units and these differ; use ilp",
        ),
        ("flow", medium_problem(0, concave=True, constraints=(FEW,)), "use ilp"),
        (
            "flow",
            medium_problem(0, concave=True, constraints=CROSSING),
            "device 0 and layer 1 overlap; use lagrangian or ilp",
        ),
        ("max_min", hand_problem(constraints=(FEW,)), "does not handle max_distinct; use ilp"),
        ("greedy", DENTED, "greedy needs concave curves, .* and these are not; use ilp"),
        *((name, UNEVEN, "use ilp") for name in ("greedy", "pyramid", "proportional")),
        *((name, UNKNOWN, "does not handle OnlyEven; write a solver") for name in ("auto", "ilp")),
        ("adaptive_head", UNEVEN, "use level='head'"),
    ],
)
def test_what_it_refuses(name, problem, message):
    with pytest.raises(SolverError, match=message):
        solve_problem(problem, registry.get_solver(name))


DEVICE = (GroupCap(name="device 7", units=tuple(range(9)), capacity_bytes=8 * 40),)
BEYOND = {"target": True, "share": 0.05, "constraints": DEVICE}
PAIR = (GroupCap(name="device 0", units=(0, 1), capacity_bytes=3),)


@pytest.mark.parametrize(
    ("name", "problem", "words"),
    [
        ("ilp", medium_problem(1, **BEYOND), "device 7"),
        ("lagrangian", medium_problem(1, **BEYOND), "device 7.*can; raise the caps"),
        ("flow", medium_problem(1, concave=True, **BEYOND), "within the caps"),
        (
            "max_min",
            make_problem(
                [[0.0, 0.8, 0.9, 1.0], [0.0, 0.4, 0.7, 1.0]],
                aggregate=Aggregate.WORST, target=0.8, constraints=PAIR,
            ),
            r"0\.7 within the side constraints",
        ),
    ],
)  # fmt: skip
def test_a_target_beyond_the_caps_names_them_and_the_most_that_can_be_met(name, problem, words):
    solver, slack = registry.get_solver(name), 0.01 if name == "lagrangian" else 1e-9
    with pytest.raises(InfeasibleError, match=words) as raised:
        solve_problem(problem, solver)
    largest = solve_problem(problem.with_capacity(problem.max_cost_bytes), solver).value
    nearest = raised.value.nearest
    assert nearest == pytest.approx(largest, rel=slack)
    assert solve_problem(problem.with_target(nearest), solver).value >= nearest - slack


def test_few_budgets_that_no_choice_has_are_named():
    apart = hand_problem(tokens=np.arange(1, 10).reshape(3, 3), constraints=(FEW,))
    with pytest.raises(InfeasibleError, match=r"different budgets \(at most 2\)") as raised:
        solve_problem(apart, registry.get_solver("ilp"))
    assert raised.value.nearest is None


def test_a_solver_of_the_worst_unit_alone_refuses_a_sum():
    class OnlyWorst(type(registry.get_solver("max_min"))):
        aggregates = frozenset({Aggregate.WORST})

    assert OnlyWorst().can_solve(medium_problem(0)).endswith("; use greedy or ilp")


MANY = {"n_layers": 80, "n_heads": 8, "n_options": 64}
LONG = medium_problem(6, **MANY)
LONG_TARGET = medium_problem(6, target=True, share=0.5, **MANY)
LONG_FEW = medium_problem(1, n_layers=30, n_options=64, constraints=(MaxDistinct(maximum=3),))


@pytest.mark.parametrize(
    ("name", "seconds", "problem"),
    [
        ("dp", 1e-4, LONG),
        ("lagrangian", 1e-6, LONG),
        ("auto", 1e-6, LONG_FEW),
        ("uniform", 1e-9, LONG),
        ("uniform", 1e-9, LONG_TARGET),
    ],
)
@pytest.mark.parametrize("given", [True, False], ids=["its limit", "the default limit"])
def test_it_stops_in_time_with_an_honest_answer(name, seconds, problem, given, monkeypatch):
    """A search of a program over all sets of few budgets went on for an hour without a limit."""
    if not given:
        monkeypatch.setattr("kvalloc.problem.solver.DEFAULT_LIMIT_SECONDS", seconds)
    limit = seconds if given else None
    answer = solve_problem(problem, registry.get_solver(name), time_limit_seconds=limit)
    ends = (Termination.TIME_LIMIT, Termination.OPTIMAL)
    assert answer.termination in ends[: 1 if problem is LONG_FEW else 2]
    assert not problem.is_better(answer.objective, answer.bound, 0.0)
