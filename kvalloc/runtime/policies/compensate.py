"""RazorAttention's compensation entry: one entry that stands for all that were dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import Combined, Limits, RankedPolicy, Rankings
from kvalloc.runtime.selection import Room, best_entries

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Compensate(RankedPolicy):
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

    def rankings(self, states: AttentionStates, **limits: Unpack[Limits]) -> Rankings:
        """The scores; see `RankedPolicy.rankings`."""
        return (self.scorer.score(states, sinks=limits["sinks"]),)

    def keep_ranked(
        self, rankings: Rankings, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]
    ) -> Tensor:
        """Choose the entries that stay, the compensation entry's place among them."""
        room = Room.of(states.keys, budgets, **limits)
        place = _place(room)
        place = place & (room.counts > 0)[..., None]
        rest = room.counts - place.sum(dim=-1)
        return room.always | place | best_entries(rankings[0], rest, among=room.evictable & ~place)

    def combine(self, states: AttentionStates, kept: Tensor, **limits: Unpack[Limits]) -> Combined:
        """Put the mean of what goes into its place; see `EvictionPolicy.combine`."""
        room = Room.of(states.keys, kept.sum(dim=-1), **limits)
        dropped = room.evictable & ~kept
        # where nothing is dropped, and where there is no place, everything stays as it is
        place = _place(room) & kept & dropped.any(dim=-1, keepdim=True)
        dropped = (dropped & place.any(dim=-1, keepdim=True)) | place
        before = torch.zeros(()) if states.bias is None else states.bias
        counts = dropped * before.to(kept.device).exp()
        count = counts.sum(dim=-1, keepdim=True)
        share = (counts / count.clamp(min=torch.finfo(torch.float32).tiny))[..., None, :]

        def with_mean(tensor: Tensor) -> Tensor:
            mean = (share @ tensor.float()).to(tensor.dtype)
            return torch.where(place[..., None], mean, tensor)

        bias = torch.where(place, count.log(), before.to(kept.device))
        return Combined(
            keys=with_mean(states.keys), values=with_mean(states.values), logit_bias=bias
        )


def _place(room: Room) -> Tensor:
    """The first evictable entry of each row and head, (batch, n_kv_heads, n_tokens)."""
    return room.evictable & (room.evictable.cumsum(dim=-1) == 1)
