"""Layers on different devices, or with weights that are only loaded when their turn comes.

Two devices need GPUs, see gpu/test_gpu_several.py. What can be seen here is that nothing asks a
layer's own weights where they are, and that what is made for a layer is made where it computes.
"""

import pytest
import runtime_oracle as tiny
import torch

from kvalloc.errors import UnsupportedModelError
from kvalloc.extensions.making import make_cache

accelerate = pytest.importorskip("accelerate")

CONTEXT = 90


def dispatched(model, devices, **options):
    """The model with its layers on each device in turn, everything else on the first."""
    inner = model.get_decoder()
    places = {name: devices[0] for name, _ in model.named_children()}
    places |= {f"model.{name}": devices[0] for name, _ in inner.named_children()}
    del places["model"], places["model.layers"]
    for layer in range(len(inner.layers)):
        places[f"model.layers.{layer}"] = devices[layer % len(devices)]
    return accelerate.dispatch_model(model, places, force_hooks=True, **options)


def answers_alike(spread, plain, level, tolerance=0.0):
    """The same logits, bytes and entries as where everything is in one place; the cache."""
    profile = tiny.make_profile(plain, CONTEXT, 0.4)
    profile = tiny.by_head(profile, spread=9) if level == "head" else profile
    found, expected = make_cache(spread, profile), make_cache(plain, profile)
    mask = (torch.arange(CONTEXT) >= torch.tensor([0, 49])[:, None]).long()
    for tokens in (CONTEXT, 5, 1, 1):
        if tokens < CONTEXT:
            mask = torch.nn.functional.pad(mask, (0, tokens), value=1)
        ids, shown = tiny.prompt(tokens, 2, seed=tokens).to(plain.device), mask.to(plain.device)
        with torch.no_grad():
            one = spread(ids, attention_mask=shown, past_key_values=found).logits
            other = plain(ids, attention_mask=shown, past_key_values=expected).logits
        if tolerance:
            assert tiny.worst(one, other.cpu(), mask) < tolerance
        else:
            assert torch.equal(one, other)
    assert found.retained_bytes == expected.retained_bytes
    assert tiny.same_kept(found, expected)
    return found


@pytest.fixture
def offloaded(tmp_path):
    """Every other layer's weights on the disk; between their turns they are on no device."""
    model = tiny.tiny_model("gemma3")
    return dispatched(model, ["cpu", "disk"], main_device="cpu", offload_dir=str(tmp_path))


@pytest.mark.parametrize("level", ["layer", "head"])
def test_weights_on_the_disk(offloaded, level):
    """The same logits, to the bit, and the same entries as with all weights in memory."""
    assert offloaded.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    found = answers_alike(offloaded, tiny.tiny_model("gemma3"), level)
    assert {tensor.device.type for layer in found.layers for tensor in (layer.keys,)} == {"cpu"}


def test_a_scorer_of_weights_that_are_not_there_says_so(offloaded):
    profile = tiny.make_profile(tiny.tiny_model("gemma3"), CONTEXT, 0.4)
    cache = make_cache(offloaded, profile, policy="criticalkv")
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match="layer 1, which is offloaded"):
        offloaded(tiny.prompt(CONTEXT), past_key_values=cache)
