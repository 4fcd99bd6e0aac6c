"""The runtime's tests on a GPU: tiny models there, the oracle on the CPU.

Most tests here are those of unit/runtime, which only see another `tiny`. Where there is no GPU,
``--gpu-device cpu`` runs them all the same, to try the tests themselves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import other_attention
import pytest
import runtime_oracle
import torch

RUNTIME = Path(__file__).parents[1] / "unit" / "runtime"
sys.path.append(str(RUNTIME))  # the tests that run here, too


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where the caches are."""
    name: str = pytestconfig.getoption("--gpu-device")
    return name


@pytest.fixture(scope="session")
def on_cpu() -> ModuleType:
    """Tiny random models on the CPU, budget profiles for them, and the oracle."""
    return runtime_oracle


@pytest.fixture(scope="session")
def tiny(on_cpu: ModuleType, device: str) -> ModuleType:
    """The same with models on the device, which take tokens and give logits on the CPU."""
    there: Any = ModuleType("kvalloc_runtime_oracle_on_device")
    vars(there).update(vars(on_cpu))

    def tiny_model(*arguments: Any, **changes: Any) -> Any:
        model = on_cpu.tiny_model(*arguments, **changes).to(device)
        for module in (model, model.get_input_embeddings()):
            module.register_forward_pre_hook(_moved_in, with_kwargs=True, prepend=True)
        model.register_forward_hook(_moved_out)
        return model

    there.tiny_model = tiny_model
    found: ModuleType = there
    return found


@pytest.fixture(scope="session")
def attention_on_cpu() -> Any:
    """``with attention_on_cpu(name):`` as in unit/runtime, for trying the tests on the CPU."""
    return other_attention.attention_on_cpu


@pytest.fixture
def either_way() -> None:
    """Of the two ways in unit/runtime the kernel's alone: only it holds tokens apart on a GPU."""


def _moved_in(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The oracle copies a model with its hooks, so they go by where the module is."""
    place = next(module.parameters()).device

    def moved(value: Any) -> Any:
        return value.to(place) if isinstance(value, torch.Tensor) else value

    return tuple(map(moved, inputs)), {name: moved(value) for name, value in named.items()}


def _moved_out(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    output.logits = output.logits.cpu()
    return output
