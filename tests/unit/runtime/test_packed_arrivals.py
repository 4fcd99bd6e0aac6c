"""A cache that stores entries at fewer bits, however the tokens arrive.

The oracle is that of the other files, over the numbers that the cache really stores: what the
model computed is replaced by what comes back from storage, the evicted entries are hidden.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from prompt_runs import run
from transformers import DynamicCache

import kvalloc
from kvalloc.accounting.costs import WIDTHS, stored_bytes
from kvalloc.errors import UnsupportedRequestError
from kvalloc.runtime import make_cache
from kvalloc.runtime.quantization import quantised_keys, quantised_values

CONTEXT = 150
LENGTHS = (CONTEXT, 97, 30)


def bits_profile(
    tiny: ModuleType, model: Any, level: str = "head", share: float = 0.5, **changes: Any
) -> Any:
    """Widths 8, 4, 16, 8 layer by layer; at head level two in each layer."""
    profile = tiny.make_profile(model, CONTEXT, share, **changes)
    profile = tiny.by_head(profile, spread=40) if level == "head" else profile
    bits = np.full_like(profile.budgets, 16)
    for place, layer in enumerate(profile.shape.full_layers):
        bits[layer] = (8, 4, 16, 8)[place % 4]
        if level == "head":
            bits[layer, 1] = (4, 16, 16, 8)[place % 4]
    return profile.replace(bits=bits)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--rounded-models")))


def test_random_models_answer_as_a_float64_oracle(tiny: ModuleType, seed: int) -> None:
    """Of random size, with random widths, policies and turns; `make test-matrix` takes 1,000."""
    draw = random.Random(seed)
    n_kv_heads, head_dim = draw.choice([1, 2, 4]), draw.choice([8, 16, 32])
    n_query_heads = n_kv_heads * draw.choice([1, 2, 3])
    family = draw.choice(["llama", "qwen2", "qwen3", "mistral", "gemma3"])
    model = tiny.tiny_model(
        family,
        draw.choice(["sdpa", "eager"]),
        seed=draw.randrange(10**6),
        num_hidden_layers=4 if family == "gemma3" else draw.randint(1, 4),
        num_attention_heads=n_query_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=head_dim,
        hidden_size=n_query_heads * 8,
        initializer_range=draw.choice([0.1, 0.2, 0.3]),
    )
    context, batch = draw.randint(20, 160), draw.randint(1, 3)
    profile = tiny.make_profile(model, context, draw.uniform(0.2, 1.0))
    widths = np.full_like(profile.budgets, 16)
    for layer in profile.shape.full_layers:
        widths[layer] = draw.choices(list(WIDTHS), k=n_kv_heads)
    if draw.random() < 0.5:
        profile = tiny.by_head(profile, spread=draw.randint(0, 12))
    else:
        widths[:] = widths[:, :1]
    widths[profile.shape.full_layers[0], 0 if profile.level == "head" else slice(None)] = 5
    policy = draw.choice(["score", "score", "attention_matching", "critical", "nacl"])
    every = draw.choice([None, 4, 7])
    cache = make_cache(model, profile.replace(bits=widths), policy=policy, decode_every=every)
    shadow = tiny.Shadow(model, torch.float64)
    turns = [draw.choice([1, 1, draw.randint(2, 140)]) for _ in range(draw.randint(2, 10))]
    for turn, tokens in enumerate([context, *turns]):
        ids = tiny.prompt(tokens, batch, seed=1000 * seed + turn)
        assert tiny.worst(run(model, ids, cache), shadow.logits(ids)) < 1e-3
        shadow.follow(cache, combined=policy == "attention_matching")


def padding(side: str, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    columns, count = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
    return ((columns < count) if side == "right" else (columns >= max(lengths) - count)).long()


def account(cache: Any) -> int:
    """Bytes of all that is stored, from the numbers of entries and the formula alone."""
    profile, total = cache.profile, 0
    for index, layer in enumerate(cache.layers):
        if not hasattr(layer, "entries"):  # transformers' own
            total += sum(own.untyped_storage().nbytes() for own in (layer.keys, layer.values))
            continue
        dense = layer.keys.numel() + layer.values.numel()
        total += dense * layer.keys.element_size()
        entries = layer.entries
        if entries is not None:
            total += int(stored_bytes(entries.lengths, profile.bits[index], profile.shape).sum())
    return total


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_prompt_and_questions_of_any_length(tiny: ModuleType, family: str, level: str) -> None:
    model = tiny.tiny_model(family)
    profile = bits_profile(tiny, model, level)
    cache, shadow = make_cache(model, profile), tiny.Shadow(model)
    ids = tiny.prompt(CONTEXT, 2)
    assert tiny.worst(run(model, ids, cache), shadow.logits(ids)) < 1e-4
    assert cache.retained_bytes == profile.retained_bytes_at(CONTEXT, 2) == account(cache)
    assert (cache.kept_tokens_by_row == profile.budgets).all() or family == "gemma3"
    shadow.follow(cache)
    rounded = 0
    for tokens in (1, 5, 100, 1, 90, 1):
        question = tiny.prompt(tokens, 2, seed=tokens)
        assert tiny.worst(run(model, question, cache), shadow.logits(question)) < 1e-4
        shadow.take_stored(cache)
        assert cache.retained_bytes == account(cache)
        rounded = max(layer.packed_following for layer in cache.layers if hasattr(layer, "entries"))
    assert rounded == 128  # 198 tokens followed: the latest 64 to 127 are as the model made them
    kept = cache.kept_indices(profile.shape.full_layers[0])
    assert int(kept.max()) < CONTEXT


@pytest.mark.parametrize("level", ["layer", "head"])
def test_what_is_stored_is_what_the_model_computed_rounded_once(
    tiny: ModuleType, level: str
) -> None:
    model = tiny.tiny_model()
    profile = bits_profile(tiny, model, level)
    ids = tiny.prompt(CONTEXT, 2)
    plain = DynamicCache(config=model.config)
    run(model, ids, plain)
    for chunks, announced in ((CONTEXT, None), (40, CONTEXT), (40, None)):
        cache = make_cache(model, profile, prompt_tokens=announced)
        if chunks == CONTEXT or announced:
            for part in ids.split(chunks, dim=1):
                run(model, part, cache)
        else:
            with cache.prefill():
                for part in ids.split(chunks, dim=1):
                    run(model, part, cache)
        assert cache.retained_bytes == profile.retained_bytes_at(CONTEXT, 2)
        layer = cache.layers[0]  # later ones see what was evicted between chunks
        for row, head in np.ndindex(2, tiny.N_KV_HEADS):
            keys, values, positions = layer.entries.piece(row, head)[:3]
            width = int(profile.bits[0, head])
            own = [x[row, head, positions.long()][None, None] for x in plain.layers[0].keys[None]]
            if chunks == CONTEXT:
                assert torch.equal(keys, quantised_keys(own[0], width)[0, 0])
                exact = plain.layers[0].values[row, head, positions.long()]
                assert torch.equal(values, quantised_values(exact[None, None], width)[0, 0])
            else:  # other sizes of products, other last bits, hence now and then another step
                far = (keys - quantised_keys(own[0], width)[0, 0]).abs() > 1e-4
                assert far.float().mean() < 0.01


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_a_prompt_in_chunks_and_rows_of_different_lengths(
    tiny: ModuleType, level: str, side: str | None, announced: bool
) -> None:
    model = tiny.tiny_model()
    profile = bits_profile(tiny, model, level)
    ids = tiny.prompt(CONTEXT, len(LENGTHS))
    mask = torch.ones_like(ids) if side is None else padding(side)
    cache = make_cache(model, profile, prompt_tokens=CONTEXT if announced else None)
    shadow = tiny.Shadow(model)

    def feed() -> None:
        seen = 0
        for part in ids.split(40, dim=1):
            seen += part.shape[1]
            found = run(model, part, cache, mask[:, :seen])
            expected = shadow.logits(part, mask[:, :seen])
            if mask[:, seen - part.shape[1] : seen].any():
                assert tiny.worst(found, expected, mask[:, :seen]) < 1e-4
            shadow.follow(cache)

    if announced:
        feed()
    else:
        with cache.prefill():
            feed()
        shadow.follow(cache)
    lengths = mask.sum(dim=1).tolist()
    for row, tokens in enumerate(lengths):
        assert (cache.kept_tokens_by_row[row] == profile.budgets_for(tokens)).all()
    expected_bytes = sum(profile.retained_bytes_at(tokens) for tokens in lengths)
    assert cache.retained_bytes == expected_bytes == account(cache)
    # Questions of different lengths, long enough that their padding would be rounded, too.
    asked = padding("left", (140, 100, 140))
    question = tiny.prompt(140, len(LENGTHS), seed=1)
    mask = torch.cat([mask, asked], dim=1)
    found = run(model, question, cache, mask)
    assert tiny.worst(found, shadow.logits(question, mask), mask) < 1e-4
    shadow.take_stored(cache)
    assert cache.retained_bytes == account(cache)
    more = tiny.prompt(3, len(LENGTHS), seed=2)
    mask = torch.nn.functional.pad(mask, (0, 3), value=1)
    assert tiny.worst(run(model, more, cache), shadow.logits(more, mask)) < 1e-4


def test_a_budget_of_everything_is_rounded_all_the_same(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    profile = bits_profile(tiny, model, "layer", 1.0)
    cache, shadow = make_cache(model, profile), tiny.Shadow(model)
    ids, question = tiny.prompt(CONTEXT, 2), tiny.prompt(5, 2, seed=1)
    assert torch.equal(run(model, ids, cache), run(model, ids, DynamicCache(config=model.config)))
    shadow.logits(ids)
    assert cache.retained_bytes == profile.retained_bytes_at(CONTEXT, 2) < cache.full_bytes
    shadow.follow(cache)
    assert tiny.worst(run(model, question, cache), shadow.logits(question)) < 1e-4


@pytest.mark.parametrize("level", ["layer", "head"])
def test_saved_loaded_copied_reordered_and_cropped(
    tiny: ModuleType, level: str, tmp_path: Path
) -> None:
    model = tiny.tiny_model()
    profile = bits_profile(tiny, model, level)
    cache, ids, shadow = make_cache(model, profile), tiny.prompt(CONTEXT, 2), tiny.Shadow(model)
    for tokens in (ids, tiny.prompt(130, 2, seed=5)):
        run(model, tokens, cache)
        shadow.logits(tokens)
        shadow.follow(cache)
    assert any(layer.packed_following for layer in cache.layers)
    cache.save(tmp_path / "c.safetensors")
    loaded = kvalloc.load_cache(tmp_path / "c.safetensors", model)
    assert loaded.retained_bytes == cache.retained_bytes
    question = tiny.prompt(6, 2, seed=1)
    twin, swapped, cropped = (copy.deepcopy(cache) for _ in range(3))
    expected = run(model, question, cache)
    assert torch.equal(run(model, question, loaded), expected)
    assert torch.equal(run(model, question, twin), expected)
    swapped.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(run(model, question.flip(0), swapped).flip(0), expected)
    # Back to the end of the prompt, through what has been rounded since.
    with pytest.raises(UnsupportedRequestError, match="cannot crop 131 tokens"):
        cropped.crop(-131)
    cropped.crop(-100)
    assert cropped.get_seq_length() == CONTEXT + 30
    assert cropped.retained_bytes == account(cropped)
    cropped.crop(-30)
    assert (cropped.kept_tokens == profile.budgets).all()
    fresh = make_cache(model, profile)
    run(model, ids, fresh)
    assert cropped.retained_bytes == fresh.retained_bytes
    # A block of keys that was not full has been rounded twice; all the others are as they were.
    for row, head in np.ndindex(2, tiny.N_KV_HEADS):
        ours, theirs = (each.layers[0].entries.piece(row, head) for each in (cropped, fresh))
        full = ours[0].shape[0] // 64 * 64
        assert torch.equal(ours[0][:full], theirs[0][:full])
        assert torch.equal(ours[1], theirs[1])
    shadow.cache.crop(-130)
    shadow.follow(cropped)
    assert tiny.worst(run(model, question, cropped), shadow.logits(question)) < 1e-4
    out = model.generate(
        ids,
        past_key_values=make_cache(model, profile),
        max_new_tokens=6,
        num_beams=3,
        do_sample=False,
    )
    assert out.shape == (2, CONTEXT + 6)


@pytest.mark.parametrize("policy", ["merge", "attention_matching", "critical", "nacl"])
def test_policies_decide_and_merge_before_anything_is_rounded(
    tiny: ModuleType, policy: str
) -> None:
    model = tiny.tiny_model()
    profile = bits_profile(tiny, model)
    plain = profile.replace(bits=None)
    ids, question = tiny.prompt(CONTEXT, 2), tiny.prompt(4, 2, seed=1)
    caches = [make_cache(model, each, policy=policy) for each in (profile, plain)]
    for cache in caches:
        run(model, ids, cache)
        cache.evict()
    assert tiny.same_kept(*caches)
    few, many = (run(model, question, cache) for cache in caches)
    assert torch.isfinite(few).all()
    assert not torch.equal(few, many)
