"""Tiny models and the oracle for the runtime's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


def _load(name: str, file: str) -> ModuleType:
    # By its path: test folders are no packages, and pytest's import mode is not ours to choose.
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Tiny random models, budget profiles for them, and the oracle."""
    return _load("kvalloc_runtime_oracle", "oracle.py")


@pytest.fixture(scope="session")
def peak_bytes() -> Any:
    """Most bytes of tensor storage alive at any time while a function runs."""
    return _load("kvalloc_live_storage", "live_storage.py").peak_bytes


@pytest.fixture(scope="session")
def attention_on_cpu() -> Any:
    """``with attention_on_cpu(name):`` lets flash (a stand-in) and flex attention run."""
    return _load("kvalloc_other_attention", "other_attention.py").attention_on_cpu


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors lose far more to thread hand-over than they gain, most of all under load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
