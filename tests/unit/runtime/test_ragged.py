"""Storage of different lengths, attention over it, and what a cache does with its rows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import kvalloc
from kvalloc.runtime.attention import torch as by_torch
from kvalloc.runtime.kept import KeptEntries, Segment
from kvalloc.runtime.packed import LayerEntries

CONTEXT = 300
TOKENS, HEAD_DIM = 384, 8


def entries_of(counts: Any) -> LayerEntries:
    """Random entries; counts (batch, n_kv_heads)."""
    generator = torch.Generator().manual_seed(0)
    counts = np.asarray(counts, dtype=np.int64)

    def piece(row: int, head: int) -> Segment:
        kept = torch.randperm(TOKENS, generator=generator)[: counts[row, head]].sort().values
        keys, values = torch.randn(2, len(kept), HEAD_DIM, generator=generator)
        return Segment(keys, values, kept.int())

    rows = [[piece(row, head) for head in range(counts.shape[1])] for row in range(len(counts))]
    return LayerEntries.whole(KeptEntries.of(rows))


def test_nothing_is_padded_and_segments_come_back_in_order() -> None:
    counts = np.array([[130, 64], [7, 300]])
    entries = entries_of(counts)
    assert entries.parts[0].keys.untyped_storage().nbytes() == int(counts.sum()) * HEAD_DIM * 4
    assert entries.parts[0].values.untyped_storage().nbytes() == int(counts.sum()) * HEAD_DIM * 4
    for row, head in np.ndindex(2, 2):
        positions = entries.piece(row, head)[2]
        assert positions.numel() == counts[row, head]
        assert (positions.diff() > 0).all()
    swapped = entries.rows(torch.tensor([1, 0, 1]))
    assert swapped.lengths.tolist() == [[7, 300], [130, 64], [7, 300]]
    for head in range(2):
        for part in range(3):
            assert torch.equal(swapped.piece(2, head)[part], entries.piece(1, head)[part])


def test_chunks_need_what_is_kept_and_one_layer_in_full(
    tiny: ModuleType, peak_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak of all tensors alive, above that of one chunk without any cache."""
    monkeypatch.setattr(by_torch, "SCRATCH_NUMBERS", 1 << 14)
    tokens, chunk = 1000, 100
    model, ids = tiny.tiny_model(), tiny.prompt(tokens)
    layer_bytes = tokens * tiny.N_KV_HEADS * 2 * tiny.HEAD_DIM * 4
    profile = tiny.by_head(tiny.make_profile(model, tokens, 0.2), spread=60)
    cache = kvalloc.make_cache(model, profile)

    def in_chunks() -> None:
        with cache.prefill():
            for part in ids.split(chunk, dim=1):
                model(part, past_key_values=cache, logits_to_keep=1)

    with torch.no_grad():
        alone = peak_bytes(lambda: model(ids[:, :chunk], use_cache=False, logits_to_keep=1))
        above = peak_bytes(in_chunks) - alone
    scratch = 5 * (1 << 14) * 4 + layer_bytes * chunk // tokens
    assert above <= cache.retained_bytes + layer_bytes + scratch
