"""The tiny models of the runtime's tests."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import runtime_oracle
from tiny_models import WordTokenizer

import kvalloc


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Tiny random models, budget profiles for them, and the oracle."""
    return runtime_oracle


@pytest.fixture(scope="session")
def fitted_file(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `kvalloc.fit` measures of the tiny model with heads of 16 channels."""
    file = tmp_path_factory.mktemp("fitted") / "own.safetensors"
    texts = [" ".join(f"word{(7 * i * i) % 89}" for i in range(3000))]
    model = tiny.tiny_model(head_dim=16)
    kvalloc.fit(model, WordTokenizer(), texts, output=file, samples=8, context=64)
    return file
