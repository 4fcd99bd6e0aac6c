"""Layers on several devices, and weights that come to the GPU when their turn is."""

import pytest
import torch
from test_several_devices import answers_alike, dispatched

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_on_two_devices(on_cpu, device, family, level):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    whole = on_cpu(family).to(device)
    spread = dispatched(on_cpu(family), ["cuda:0", "cuda:1"])
    cache = answers_alike(spread, whole, level, tolerance=1e-4)
    assert {str(layer.keys.device) for layer in cache.layers} == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize("level", ["layer", "head"])
def test_weights_in_main_memory(on_cpu, device, level):
    """Every other layer's weights are on the CPU, and each computes on the device."""
    whole = on_cpu("gemma3").to(device)
    spread = dispatched(on_cpu("gemma3"), [device, "cpu"], main_device=device)
    cache = answers_alike(spread, whole, level, tolerance=1e-4)
    assert {layer.keys.device.type for layer in cache.layers} == {torch.device(device).type}
