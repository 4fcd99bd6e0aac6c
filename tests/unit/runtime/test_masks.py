"""Masks: over the entries that a layer stores, and as models of each attention show them.

Every policy and arrival on each attention is in test_matrix.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import runtime_oracle as tiny
import tiny_models
import torch
from other_attention import attention_on_cpu
from scorer_oracle import SCORERS

import kvalloc
from kvalloc.models.attention import AttentionStates, intercept_attention
from kvalloc.runtime.attention.masks import mask_function, stored_mask
from kvalloc.scorers import get_scorer

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
def test_flex_attention_gets_the_same_rule_as_a_block_mask(padded: bool) -> None:
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


@pytest.fixture(params=["flex_attention", "padding_only"])
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    with attention_on_cpu(request.param):
        yield request.param


@pytest.mark.parametrize("scorer", [name for name in SCORERS if get_scorer(name).later is None])
def test_scorers_read_masks_of_either_kind(attention: str, scorer: str) -> None:
    """Padding and causal attention, as the model shows them: the same scores as on sdpa."""
    ids, mask = tiny.prompt(90, 2), torch.ones(2, 90, dtype=torch.long)
    mask[1, :49] = 0
    own = get_scorer(scorer)
    scores = []
    for name in (attention, "sdpa"):
        model = tiny.tiny_model("llama", name)
        seen: list[torch.Tensor] = []

        def look(states: AttentionStates, compute: Any, seen: list[torch.Tensor] = seen) -> Any:
            if states.layer == 0:  # later layers differ by rounding
                seen.append(own.score(states, sinks=2))
            return compute(states.mask)

        with torch.no_grad(), intercept_attention(model, look):
            model(ids, attention_mask=mask)
        scores += seen
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-7)


def test_profiling_sees_the_same_curves(attention: str) -> None:
    curves = []
    for name in (attention, "sdpa"):
        model = tiny_models.tiny_model(attention=name)
        scores = kvalloc.profile(
            model, tiny_models.WordTokenizer(), [tiny_models.words(300)], samples=2, context=60
        )
        curves.append(torch.from_numpy(scores.curves))
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-4, atol=1e-5)
