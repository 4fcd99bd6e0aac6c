"""The whole test of a plug-in: kvalloc brings the rest."""

import pytest
from kvalloc_example_solver import SquareRoot

from kvalloc.testing import SolverContract


class TestSquareRoot(SolverContract):
    may_give_up = True
    monotone = False

    @pytest.fixture
    def solver(self):
        return SquareRoot()
