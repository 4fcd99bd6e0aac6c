"""Forwards of assisted generation, which hold drafts behind what is known, cut into pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvalloc.models.names import BY_TOKEN


def part(arguments: Mapping[str, Any], new: slice, columns: int | None = None) -> dict[str, Any]:
    """Return a forward's arguments for some of its new tokens.

    Parameters
    ----------
    arguments : mapping
        Of a decoder's forward, by name.
    new : slice
        Which of the new tokens.
    columns : int, optional
        Tokens that a mask then covers, those seen before included; by default as before.
    """
    found = dict(arguments)
    for name, own in arguments.items():
        if name == "inputs_embeds" and own is not None:
            found[name] = own[:, new]
        elif isinstance(own, Tensor) and name in BY_TOKEN:
            found[name] = own[..., new]
        elif isinstance(own, Tensor) and name == "attention_mask" and own.ndim == 2:
            found[name] = own[:, :columns]
    return found


def unread(arguments: Mapping[str, Any], seen: int) -> Mapping[str, Any]:
    """Return the arguments without tokens that the cache holds.

    transformers (5.23) starts assisted generation with a filled cache by all tokens again, at
    positions from 0 on.
    """
    positions = arguments.get("position_ids")
    if positions is None or not 0 < seen < positions.shape[-1] or int(positions.min()):
        return arguments
    return part(arguments, slice(seen, None))


def joined(outputs: Sequence[Any]) -> Any:
    """Return the output of a decoder for all pieces of a forward, in the last one's place."""
    last = outputs[-1]
    last.last_hidden_state = torch.cat([one.last_hidden_state for one in outputs], dim=1)
    if last.get("hidden_states") is not None:
        levels = zip(*(one.hidden_states for one in outputs), strict=True)
        last.hidden_states = tuple(torch.cat(level, dim=1) for level in levels)
    return last
