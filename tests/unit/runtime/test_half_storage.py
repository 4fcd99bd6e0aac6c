"""A reduced cache stores at most 16 bits a number, also where the model computes in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run
from transformers import DynamicCache

from kvalloc.accounting.costs import POSITION_BYTES
from kvalloc.runtime import make_cache

CONTEXT, SHORT = 90, 5


def kept_types(cache: Any) -> set[torch.dtype]:
    parts = [part for layer in cache.layers for part in layer.entries.parts]
    return {numbers.dtype for part in parts for numbers in (part.keys, part.values)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_short_row_is_stored_alone_as_in_a_batch(dtype: torch.dtype) -> None:
    model = tiny.tiny_model(dtype=dtype)
    profile = tiny.make_profile(model, CONTEXT, 0.4)
    batch, alone = make_cache(model, profile), make_cache(model, profile)
    ids, mask = tiny.prompt(CONTEXT, 2), torch.ones(2, CONTEXT, dtype=torch.long)
    mask[1, :-SHORT] = 0
    run(model, ids, batch, mask)
    run(model, ids[1:, -SHORT:], alone)
    assert kept_types(batch) == {torch.bfloat16 if dtype == torch.bfloat16 else torch.float16}
    positions = SHORT * profile.budgets.size * POSITION_BYTES
    in_batch = profile.retained_bytes_at(CONTEXT) + alone.full_bytes + positions
    assert batch.retained_bytes == in_batch
    assert alone.retained_bytes == profile.retained_bytes_at(SHORT)
    if dtype == torch.bfloat16:  # it is transformers' own
        assert alone.retained_bytes == alone.full_bytes
    else:
        assert kept_types(alone) == {torch.float16}
        assert alone.retained_bytes == alone.full_bytes + positions


def test_numbers_that_overflow_float16_are_kept_in_bfloat16(model: Any) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= 1e6
            layer.self_attn.o_proj.weight /= 1e6
    cache, shadow = make_cache(model, tiny.make_profile(model, CONTEXT, 0.4)), tiny.Shadow(model)
    ids, question = tiny.prompt(CONTEXT, 2), tiny.prompt(3, 2, seed=1)
    assert tiny.worst(run(model, ids, cache), shadow.logits(ids)) < 1e-4
    shadow.follow(cache, combined=True)  # takes what is stored as it is
    assert kept_types(cache) == {torch.float16, torch.bfloat16}
    run(model, ids, plain := DynamicCache())
    expected = tiny.as_stored(plain.layers[0].values)
    for row, head in np.ndindex(2, tiny.N_KV_HEADS):
        piece = cache.layers[0].entries.piece(row, head)
        assert torch.equal(piece.values, expected[row, head, piece.positions.long()])
    assert tiny.worst(run(model, question, cache), shadow.logits(question)) < 1e-4
    token = tiny.prompt(1, 2, seed=2)
    assert tiny.worst(run(model, token, cache), shadow.logits(token)) < 1e-4
