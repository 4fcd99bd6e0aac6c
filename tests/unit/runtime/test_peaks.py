"""What each mode of eviction promises at its peak, read from allocations at every layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from factories import make_bits, make_scores
from live_storage import LiveStorage, peak_bytes
from prompt_runs import padding_mask, run
from transformers.integrations import sdpa_attention

import kvalloc
from kvalloc.accounting.costs import plain_bytes
from kvalloc.errors import InputError
from kvalloc.models.loading import shape_of
from kvalloc.online.decision import PromptSize
from kvalloc.online.default import Default
from kvalloc.online.methods import Immediate
from kvalloc.runtime.attention import torch as by_torch
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.scorers.lookahead import Lookahead

TOKENS, LAYERS = 1000, 12
SHARE = 0.2
ROWS = [
    (torch.float32, padding_mask((TOKENS, TOKENS))),
    (torch.bfloat16, padding_mask((TOKENS, 700))),
]
"""Types, and padding of rows: neither changes what the other takes."""


def peaks(model: Any, run: Callable[[], Any]) -> list[int]:
    """Most bytes alive from the beginning of each layer to that of the next, and at the end."""
    found: list[int] = []
    with LiveStorage() as storage:

        def mark(*_: Any) -> None:
            found.append(storage.peak_bytes)
            storage.peak_bytes = storage.bytes

        hooks = [one.register_forward_pre_hook(mark) for one in model.get_decoder().layers]
        with torch.no_grad():
            run()
        mark()
    for hook in hooks:
        hook.remove()
    return found[1:]


def rise(model: Any, mask: Any, **cached: Any) -> int:
    """Most bytes that reading a prompt into a cache has alive in a layer, beyond one without."""
    read = partial(model, tiny.prompt(TOKENS, 2), attention_mask=mask, logits_to_keep=1)
    alone = peaks(model, partial(read, use_cache=False))
    found = peaks(model, partial(read, **cached))[-len(alone) :]  # without a mini-prefill
    return max(a - b for a, b in zip(found, alone, strict=True))


def profile_of(model, mode):
    profile = tiny.make_profile(model, TOKENS, SHARE, scorer="xkv", parameters={})
    if not mode.endswith("by layer"):
        profile = tiny.by_head(profile, spread=60)
    if "packed" in mode:
        bits = np.resize([8, 4, 16, 8], LAYERS)[:, None].repeat(tiny.N_KV_HEADS, axis=1)
        bits[:, 1] = bits[:, 0] if mode.endswith("by layer") else 4
        return profile.replace(bits=bits)
    if mode == "matched":
        matching = {"name": "attention_matching", "parameters": {"rows": 16}}
        return profile.replace(policy=profile.policy.replace(**matching))
    return profile.replace(by_prompt=mode == "handed out")


MODES = ["by layer", "by head", "matched", "handed out", "packed by layer", "packed"]


@pytest.mark.parametrize(("dtype", "mask"), ROWS, ids=["float32", "bfloat16, padded"])
@pytest.mark.parametrize("mode", MODES)
def test_the_peak_of_every_layer_is_what_the_mode_promises(mode, dtype, mask):
    model = tiny.tiny_model(dtype=dtype, num_hidden_layers=LAYERS)
    size = 4 if mode == "matched" else dtype.itemsize  # fitted in float32
    layer = 2 * TOKENS * tiny.N_KV_HEADS * 2 * tiny.HEAD_DIM * size
    profile = profile_of(model, mode)
    options = CacheOptions(by_layer=profile.by_prompt)
    cache = build_rows(model, [Way(profile=profile, options=options)])
    kept = profile.retained_bytes_at(TOKENS) * 2
    assert rise(model, mask, past_key_values=cache) <= kept + layer


@pytest.mark.parametrize(("dtype", "mask"), ROWS, ids=["float32", "bfloat16, padded"])
def test_deferred_eviction_holds_little_more_than_the_full_cache(dtype, mask):
    model = tiny.tiny_model(dtype=dtype, num_hidden_layers=30, head_dim=64)  # as SmolLM2's
    shape = shape_of(model)
    profile = tiny.make_profile(model, TOKENS, SHARE, shape=shape)
    cache = kvalloc.make_cache(model, tiny.by_head(profile).replace(by_prompt=True))
    full = plain_bytes(shape, TOKENS, 2)
    repeated = 0.0
    if not (mask.all() or hasattr(sdpa_attention, "pack_gqa")):  # older versions, with a mask
        repeated = full / shape.n_layers * shape.n_query_heads / shape.n_kv_heads
    assert rise(model, mask, past_key_values=cache) <= 1.05 * full + repeated
    assert cache.reduced


SOLVED = {
    "by head": (make_scores, {"level": "head"}),
    "in pages": (make_scores, {"page": 16}),
    "bits": (make_bits, {"level": "head", "bits": (16, 8, 4)}),
    "bits alike": (make_bits, {"bits": (8,)}),
}
SERVED = {
    "decided": {"level": "head", "solver": "greedy"},
    "default": {"budget": "60%"},
}


@pytest.mark.parametrize(("dtype", "mask"), ROWS, ids=["float32", "bfloat16, padded"])
@pytest.mark.parametrize("way", [*SOLVED, *SERVED])
def test_memory_is_a_peak(way, dtype, mask, monkeypatch):
    few = Lookahead(votes=8)  # what scores take is not the cache's
    monkeypatch.setattr("kvalloc.online.methods.latest_votes", lambda **_: few)
    model = tiny.tiny_model(dtype=dtype, num_hidden_layers=LAYERS)
    shape = shape_of(model)
    memory = int(0.4 * plain_bytes(shape, TOKENS, 2))
    if way in SOLVED:
        make, asked = SOLVED[way]
        scores = make(context_tokens=TOKENS, n_samples=1, shape=shape)
        profile = kvalloc.solve(scores, memory=memory, batch=2, **asked)
        cache = kvalloc.make_cache(model, profile)
        found = rise(model, mask, past_key_values=cache)
    else:
        if "budget" in SERVED[way]:
            setting = Default.parse(SERVED[way]["budget"]).setting(shape)
            memory = Immediate(setting=setting).peak_bytes(
                PromptSize(tokens=TOKENS, lengths=(TOKENS,) * 2)
            )
        with kvalloc.apply(model, memory=memory, **SERVED[way]) as applied:
            found = rise(model, mask)
        cache = applied.last_cache
        for token in tiny.prompt(40, 2).split(1, dim=1):  # what follows fits as well
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            run(model, token, cache, mask)
            assert cache.retained_bytes <= memory
    assert cache.reduced
    assert 0.4 * memory < found <= memory


def test_memory_of_a_prompt_in_chunks_is_of_entries_that_are_not_rounded_yet():
    """Codes are made when the last chunk has come."""
    model, ids = tiny.tiny_model(num_hidden_layers=LAYERS), tiny.prompt(TOKENS)
    early, stored = Immediate(setting=Default.parse("20%").setting(shape_of(model))), [0]
    rounded, whole = (
        early.peak_bytes(PromptSize(tokens=TOKENS, chunked=chunked)) for chunked in (False, True)
    )
    model.generation_config.prefill_chunk_size = 250  # two of them are whole
    in_effect = []  # none yet while `apply` looks at the model

    def mark(*_):
        caches = [one.last_cache for one in in_effect]
        stored.extend(cache.retained_bytes for cache in caches if cache is not None)

    hooks = [one.register_forward_pre_hook(mark) for one in model.get_decoder().layers]
    settings = {"max_new_tokens": 1, "do_sample": False}
    with kvalloc.apply(model, budget="20%", memory=whole) as applied:
        in_effect.append(applied)
        model.generate(ids, **settings)
        assert applied.last_cache is not None
        assert "evicts while" in applied.last_cache.profile.detail
    with (
        kvalloc.apply(model, budget="20%", memory=whole - 1),
        pytest.raises(InputError, match="needs"),
    ):
        model.generate(ids, **settings)
    for hook in hooks:
        hook.remove()
    assert rounded < max(stored) <= whole


def test_chunks_need_what_is_kept_and_one_layer_in_full(monkeypatch):
    """Peak of all tensors alive, above that of one chunk without any cache."""
    monkeypatch.setattr(by_torch, "SCRATCH_NUMBERS", 1 << 14)
    model, ids, chunk = tiny.tiny_model(), tiny.prompt(TOKENS), 100
    layer_bytes = TOKENS * tiny.N_KV_HEADS * 2 * tiny.HEAD_DIM * 4
    profile = tiny.by_head(tiny.make_profile(model, TOKENS, SHARE), spread=60)
    cache = kvalloc.make_cache(model, profile, prompt_tokens=TOKENS)

    def in_chunks():
        for part in ids.split(chunk, dim=1):
            model(part, past_key_values=cache, logits_to_keep=1)

    with torch.no_grad():
        alone = peak_bytes(lambda: model(ids[:, :chunk], use_cache=False, logits_to_keep=1))
        above = peak_bytes(in_chunks) - alone
    scratch = 5 * (1 << 14) * 4 + layer_bytes * chunk // TOKENS
    assert above <= cache.retained_bytes + layer_bytes + scratch
