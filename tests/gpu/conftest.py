"""The runtime's tests on a GPU: tiny models there, the oracle on the CPU.

Most tests here are those of unit/runtime, which get other tiny models. Where there is no GPU,
``--gpu-device cpu`` runs them all the same, to try the tests themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runtime_oracle
import torch
from runtime_cells import model_of

TINY_MODEL = runtime_oracle.tiny_model
RUNTIME = Path(__file__).parents[1] / "unit" / "runtime"
sys.path.append(str(RUNTIME))  # the tests that run here, too


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where the caches are."""
    name: str = pytestconfig.getoption("--gpu-device")
    return name


@pytest.fixture(scope="session")
def on_cpu() -> Callable[..., Any]:
    """Makes tiny random models on the CPU."""
    return TINY_MODEL


@pytest.fixture(scope="module", autouse=True)
def models_on_the_device(on_cpu: Callable[..., Any], device: str) -> Iterator[None]:
    """Tiny models are on the device, take tokens and give logits on the CPU."""

    def tiny_model(*arguments: Any, **changes: Any) -> Any:
        model = on_cpu(*arguments, **changes).to(device)
        for module in (model, model.get_input_embeddings()):
            module.register_forward_pre_hook(_moved_in, with_kwargs=True, prepend=True)
        model.register_forward_hook(_moved_out)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_oracle, "tiny_model", tiny_model)
        model_of.cache_clear()
        yield
    model_of.cache_clear()


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
