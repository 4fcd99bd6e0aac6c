"""Merging: entry by entry in loops, and as a full cache with hidden entries; rows and biases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import AT_ONCE, policy, run
from scorer_oracle import make_states

from kvalloc.runtime import make_cache
from kvalloc.runtime.policies import merge as merge_file

CONTEXT = 120
Loops = tuple[np.ndarray, np.ndarray]


def merged_in_loops(
    keys: np.ndarray,
    values: np.ndarray,
    kept: list[int],
    protected: set[int],
    *,
    threshold: float | None = None,
    weights: str = "exponential",
) -> Loops:
    """One head, (n_tokens, head_dim): each evicted entry into its nearest kept one."""
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    targets = [t for t in kept if t not in protected]
    sources = [t for t in range(len(keys)) if t not in set(kept)]
    units = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    nearest = {}
    for i in sources if targets else []:
        cosines = [float(units[i] @ units[j]) for j in targets]
        nearest[i] = (targets[int(np.argmax(cosines))], max(cosines))
    if threshold is None:
        threshold = float(np.mean([u for _, u in nearest.values()])) if nearest else 0.0
    pairs = {i: pair for i, pair in nearest.items() if pair[1] >= threshold - 1e-9}
    distances = [np.linalg.norm(keys[i] - keys[j]) for i, (j, _) in pairs.items()]
    spread = float(np.mean(distances)) if distances else 1.0
    new_keys, new_values = keys.copy(), values.copy()
    for target in targets:
        shares = {target: math.e if weights == "exponential" else 1.0}
        for i, (j, cosine) in pairs.items():
            if j == target:
                gap = float(np.linalg.norm(keys[i] - keys[j]))
                gauss = math.exp(-(gap**2) / (2 * spread**2))
                shares[i] = math.exp(cosine) if weights == "exponential" else gauss
        total = sum(shares.values())
        new_keys[target] = sum(share / total * keys[i] for i, share in shares.items())
        new_values[target] = sum(share / total * values[i] for i, share in shares.items())
    return new_keys, new_values


@pytest.mark.parametrize("block", [3, 1024])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"threshold": 0.75}, {"threshold": 0.0, "weights": "gaussian"}],
)
def test_agrees_with_loops(monkeypatch: Any, parameters: dict[str, Any], block: int) -> None:
    monkeypatch.setattr(merge_file, "_BLOCK_ENTRIES", block)
    states = make_states(batch=2)
    made = policy("merge", **parameters)
    budgets = torch.tensor([[20, 13], [40, 6]])
    kept = made.keep(states, budgets, sinks=2, window=4)
    combined = made.combine(states, kept, budgets, sinks=2, window=4)
    protected = {0, 1, 36, 37, 38, 39}
    changed = 0
    for at in np.ndindex(2, 2):
        mine, still = kept[at].nonzero()[:, 0].tolist(), sorted(protected)
        stored = states.keys[at].numpy(), states.values[at].numpy()
        keys, values = merged_in_loops(*stored, mine, protected, **parameters)
        np.testing.assert_allclose(combined.keys[at][mine], keys[mine], atol=1e-5)
        np.testing.assert_allclose(combined.values[at][mine], values[mine], atol=1e-5)
        changed += int((combined.keys[at] != states.keys[at]).any())
        assert torch.equal(combined.keys[at][still], states.keys[at][still])
    # two heads have both something to lose and a place for it
    assert changed == 2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.usefixtures("unrounded")
def test_the_cache_answers_as_over_the_combined_entries(family: str) -> None:
    model = tiny.tiny_model(family)
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    cache = make_cache(model, profile, policy="merge")
    ids = tiny.prompt(CONTEXT, 2)
    sinks, window = profile.policy.sinks, profile.policy.window
    protected = {*range(sinks), *range(CONTEXT - window, CONTEXT)}
    run(model, ids, cache)
    with torch.no_grad():
        kept = tiny.kept_of(cache)
        oracle = tiny.Oracle(model, ids, kept)
        for layer, positions in kept.items():
            stored = oracle.cache.layers[layer]
            for row, head in np.ndindex(*positions.shape[:2]):
                keys, values = stored.keys[row, head], stored.values[row, head]
                mine = positions[row, head].tolist()
                new = merged_in_loops(keys.numpy(), values.numpy(), mine, protected)
                for tensor, change in zip((keys, values), new, strict=True):
                    tensor.copy_(torch.from_numpy(change))
        for tokens in (1, 5, 1):
            question = tiny.prompt(tokens, 2, seed=tokens)
            logits = model(question, past_key_values=cache).logits
            assert (logits - oracle.logits(question)).abs().max() < 1e-4
    full = list(profile.shape.full_layers)
    assert (cache.kept_tokens[full] == profile.budgets[full] + 7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_combined_in_float32(dtype: torch.dtype) -> None:
    states = make_states(batch=2, dtype=dtype)
    made = policy("merge")
    budgets = torch.full((2, 2), 15)
    kept = made.keep(states, budgets, sinks=2, window=4)
    found = made.combine(states, kept, budgets, sinks=2, window=4)
    whole = replace(states, keys=states.keys.float(), values=states.values.float())
    expected = made.combine(whole, kept, budgets, sinks=2, window=4)
    # rounded once, at the end
    assert torch.equal(found.keys[kept], expected.keys[kept].to(dtype))
    assert torch.equal(found.values[kept], expected.values[kept].to(dtype))


def test_a_row_that_keeps_everything_leaves_the_others_their_biases() -> None:
    """Its own entries have none; each row is as it would be alone."""
    model, ids = tiny.tiny_model(), tiny.prompt(CONTEXT, 2)
    profile = tiny.by_head(tiny.make_profile(model, CONTEXT, 0.4))
    mask = torch.ones_like(ids)
    mask[0, :-5] = 0
    together, alone = (make_cache(model, profile, **AT_ONCE) for _ in range(2))
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=together)
        model(ids[1:], past_key_values=alone)
    for layer, own in zip(together.layers, alone.layers, strict=True):
        assert layer.entries.lengths[0].tolist() == [5, 5]
        for head in range(tiny.N_KV_HEADS):
            bias, expected = layer.entries.piece(1, head).bias, own.entries.piece(0, head).bias
            assert (expected != 0).any()
            torch.testing.assert_close(bias, expected, atol=1e-5, rtol=1e-5)
            assert not layer.entries.piece(0, head).bias.any()
