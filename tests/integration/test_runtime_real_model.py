"""The runtime on SmolLM2: against the oracle, to the byte, and as the README shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import runtime_oracle  # noqa: E402

import kvalloc  # noqa: E402
from kvalloc.formats.budget_profile import BudgetProfile, Policy  # noqa: E402
from kvalloc.models import loading  # noqa: E402
from kvalloc.models.loading import shape_of  # noqa: E402

pytestmark = pytest.mark.model

CONTEXT, SINKS, WINDOW = 256, 4, 8
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


def pyramid(model: Any, share: float) -> BudgetProfile:
    """Budgets that differ from layer to layer, around a share of the context."""
    shape = shape_of(model)
    slope = np.linspace(1.4, 0.6, shape.n_layers) if share < 1 else np.ones(shape.n_layers)
    tokens = np.clip((slope * share * CONTEXT).astype(np.int64), SINKS + WINDOW, CONTEXT)
    return BudgetProfile(
        shape=shape,
        level="layer",
        context_tokens=CONTEXT,
        budgets=np.repeat(tokens[:, None], shape.n_kv_heads, axis=1),
        policy=Policy(
            scorer="xkv", scorer_parameters={"window": WINDOW}, sinks=SINKS, window=WINDOW
        ),
    )


def test_a_full_profile_is_bit_identical(loaded: Any, ids: Any) -> None:
    model = loaded.model
    cache = kvalloc.make_cache(model, pyramid(model, 1.0))
    from transformers import DynamicCache

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
    profile = runtime_oracle.by_head(pyramid(model, 0.4), spread=60)
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
