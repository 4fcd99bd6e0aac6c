"""Pytest suites, tiny problems, and an oracle for the tests of plug-ins.

Examples
--------
A test module of a solver; `ScorerContract` works in the same way::

    import pytest
    from kvalloc.testing import SolverContract
    from my_package import MySolver

    class TestMySolver(SolverContract):
        @pytest.fixture
        def solver(self):
            return MySolver()
"""

import pytest

from kvalloc.testing.oracle import brute_force as brute_force
from kvalloc.testing.problems import KINDS as KINDS
from kvalloc.testing.problems import larger_problem as larger_problem
from kvalloc.testing.problems import tiny_problem as tiny_problem
from kvalloc.testing.problems import tiny_problems as tiny_problems

# so that a failing assert of a suite shows its values, as one in a test module does
pytest.register_assert_rewrite("kvalloc.testing.contract", "kvalloc.testing.scorer_contract")

from kvalloc.testing.contract import SolverContract as SolverContract  # noqa: E402
from kvalloc.testing.scorer_contract import ScorerContract as ScorerContract  # noqa: E402
