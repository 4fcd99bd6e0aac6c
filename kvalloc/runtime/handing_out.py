"""Entries handed out among all heads by the scores of one prompt.

The best scores of all layers and heads together stay. With ``s_h`` the scores of head h this is
the exact solution of ``max sum_h sum of the n_h best of s_h`` subject to ``sum n_h = n``: each
head's curve is concave, so the largest steps of all curves are the best ones to take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray

__all__ = ["handed_out"]


def handed_out(scores: Sequence[Tensor], total: int, *, protected: int) -> IntArray:
    """How many entries each head keeps of one prompt.

    Parameters
    ----------
    scores : sequence of Tensor, each (n_kv_heads, n_evictable)
        For each layer, of the entries that can be evicted; comparable across layers and heads.
    total : int
        Entries that all heads keep together, sinks and window included.
    protected : int
        Sinks and window of each head.

    Returns
    -------
    ndarray of int64, (n_layers, n_kv_heads)
        Sums to `total`, but at least to sinks and window everywhere, and at most to everything.
        Among equal scores the earlier layer wins, and in it the earlier head.
    """
    device = scores[0].device
    joined = torch.stack([own.to(device, torch.float32) for own in scores])
    n_evictable = int(joined.shape[-1])
    wanted = min(max(total - protected * (joined.shape[0] * joined.shape[1]), 0), joined.numel())
    if n_evictable == 0 or wanted == 0:
        return np.full(tuple(joined.shape[:2]), protected, dtype=np.int64)
    least = joined.reshape(-1).topk(wanted, sorted=False).values.min()
    counts = (joined > least).sum(dim=-1).cpu().numpy().astype(np.int64)
    ties = (joined == least).sum(dim=-1).cpu().numpy().astype(np.int64)
    before = np.cumsum(ties) - ties.ravel()
    room = np.clip(wanted - counts.sum() - before, 0, ties.ravel())
    found: IntArray = counts + room.reshape(counts.shape) + protected
    return found
