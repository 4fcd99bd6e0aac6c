"""Tokens that a prompt repeats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates

RUN = 8
"""Tokens by which a repetition is known. Shorter ones repeat in any text."""

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that each token of a run changes its 64-bit hash


def repeat_counts(ids: IntArray) -> IntArray:
    """Return how many times the `RUN` tokens up to each token occur, (n_tokens,)."""
    counts = np.ones(len(ids), dtype=np.int64)
    if len(ids) >= RUN:
        runs = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), RUN)
        powers = np.array([pow(_FACTOR, place, 1 << 64) for place in range(RUN)], dtype=np.uint64)
        _, which, number = np.unique(runs @ powers, return_inverse=True, return_counts=True)
        counts[RUN - 1 :] = number[which]
    return counts


def with_repeats(states: AttentionStates, counts: IntArray) -> AttentionStates:
    """Return a prompt's states with its `repeat_counts`, (n_tokens,)."""
    import torch

    repeats = torch.from_numpy(counts).to(states.keys.device)
    return replace(states, repeats=repeats.expand(states.keys.shape[:3]))
