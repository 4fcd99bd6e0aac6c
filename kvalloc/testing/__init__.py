"""What authors of plug-ins test theirs with: contracts, tiny problems, and an oracle.

``SolverContract`` and ``ScorerContract`` need pytest; the problems and the oracle do not.

Examples
--------
A test module of a plug-in::

    import pytest
    from kvalloc.testing import SolverContract
    from my_package import MySolver

    class TestMySolver(SolverContract):
        @pytest.fixture
        def solver(self):
            return MySolver()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvalloc.testing.oracle import Optimum, brute_force
from kvalloc.testing.problems import KINDS, larger_problem, tiny_problem, tiny_problems

if TYPE_CHECKING:
    from kvalloc.testing.contract import SolverContract
    from kvalloc.testing.scorer_contract import ScorerContract

__all__ = [
    "KINDS",
    "Optimum",
    "ScorerContract",
    "SolverContract",
    "brute_force",
    "larger_problem",
    "tiny_problem",
    "tiny_problems",
]


_CONTRACTS = {
    "SolverContract": "kvalloc.testing.contract",
    "ScorerContract": "kvalloc.testing.scorer_contract",
}


def __getattr__(name: str) -> Any:
    if name not in _CONTRACTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import pytest
    except ModuleNotFoundError:
        from kvalloc.errors import MissingDependencyError

        raise MissingDependencyError(
            f"{name} is a pytest suite and pytest is not installed; pip install pytest"
        ) from None
    # So that a failing assert of the suite shows its values, as one in a test module does.
    pytest.register_assert_rewrite(_CONTRACTS[name])
    return getattr(import_module(_CONTRACTS[name]), name)
