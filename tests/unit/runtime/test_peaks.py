"""What each mode of eviction promises at its peak, read from allocations at every layer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from live_storage import LiveStorage

import kvalloc
from kvalloc.models.loading import shape_of
from kvalloc.runtime.attention import torch as by_torch

TOKENS, LAYERS, AWAITED = 1000, 12, 8
SHARE = 0.2


class Watched:
    """The most bytes alive, above what a forward without a cache has alive, layer by layer."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.get_decoder().layers

    def peaks(self, run: Any) -> list[int]:
        """Most bytes alive from the beginning of each layer to that of the next, and at the end."""
        found: list[int] = []
        with LiveStorage() as storage:

            def mark(*_: Any) -> None:
                found.append(storage.peak_bytes)
                storage.peak_bytes = storage.bytes

            hooks = [layer.register_forward_pre_hook(mark) for layer in self.layers]
            with torch.no_grad():
                run()
            mark()
        for hook in hooks:
            hook.remove()
        return found[1:]


def profile_of(tiny: ModuleType, model: Any, mode: str) -> Any:
    scorer, parameters = ("lookahead", {"tokens": AWAITED}) if "bounded" in mode else ("xkv", {})
    profile = tiny.make_profile(model, TOKENS, SHARE, scorer=scorer, parameters=parameters)
    if not mode.endswith("by layer"):
        profile = tiny.by_head(profile, spread=60)
    if "shared" in mode:
        budgets = profile.budgets.copy()
        for group in GROUPS:
            budgets[list(group)] = budgets[group[0]]
        return profile.replace(budgets=budgets, share_groups=GROUPS)
    if "packed" in mode:
        bits = np.resize([8, 4, 16, 8], LAYERS)[:, None].repeat(tiny.N_KV_HEADS, axis=1)
        bits[:, 1] = bits[:, 0] if mode.endswith("by layer") else 4
        return profile.replace(bits=bits)
    if mode == "matched":
        matching = {"name": "attention_matching", "parameters": {"rows": 16, "following": 0}}
        return profile.replace(policy=profile.policy.replace(**matching))
    return profile.replace(by_prompt=mode == "handed out")


BOUNDS = {"early by layer": None, "early": None, "matched": None, "handed out": 1}
BOUNDS |= {"bounded by layer": 2, "bounded": 2}
BOUNDS |= dict.fromkeys(["packed by layer", "packed", "shared by layer", "shared"])
GROUPS = ((2, 3), (4, 5, 6))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", list(BOUNDS))
def test_the_peak_of_every_layer_is_what_the_mode_promises(
    tiny: ModuleType, mode: str, dtype: torch.dtype, padded: bool
) -> None:
    model = tiny.tiny_model(dtype=dtype, num_hidden_layers=LAYERS)
    watched, ids = Watched(model), tiny.prompt(TOKENS, 2)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :300] = 0
    size = 4 if mode == "matched" else dtype.itemsize  # fitted in float32
    layer = 2 * TOKENS * tiny.N_KV_HEADS * 2 * tiny.HEAD_DIM * size
    profile = profile_of(tiny, model, mode)
    cache = kvalloc.make_cache(model, profile, bounded=BOUNDS[mode] is not None)

    def prefill(cache: Any) -> None:
        model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1)

    alone = watched.peaks(
        lambda: model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    )
    above = [a - b for a, b in zip(watched.peaks(lambda: prefill(cache)), alone, strict=True)]
    kept = (BOUNDS[mode] or 1) * profile.retained_bytes_at(TOKENS) * 2
    if "shared" in mode:  # a group is held until its last layer, with its rankings
        layer = max(map(len, GROUPS)) * (layer + 2 * 2 * TOKENS * tiny.N_KV_HEADS * 8)
    assert max(above) <= kept + layer


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_late_eviction_holds_little_more_than_the_full_cache(
    tiny: ModuleType, dtype: torch.dtype, padded: bool
) -> None:
    model = tiny.tiny_model(dtype=dtype, num_hidden_layers=30, head_dim=64)  # as SmolLM2's
    watched, ids = Watched(model), tiny.prompt(TOKENS, 2)
    mask = torch.ones(2, TOKENS + AWAITED, dtype=torch.long)
    if padded:
        mask[1, :300] = 0
    shape = shape_of(model)
    options = {"scorer": "lookahead", "parameters": {"tokens": AWAITED}, "shape": shape}
    cache = kvalloc.make_cache(model, tiny.make_profile(model, TOKENS, SHARE, **options))

    def answer(**kept: Any) -> None:
        model(ids, attention_mask=mask[:, :TOKENS], logits_to_keep=1, **kept)
        for n in range(AWAITED):
            seen = mask[:, : TOKENS + n + 1] if kept.get("past_key_values") is not None else None
            model(ids[:, n : n + 1], attention_mask=seen, **kept)

    alone = watched.peaks(lambda: answer(use_cache=False))
    held = watched.peaks(lambda: answer(past_key_values=cache))
    assert cache.reduced
    full = 2 * (TOKENS + AWAITED) * 30 * shape.n_kv_heads * shape.bytes_per_entry
    assert max(a - b for a, b in zip(held, alone, strict=True)) <= 1.05 * full


def test_chunks_need_what_is_kept_and_one_layer_in_full(
    tiny: ModuleType, peak_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak of all tensors alive, above that of one chunk without any cache."""
    monkeypatch.setattr(by_torch, "SCRATCH_NUMBERS", 1 << 14)
    model, ids, chunk = tiny.tiny_model(), tiny.prompt(TOKENS), 100
    layer_bytes = TOKENS * tiny.N_KV_HEADS * 2 * tiny.HEAD_DIM * 4
    profile = tiny.by_head(tiny.make_profile(model, TOKENS, SHARE), spread=60)
    cache = kvalloc.make_cache(model, profile)

    def in_chunks() -> None:
        with cache.prefill():
            for part in ids.split(chunk, dim=1):
                model(part, past_key_values=cache, logits_to_keep=1)

    with torch.no_grad():
        alone = peak_bytes(lambda: model(ids[:, :chunk], use_cache=False, logits_to_keep=1))
        above = peak_bytes(in_chunks) - alone
    scratch = 5 * (1 << 14) * 4 + layer_bytes * chunk // TOKENS
    assert above <= cache.retained_bytes + layer_bytes + scratch
