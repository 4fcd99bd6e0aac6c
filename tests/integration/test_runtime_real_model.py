"""The runtime on SmolLM2: against the oracle, to the byte, and as the README shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runtime_oracle
import torch
from transformers import DynamicCache

import kvalloc
from kvalloc.models import loading
from kvalloc.models.loading import shape_of

pytestmark = pytest.mark.model

CONTEXT = 256
TEXT = (
    "The port lies on the northern shore, and its lighthouse was built by the keeper's own "
    "hands. Every evening she climbs the stair, counts the ships that ride at anchor, and "
    "writes their number into a book bound in green leather. "
)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return loading.load_model("demo")


@pytest.fixture(scope="module")
def ids(loaded: Any) -> Any:
    tokens = loaded.tokenizer(TEXT * 20, return_tensors="pt").input_ids
    return tokens[:, :CONTEXT]


def profile_of(model: Any, share: float) -> Any:
    return runtime_oracle.make_profile(model, CONTEXT, share, shape=shape_of(model))


def test_a_full_profile_is_bit_identical(loaded: Any, ids: Any) -> None:
    model = loaded.model
    cache = kvalloc.make_cache(model, profile_of(model, 1.0))
    plain = DynamicCache(config=model.config)
    with torch.inference_mode():
        for part in (ids[:, :-6], ids[:, -6:-1], ids[:, -1:]):
            expected = model(part, past_key_values=plain).logits
            assert torch.equal(model(part, past_key_values=cache).logits, expected)


def test_head_level_budgets_free_bytes_and_equal_the_oracle(
    loaded: Any, ids: Any, tmp_path: Path
) -> None:
    """And so does what comes back from a file."""
    model = loaded.model
    profile = runtime_oracle.by_head(profile_of(model, 0.4), spread=60)
    question = loaded.tokenizer(" How many ships ride at anchor tonight?", return_tensors="pt")
    cache = kvalloc.make_cache(model, profile)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        assert cache.retained_bytes == profile.retained_bytes < 0.5 * cache.full_bytes
        cache.save(tmp_path / "read.safetensors")
        shadow = runtime_oracle.Shadow(model)
        shadow.logits(ids)
        shadow.follow(cache)
        expected = shadow.logits(question.input_ids)
        for one in (cache, kvalloc.load_cache(tmp_path / "read.safetensors", model)):
            logits = model(question.input_ids, past_key_values=one).logits
            assert runtime_oracle.worst(logits, expected) < 1e-4
