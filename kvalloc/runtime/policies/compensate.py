"""RazorAttention's compensation entry: one entry that stands for all that were dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import Combined, Limits, Rankings
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.selection import best_entries, evictable, free_counts


@dataclass(frozen=True, kw_only=True)
class Compensate(Score):
    """The best scores stay but for one, whose place the mean of all dropped entries takes.

    The compensation entry has the mean key and the mean value of the n dropped entries and counts
    n times in the softmax, ``n exp(q.k)``, so its logit is raised by ``log(n)``. It is an entry of
    the budget. It stands right after the sinks, and what stood there is among the dropped. A head
    whose evictable budget is 0 has no place for it.

    References
    ----------
    RazorAttention: Efficient KV Cache Compression Through Retrieval Heads (Tang et al., 2024). The
    method gives it to heads that keep sinks and recent tokens only: take the scorer ``streaming``
    and budgets of the solver ``head_classes``.

    Notes
    -----
    Where entries are evicted again while decoding, the entry takes in what is dropped then: an
    entry that stands for n others counts as n in mean and number.
    """

    name = "compensate"
    summary = "the best scores, and one entry that is the mean of all dropped ones"
    reference = "RazorAttention (Tang et al., 2024), compensation token"

    def keep_ranked(
        self, rankings: Rankings, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]
    ) -> Tensor:
        """Choose the entries that stay, the compensation entry's place among them."""
        free, counts = evictable(states.keys, **limits), free_counts(states.keys, budgets, **limits)
        some = counts > 0
        place = _place(free) & some.to(free.device)[..., None]
        best = best_entries(rankings[0], counts - some.long(), among=free & ~place)
        return ~free | place | best

    def combine(
        self, states: AttentionStates, kept: Tensor, budgets: Tensor, **limits: Unpack[Limits]
    ) -> Combined:
        """Put the mean of what goes into its place; see `EvictionPolicy.combine`."""
        free = evictable(states.keys, **limits)
        dropped = free & ~kept
        # where nothing is dropped, and where there is no place, everything stays as it is
        place = _place(free) & kept & dropped.any(dim=-1, keepdim=True)
        dropped = (dropped & place.any(dim=-1, keepdim=True)) | place
        before = torch.zeros((), device=kept.device) if states.bias is None else states.bias
        counts = dropped * before.exp()
        count = counts.sum(dim=-1, keepdim=True)
        share = (counts / count.clamp(min=torch.finfo(torch.float32).tiny))[..., None, :]

        def with_mean(tensor: Tensor) -> Tensor:
            mean = (share @ tensor.float()).to(tensor.dtype)
            return torch.where(place[..., None], mean, tensor)

        bias = torch.where(place, count.log(), before)
        return Combined(
            keys=with_mean(states.keys), values=with_mean(states.values), logit_bias=bias
        )


def _place(free: Tensor) -> Tensor:
    """The first evictable entry of each row and head, (batch, n_kv_heads, n_tokens)."""
    return free & (free.cumsum(dim=-1) == 1)
