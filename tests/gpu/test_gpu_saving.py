"""Caches in files, and those that move between the CPU and a GPU."""

import pytest
import runtime_oracle as tiny
import torch
from runtime_cells import Setting
from test_saving import *  # noqa: F403  its tests

import kvalloc

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", ["16_bits", "mixed_bits"])
@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("to_device", [True, False])
def test_a_cache_that_was_read_elsewhere(on_cpu, tmp_path, to_device, family, level, bits):
    """The same bytes and entries on the other device, and the oracle's answers there."""
    here, there = on_cpu(family), tiny.tiny_model(family)
    reads, asks = (
        Setting(model, 1e-4, "score", "immediate", "xkv", level, bits)
        for model in ((here, there) if to_device else (there, here))
    )
    cache, shadow = reads.prompted()
    reads.ask(3, cache, shadow)
    kvalloc.save_cache(cache, tmp_path / "c.safetensors")
    reads.follow(shadow, cache)  # what was asked has competed
    moved = kvalloc.load_cache(tmp_path / "c.safetensors", asks.model)
    assert moved.layers[0].keys.device == next(asks.model.parameters()).device
    assert moved.retained_bytes == cache.retained_bytes
    for layer in cache.profile.shape.full_layers:
        assert torch.equal(moved.kept_indices(layer).cpu(), cache.kept_indices(layer).cpu())
    for tokens in (5, 1, 1):
        asks.ask(tokens, moved, shadow)
