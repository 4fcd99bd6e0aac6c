"""Tiny models and the oracle for the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import runtime_oracle
import torch
from kernel_choice import WITH, WITHOUT, kernel_choice

from kvalloc.runtime.attention.cpu import CpuBackend


@pytest.fixture
def model() -> Any:
    """A tiny random model of four layers."""
    return runtime_oracle.tiny_model()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors lose far more to thread hand-over than they gain, most of all under load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[WITH, WITHOUT])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the CPU's kernel, and as where there is no compiler."""
    if request.param == WITH and CpuBackend().unavailable() is not None:
        pytest.skip(f"no kernel here: {CpuBackend().unavailable()}")
    with kernel_choice(request.param):
        yield


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers at 16 bits as the model made them: for two ways of one computation.

    They differ in the last bit of float32, which rounding makes a step of float16 now and then.
    """
    monkeypatch.setattr("kvalloc.runtime.kept.halved", lambda *numbers, lengths: numbers)
