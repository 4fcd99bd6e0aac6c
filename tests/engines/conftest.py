"""Other engines, run in environments of their own: `make test-engines` makes them."""

from __future__ import annotations

import pytest

from kvalloc.models.loading import DEMO


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine-model", default=DEMO, help="demo, or the path of a .gguf file")


@pytest.fixture(scope="session")
def engine_model(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--engine-model"))
