"""Layers on different devices, or with weights that are only loaded when their turn comes.

Two devices need a GPU, and no test has that yet. What can be seen here is that nothing asks a
layer's own weights where they are, and that what is made for a layer is made where it computes.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvalloc.errors import UnsupportedModelError
from kvalloc.runtime import make_cache

accelerate = pytest.importorskip("accelerate")

CONTEXT = 90


@pytest.fixture
def offloaded(tiny: ModuleType, tmp_path: Path) -> Any:
    """Every other layer's weights on the disk; between their turns they are on no device."""
    model = tiny.tiny_model("gemma3")
    places = {name: "cpu" for name, _ in model.named_children()}
    places |= {f"model.{name}": "cpu" for name, _ in model.model.named_children()}
    del places["model"], places["model.layers"]
    for layer in range(tiny.N_LAYERS):
        places[f"model.layers.{layer}"] = "disk" if layer % 2 else "cpu"
    return accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )


@pytest.mark.parametrize("level", ["layer", "head"])
def test_weights_on_the_disk(tiny: ModuleType, offloaded: Any, level: str) -> None:
    """The same logits, to the bit, and the same entries as with all weights in memory."""
    assert offloaded.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    plain = tiny.tiny_model("gemma3")
    profile = tiny.make_profile(plain, CONTEXT, 0.4)
    profile = tiny.by_head(profile, spread=9) if level == "head" else profile
    found, expected = profile.cache(offloaded), profile.cache(plain)
    mask = (torch.arange(CONTEXT) >= torch.tensor([0, 49])[:, None]).long()
    for tokens in (CONTEXT, 5, 1, 1):
        if tokens < CONTEXT:
            mask = torch.nn.functional.pad(mask, (0, tokens), value=1)
        ids = tiny.prompt(tokens, 2, seed=tokens)
        with torch.no_grad():
            one = offloaded(ids, attention_mask=mask, past_key_values=found).logits
            other = plain(ids, attention_mask=mask, past_key_values=expected).logits
        assert torch.equal(one, other)
    assert found.retained_bytes == expected.retained_bytes
    for layer in profile.shape.full_layers:
        assert torch.equal(found.kept_indices(layer), expected.kept_indices(layer))
    assert {tensor.device.type for layer in found.layers for tensor in (layer.keys,)} == {"cpu"}


def test_a_scorer_of_weights_that_are_not_there_says_so(tiny: ModuleType, offloaded: Any) -> None:
    profile = tiny.make_profile(tiny.tiny_model("gemma3"), CONTEXT, 0.4)
    cache = make_cache(profile, offloaded, policy="criticalkv")
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="layer 1, whose weights are"):
        offloaded(tiny.prompt(CONTEXT), past_key_values=cache)
