"""The tiny models of the runtime's tests."""

from __future__ import annotations

from types import ModuleType

import pytest
import runtime_oracle


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Tiny random models, budget profiles for them, and the oracle."""
    return runtime_oracle
