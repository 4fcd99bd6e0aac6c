"""Masks over the entries that a layer stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvalloc.runtime.attention.masks import mask_function, stored_mask

NAMES = ("eager", "sdpa", "flash_attention_2", "flex_attention")


def mask_of(base: str, new: int, stored: int, **more: Any) -> Any:
    function = mask_function(base)
    assert function is not None
    more = {"dtype": torch.float32, "device": torch.device("cpu"), "batch": 2} | more
    return stored_mask(function, new, stored, **more)


@pytest.mark.parametrize("base", NAMES)
def test_one_new_token_needs_no_mask(base: str) -> None:
    assert mask_of(base, 1, 9) is None


def test_an_implementation_of_nobodys_has_no_mask() -> None:
    assert mask_function("nobody's") is None


def test_flash_attention_gets_the_padding_alone() -> None:
    assert mask_of("flash_attention_2", 3, 5) is None
    shown = torch.tensor([[True, True, True], [False, True, True]])
    found = mask_of("flash_attention_2", 3, 5, visible=shown)
    assert found.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 1, 1]]


@pytest.mark.parametrize("padded", [False, True])
def test_flex_attention_gets_the_same_rule_as_a_block_mask(
    attention_on_cpu: Any, padded: bool
) -> None:
    shown = torch.tensor([[True, True, True], [False, True, True]]) if padded else None
    with attention_on_cpu("flex_attention"):
        found, expected = (
            mask_of(name, 3, 5, visible=shown) for name in ("flex_attention", "sdpa")
        )
    index = torch.meshgrid(*(torch.arange(n) for n in (2, 1, 3, 5)), indexing="ij")
    assert torch.equal(found.mask_mod(*index), expected)


def test_kept_entries_are_visible_and_new_ones_causal() -> None:
    mask = mask_of("sdpa", 3, 5)
    assert mask.shape == (2, 1, 3, 5)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_additive_masks_stay_finite_in_their_own_type() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        mask = mask_of("eager", 2, 4, dtype=dtype)
        assert mask.dtype == dtype
        assert torch.isfinite(mask).all()
        lowest = torch.finfo(dtype).min
        assert mask[0, 0].tolist() == [[0, 0, 0, lowest], [0, 0, 0, 0]]
