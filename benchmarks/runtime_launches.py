"""Launches on a CUDA device for one decoded token, in each layer: counted without a device.

    python benchmarks/bench_runtime.py launches

Tensors without data stand for those on the device (`tests/support/fake_device.py`), so this shows
how many kernels are launched, and not how long they take. A layer's are those of a model of four
layers less those of a model of two, halved: its projections, norms and feed-forward part are among
them, the same for all caches. Where the host would wait for a value of the device, or the device
for one of the host, that is said instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "support"
sys.path.append(str(TESTS))
from fake_device import DeviceWaitError, decoded_on_fake_device  # noqa: E402

import kvalloc  # noqa: E402

TOKENS, ROWS = 300, 2
CASES = ("plain", "by layer", "by head", "by head at 8 bits", "at 16, 8 and 4 bits", "left padding")


def main() -> int:
    for name in CASES:
        print(f"{name}: {in_words(name)}", flush=True)
    return 0


def in_words(name: str) -> str:
    try:
        few, more = (launches(name, n_layers) for n_layers in (2, 4))
    except DeviceWaitError as error:
        return f"the host waits ({error})"
    each = {one: (count - few[one]) // 2 for one, count in more.items() if count > few[one]}
    ours = {
        one: count for one, count in each.items() if one.startswith(("read_", "add_tiles", "_read"))
    }
    return f"{sum(each.values())} launches a layer, {sum(ours.values())} of them Triton's"


def launches(name: str, n_layers: int) -> Any:
    def make_model() -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=n_layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            vocab_size=97,
            max_position_embeddings=1024,
        )
        own = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
        own.config._name_or_path = "tiny"
        return own

    def make_cache(model: Any) -> Any:
        return (
            DynamicCache(config=model.config)
            if name == "plain"
            else kvalloc.make_cache(model, profile(name, model))
        )

    def fill(model: Any) -> Any:
        cache = make_cache(model)
        ids = torch.randint(1, 97, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :50] = 0
        model(ids, attention_mask=mask if name == "left padding" else None, past_key_values=cache)
        return cache

    return decoded_on_fake_device(make_model, fill, make_cache)


def profile(name: str, model: Any) -> Any:
    from kvalloc.formats.budget_profile import BudgetProfile, Policy
    from kvalloc.models.loading import shape_of

    shape = shape_of(model)
    budgets = np.full((shape.n_layers, shape.n_kv_heads), 100, dtype=np.int64)
    if name != "by layer":
        budgets += np.arange(-2, 2) * 20
    bits = {"by head at 8 bits": [8, 8, 8, 8], "at 16, 8 and 4 bits": [16, 8, 8, 4]}.get(name)
    made = BudgetProfile(
        shape=shape,
        level="layer" if name == "by layer" else "head",
        context_tokens=TOKENS,
        budgets=budgets,
        policy=Policy(scorer="xkv", scorer_parameters={"window": 8}, sinks=4, window=8),
    )
    return made if bits is None else made.replace(bits=np.tile(bits, (shape.n_layers, 1)))
