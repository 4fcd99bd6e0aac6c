"""Masks over the entries that a layer stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvalloc.runtime.attention.masks import MaskKind, mask_kind, stored_mask

HERE = torch.device("cpu")
KINDS: tuple[MaskKind, ...] = ("additive", "boolean", "padding", "block")


@pytest.mark.parametrize("kind", KINDS)
def test_one_new_token_needs_no_mask(kind: MaskKind) -> None:
    assert stored_mask(1, 9, kind=kind, dtype=torch.float32, device=HERE, batch=2) is None


def test_each_implementation_takes_a_mask_of_its_kind() -> None:
    names = ("eager", "sdpa", "flash_attention_2", "flex_attention", "nobody's")
    assert tuple(map(mask_kind, names)) == (*KINDS, None)


def test_flash_attention_gets_the_padding_alone() -> None:
    def padding(visible: torch.Tensor | None) -> torch.Tensor | None:
        return stored_mask(  # type: ignore[no-any-return]
            3, 5, kind="padding", dtype=torch.float16, device=HERE, batch=2, visible=visible
        )

    assert padding(None) is None
    shown = torch.tensor([[True, True, True], [False, True, True]])
    found = padding(shown)
    assert found is not None
    assert found.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 1, 1]]


@pytest.mark.parametrize("padded", [False, True])
def test_flex_attention_gets_the_same_rule_as_a_block_mask(
    attention_on_cpu: Any, padded: bool
) -> None:
    shown = torch.tensor([[True, True, True], [False, True, True]]) if padded else None
    kinds: tuple[MaskKind, ...] = ("block", "boolean")
    with attention_on_cpu("flex_attention"):
        found, expected = (
            stored_mask(3, 5, kind=kind, dtype=torch.float32, device=HERE, batch=2, visible=shown)
            for kind in kinds
        )
    index = torch.meshgrid(*(torch.arange(n) for n in (2, 1, 3, 5)), indexing="ij")
    own = torch.ones(3, 5, dtype=torch.bool).tril(2).triu(2)  # elsewhere a token sees itself
    assert torch.equal(found.mask_mod(*index) | own, (expected | own).expand(2, 1, 3, 5))


def test_kept_entries_are_visible_and_new_ones_causal() -> None:
    mask = stored_mask(3, 5, kind="boolean", dtype=torch.float32, device=HERE, batch=2)
    assert mask is not None
    assert mask.shape == (1, 1, 3, 5)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_additive_masks_stay_finite_in_their_own_type() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        mask = stored_mask(2, 4, kind="additive", dtype=dtype, device=HERE, batch=2)
        assert mask is not None
        assert mask.dtype == dtype
        assert torch.isfinite(mask).all()
        lowest = torch.finfo(dtype).min
        assert mask[0, 0].tolist() == [[0, 0, 0, lowest], [0, 0, 0, 0]]
