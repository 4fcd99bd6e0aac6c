"""Tiny models and the oracle for the runtime's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch


def _load() -> ModuleType:
    # By its path: test folders are no packages, and pytest's import mode is not ours to choose.
    name = "kvalloc_runtime_oracle"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("oracle.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Tiny random models, budget profiles for them, and the oracle."""
    return _load()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors lose far more to thread hand-over than they gain, most of all under load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
