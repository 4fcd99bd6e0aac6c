"""Every built-in solver keeps the contract that third parties test theirs with."""

import importlib.metadata

import pytest

from kvalloc.problem import registry
from kvalloc.testing import SolverContract

# Options for tiny problems, and what a rule does not promise.
OPTIONS = {
    "head_classes": {"recent_tokens": 1, "sink_tokens": 4},
}
EXACT = {"greedy", "dp", "flow", "ilp", "auto"}
RULES = {"uniform", "pyramid", "adaptive_head", "proportional", "head_classes", "max_min"}
MAY_GIVE_UP = RULES | {"cvar", "hull", "lagrangian"}
NOT_MONOTONE = {
    "cvar",
    "max_min",
    "pyramid",
    "adaptive_head",
    "proportional",
    "lagrangian",
    "hull",
}

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
