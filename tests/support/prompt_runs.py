"""What tests of policies and of budgets for each prompt run, and how long their prompts are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import kvalloc
from kvalloc.models.attention import AttentionStates, intercept_attention
from kvalloc.models.names import cache_keyword
from kvalloc.runtime.policies import get_policy
from kvalloc.scorers import get_scorer

CONTEXT, SINKS, NEW = 70, 2, 6
WINDOW = {"window": 4}
AT_ONCE: dict[str, Any] = {"policy": "attention_matching"}
"""Fits values while the prompt is read."""
TARGET: dict[str, Any] = {"sinks": SINKS, "scorer": "xkv:window=4"}


def policy(name: str, **parameters: Any) -> Any:
    return get_policy(name, scorer=get_scorer("xkv", window=4, pool=3), **parameters)


def run(model: Any, ids: torch.Tensor, cache: Any, mask: Any = None, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(ids, attention_mask=mask, **cache_keyword(model, cache), **inputs)
    logits: torch.Tensor = out.logits
    return logits


def applied(model: Any, ids: torch.Tensor, profile: Any = None, **options: Any) -> Any:
    """The cache of one ``generate()`` under `kvalloc.apply`."""
    with kvalloc.apply(model, profile, **options) as found:
        generate(model, ids, max_new_tokens=1)
    return found.last_cache


def states_seen(model: Any, ids: torch.Tensor, **inputs: Any) -> dict[int, AttentionStates]:
    """What the attention of each layer sees of tokens in one forward without a cache."""
    found: dict[int, AttentionStates] = {}

    def look(states: AttentionStates, compute: Any) -> Any:
        found[states.layer] = states
        return compute(states.mask)

    with torch.no_grad(), intercept_attention(model, look):
        model(ids, use_cache=False, **inputs)
    return found


def assert_kept_as_alone(cache: Any, row: int, alone: Any, columns: torch.Tensor) -> None:
    """Compare what a row keeps with a cache of the row alone, whose tokens are in these columns."""
    for layer in alone.profile.shape.full_layers:
        kept, expected = cache.kept_indices(layer)[row], alone.kept_indices(layer)[0]
        for own, other in zip(kept.cpu(), expected.cpu().long(), strict=True):
            assert own[own >= 0].tolist() == columns[other[other >= 0]].tolist()


def padding_mask(lengths: Sequence[int], side: str = "left") -> torch.Tensor:
    """A mask, (batch, longest), of rows of these lengths that are padded on one side."""
    longest, count = max(lengths), torch.tensor(lengths)[:, None]
    shown = torch.arange(longest) < count
    return (shown.flip(1) if side == "left" else shown).long()


def padded_rows(
    rows: list[torch.Tensor], side: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask and positions of prompts (1, n) as the rows of one batch."""
    longest = max(own.shape[1] for own in rows)
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
    for row, own in enumerate(rows):
        n = own.shape[1]
        at = slice(longest - n, None) if side == "left" else slice(0, n)
        ids[row, at], mask[row, at] = own[0], 1
    return ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0)


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": NEW, "do_sample": False, **options}
    mask = settings.pop("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        out: torch.Tensor = model.generate(ids, attention_mask=mask, **settings)
    return out


@contextmanager
def failing_with(failure: type[BaseException], model: Any) -> Iterator[None]:
    """The third layer fails as long as it is open, and that is what comes out of it."""

    def fail(*_: Any) -> None:
        raise failure

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(failure):
        yield
    handle.remove()
