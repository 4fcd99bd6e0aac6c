"""Pieces of a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvalloc.models import names


def part(arguments: Mapping[str, Any], new: slice, columns: int | None = None) -> dict[str, Any]:
    """Return a forward's arguments for a slice of its new tokens.

    The mask covers ``columns`` tokens, seen ones included.
    """
    result = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name in names.BY_TOKEN:
            result[name] = value[:, new] if names.BY_TOKEN[name] == 1 else value[..., new]
        elif isinstance(value, Tensor) and name == "attention_mask" and value.ndim == 2:
            result[name] = value[:, :columns]
    if features := arguments.get(names.IMAGE_FEATURES):
        images = arguments[names.IMAGE_PLACES]
        chosen = torch.zeros_like(images)
        chosen[:, new] = True
        result[names.IMAGE_FEATURES] = [one[chosen[images]] for one in features]
    return result


def joined(outputs: Sequence[Any]) -> Any:
    """Return the decoder's output for all pieces."""
    last = outputs[-1]
    last.last_hidden_state = torch.cat([one.last_hidden_state for one in outputs], dim=1)
    if last.get("hidden_states") is not None:
        levels = zip(*(one.hidden_states for one in outputs), strict=True)
        last.hidden_states = tuple(torch.cat(level, dim=1) for level in levels)
    return last
