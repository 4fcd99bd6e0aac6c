"""Masks over the entries that a layer stores."""

from __future__ import annotations

import torch

from kvalloc.runtime.masks import stored_mask


def test_one_new_token_needs_no_mask() -> None:
    assert stored_mask(1, 9, additive_dtype=None, device=torch.device("cpu")) is None


def test_kept_entries_are_visible_and_new_ones_causal() -> None:
    mask = stored_mask(3, 5, additive_dtype=None, device=torch.device("cpu"))
    assert mask is not None
    assert mask.shape == (1, 1, 3, 5)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_additive_masks_stay_finite_in_their_own_type() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        mask = stored_mask(2, 4, additive_dtype=dtype, device=torch.device("cpu"))
        assert mask is not None
        assert mask.dtype == dtype
        assert torch.isfinite(mask).all()
        lowest = torch.finfo(dtype).min
        assert mask[0, 0].tolist() == [[0, 0, 0, lowest], [0, 0, 0, 0]]
