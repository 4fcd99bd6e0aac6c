"""What the runtime's benchmark counts and asks for; its seconds are left to it."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runtime_oracle as tiny
import torch
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_runtime
import runtime_half
from _common import row_met
from runtime_rows import ANSWER_TOKENS, fits_rows, stored_bytes

import kvalloc
from kvalloc.accounting.costs import POSITION_BYTES

CONTEXT, ROWS = 90, 3
ENTRY_BYTES = 2 * tiny.HEAD_DIM * 4


def prefilled(model: Any, **budgets: Any) -> dict[str, Any]:
    """Caches of one row of the same prompt: a plain one, and one of each budget profile."""
    caches = {name: kvalloc.make_cache(model, one) for name, one in budgets.items()}
    caches["plain"] = DynamicCache(config=model.config)
    ids = tiny.prompt(CONTEXT)
    return {name: bench_runtime.prefill(model, cache, ids) for name, cache in caches.items()}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.tiny_model(vocab_size=128)


@pytest.fixture
def profile(model: Any) -> Any:
    return tiny.make_profile(model, CONTEXT, 0.2)


def fitting(model: Any, caches: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = [name for name in caches if name != "plain"]
    rows = list(fits_rows(caches, model=model, rows=ROWS, target=4.5))
    return dict(zip(names, rows, strict=True))


def test_rows_that_fit_hold_the_prompt_and_an_answer_of_fixed_length(
    model: Any, profile: Any
) -> None:
    caches = prefilled(model, layer=profile, head=tiny.by_head(profile))
    before = {name: stored_bytes(cache) for name, cache in caches.items()}
    result = fitting(model, caches)
    assert {name: stored_bytes(cache) for name, cache in caches.items()} == before
    assert all(cache.get_seq_length() == CONTEXT for cache in caches.values())
    entry_rows = tiny.N_LAYERS * tiny.N_KV_HEADS
    memory = ROWS * (CONTEXT + ANSWER_TOKENS) * entry_rows * ENTRY_BYTES
    for name, row in result.items():
        budgets = profile.budgets if name == "layer" else tiny.by_head(profile).budgets
        kept = int(budgets.sum()) * (profile.shape.bytes_per_entry + POSITION_BYTES)
        one = kept + ANSWER_TOKENS * entry_rows * ENTRY_BYTES
        assert row["figure"] == (memory // one) / ROWS
        assert f"{memory:,} bytes" in row["name"]
        assert f"{memory // one} rows take {memory // one * one:,} bytes" in row["note"]
        assert f"each with {ANSWER_TOKENS} decoded tokens" in row["note"]
        assert row_met({**row, "at_least": row["figure"]})
        assert not row_met({**row, "at_least": row["figure"] + 0.1})
        assert not row_met({**row, "at_least": 0, "at_most": row["figure"] - 0.1})


def test_what_16_bits_lose_is_more_than_nothing(model: Any, profile: Any, tmp_path: Path) -> None:
    """The same cache without its rounding is what it is compared with."""
    profile.save(tmp_path / "p.json")
    sizes = Namespace(profile=str(tmp_path / "p.json"), samples=2, tokens=CONTEXT)
    ids = torch.cat([tiny.prompt(CONTEXT + runtime_half.NEW, seed=seed) for seed in (1, 2)], dim=1)
    loaded: Any = SimpleNamespace(model=model, tokenizer=lambda *_, **__: {"input_ids": ids})
    mean, worst = runtime_half.rows_of(loaded, sizes)
    assert 0 < mean["low"] <= mean["figure"] <= mean["high"] <= worst["figure"] < 1e-5
    assert "stored in 0." in mean["note"]
