"""A budget alone: rounded entries within a share of the bytes, late or early by the memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import run as run_command
from prompt_runs import generate

import kvalloc
from kvalloc.accounting.costs import entries_in_share, stored_bytes
from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.loading import shape_of
from kvalloc.online.default import AWAITED, Default
from kvalloc.runtime import load_cache
from kvalloc.runtime.account import kept_bytes

TOKENS = 150


@pytest.fixture
def model(tiny: ModuleType) -> Any:
    return tiny.tiny_model(head_dim=16)


def run(model: Any, ids: torch.Tensor, new: int = AWAITED + 2, **options: Any) -> Any:
    """The cache of a call with a budget, which has followed long enough to evict."""
    inputs = {name: options.pop(name) for name in [*options] if name in ("attention_mask",)}
    with kvalloc.apply(model, **options) as applied:
        generate(model, ids, max_new_tokens=new, min_new_tokens=new, **inputs)
    return applied.last_cache


def share_of(cache: Any, tokens: int, rows: int = 1) -> float:
    """What is stored of the prompt, read from the tensors, of a cache at 16 bits."""
    stored = kept_bytes(cache.layers)
    assert stored is not None
    return cache.profile.of_16_bits(stored, tokens, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "bits", "late"),
    [
        ({"budget": "20%"}, 4, True),
        ({"budget": 0.3}, 4, True),
        ({"budget": "50%"}, 8, True),
        ({"budget": "14%"}, 3, True),
        ({"budget": "30%", "memory": "60KiB"}, 4, False),
        ({"budget": "30%", "decode_every": 64}, 4, True),
        ({"budget": "30%", "memory": "1GiB", "bounded": 2}, 4, True),
        ({"budget": "41%"}, 4, False),
    ],
)
def test_no_more_than_the_share_is_stored_and_little_less(
    tiny: ModuleType, model: Any, dtype: torch.dtype, options: dict[str, Any], bits: int, late: bool
) -> None:
    model, share = model.to(dtype), Default.parse(options["budget"]).share
    if "memory" in options and dtype is torch.bfloat16:
        options = {**options, "memory": options["memory"].replace("60KiB", "45KiB")}
    cache = run(model, tiny.prompt(TOKENS), **options)
    assert np.unique(cache.profile.bits).tolist() == [bits]
    assert cache.profile.by_prompt is late
    found = share_of(cache, TOKENS)
    assert found <= share
    if cache.kept_tokens.min() < TOKENS:  # all at 4 bits is less than 41%
        assert found > share - 0.04
    if late:
        assert len(np.unique(cache.kept_tokens)) > 1  # handed out by the prompt


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_other_families_padded_rows_and_chunks(tiny: ModuleType, kind: str) -> None:
    model = tiny.tiny_model(kind, head_dim=16)
    lengths = (TOKENS, 100)
    ids = torch.cat([tiny.prompt(TOKENS), tiny.prompt(TOKENS, seed=1)])
    mask = torch.ones_like(ids)
    mask[1, : TOKENS - lengths[1]] = 0
    cache = run(model, ids, budget="30%", attention_mask=mask)
    shape = cache.profile.shape
    full = list(shape.full_layers)
    for row, tokens in enumerate(lengths):
        kept = cache.kept_tokens_by_row[row][full] - (AWAITED + 1)
        stored = int(stored_bytes(kept, 4, shape).sum())
        assert stored <= 0.3 * kept.size * tokens * 2 * 2 * shape.head_dim
        assert kept.sum() > 0.9 * kept.size * entries_in_share(0.3, tokens, 4, shape, least=12)
    plain = run(model, ids[:1], budget="30%")
    model.generation_config.prefill_chunk_size = 64
    chunked = run(model, ids[:1], budget="30%")
    assert chunked.kept_tokens.tolist() == plain.kept_tokens.tolist()


def test_it_says_which_way_what_it_takes_and_what_it_costs(
    tiny: ModuleType, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvalloc.online.default"):
        late = run(model, tiny.prompt(TOKENS), budget="20%")
        early = run(model, tiny.prompt(TOKENS), budget="20%", memory="60KiB")
        run(model, tiny.prompt(TOKENS), budget=1)
    said = caplog.messages
    assert said[0] == late.profile.detail
    assert said[1] == early.profile.detail
    assert "holds the full cache until 16 tokens have followed the prompt; 5" in said[0]
    assert "evicts while the prompt is read; 5" in said[1]
    for one in said[:2]:
        assert "% of the entries at 4 bits, 14.91 KiB, 19.9% of a cache at 16 bits; about" in one
        assert " KiB while it is read, and 1.1 times a plain prefill" in one
    assert "evicts nothing; 100% of the entries as they are, 150 KiB, 200.0% of" in said[2]


def test_a_budget_of_everything_changes_no_bit(tiny: ModuleType, model: Any) -> None:
    ids = tiny.prompt(TOKENS)
    plain = generate(model, ids)
    with kvalloc.apply(model, budget="100%"):
        assert torch.equal(generate(model, ids), plain)


def test_saying_how_still_gives_a_plain_press(tiny: ModuleType, model: Any) -> None:
    cache = run(model, tiny.prompt(TOKENS), budget="50%", scorer="snapkv", solver="uniform")
    assert cache.profile.share_of_16_bits is None
    assert cache.profile.bits is None
    assert cache.profile.policy.scorer == "snapkv"
    assert (cache.profile.budgets == TOKENS // 2).all()
    assert cache.decision_seconds is not None


def test_the_profile_is_a_file_and_the_cache_another(
    tiny: ModuleType, model: Any, tmp_path: Any
) -> None:
    cache = run(model, tiny.prompt(TOKENS), budget="20%")
    cache.profile.save(tmp_path / "p.json")
    loaded = BudgetProfile.load(tmp_path / "p.json")
    assert loaded == cache.profile
    told = run_command("inspect", tmp_path / "p.json").out
    assert "as many entries in every head as take 20.0% of a cache at 16 bits" in told
    cache.save(tmp_path / "c.kv")
    again = load_cache(tmp_path / "c.kv", model)
    assert again.retained_bytes == cache.retained_bytes
    for tokens in (30, 151, 400):
        granted = 0.2 * loaded.budgets.size * tokens * 4 * 16
        assert loaded.retained_bytes_at(tokens) <= granted
    with pytest.raises(InputError, match="share_of_16_bits is given beside other budgets"):
        loaded.replace(budgets=loaded.budgets - 1)
    early = Default(share=0.2).profile(shape_of(model), late=False)
    with pytest.raises(kvalloc.KVAllocError, match="as many entries in every head"):
        early.cache(model, adapt=0.2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": "2%"}, "2.0% of the bytes of 150 tokens at 16 bits is 7 entries a head at 3 "
                           "bits, below the 12 of sinks and window; ask for at least 3.0%"),
        ({"budget": "30%", "memory": "2KiB"}, "memory is 2.00 KiB, but a prompt of 150 tokens "
                                              "needs 294 KiB where its full cache is held, and "
                                              "59.94 KiB where it is evicted while it is read"),
        ({"budget": "much"}, "'much' is not a share"),
        ({"budget": "20%", "memory": "much"}, "much"),
        ({"budget": "20%", "memory": "1MiB", "scorer": "snapkv"}, "two targets at once"),
        ({"budget": "30%", "decode_every": 0}, "decode_every is 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    tiny: ModuleType, model: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        run(model, tiny.prompt(TOKENS), **options)


def test_heads_that_three_bits_do_not_fit_have_four(tiny: ModuleType) -> None:
    model = tiny.tiny_model(head_dim=24)
    cache = run(model, tiny.prompt(TOKENS), budget="14%")
    assert np.unique(cache.profile.bits).tolist() == [4]
    assert share_of(cache, TOKENS) <= 0.14
    said = "bits: 3 bits for heads of 24 numbers, expected a power of two: .* take 4 bits"
    with pytest.raises(InputError, match=said):
        cache.profile.replace(bits=np.full_like(cache.profile.bits, 3), share_of_16_bits=None)


def test_shares_do_not_depend_on_the_models_type(tiny: ModuleType, model: Any) -> None:
    shape = shape_of(model)
    for bits in (16, 8, 4):
        of_types = {
            entries_in_share(0.3, TOKENS, bits, replace(shape, dtype_bytes=own), least=0)
            for own in (2, 4)
        }
        assert len(of_types) == 1
