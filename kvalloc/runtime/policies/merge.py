"""Merging of evicted entries into the most similar kept entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import Limits
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.selection import evictable, free_counts, gathered
from kvalloc.scorers.base import Share

_BLOCK_ENTRIES = 1024


@dataclass(frozen=True, kw_only=True)
class Merge(Score):
    """The best scores, with each evicted entry merged into its nearest kept one, or dropped.

    Within a KV head, entry i is merged into the kept entry j of the most similar key if their
    cosine u_ij reaches a threshold. Keys and values become weighted means. Sinks and window do not
    change.

    Parameters
    ----------
    threshold : float, optional
        Lowest cosine, 0..1. By default the mean best cosine of the head's evicted entries, as in
        D2O's prefill. KVMerger fixes 0.75.
    weights : {"exponential", "gaussian"}
        ``exp(u_ij)``, and e for the kept entry, as in D2O. Or KVMerger's kernel: ``exp(-d_ij ** 2 /
        (2 s ** 2))`` with the keys' distance d, and 1 for the kept one. Here s is the head's mean
        distance of merged pairs (ours).

    References
    ----------
    D2O (Wan et al., 2024), token level. KVMerger: Model Tells You Where to Merge (Wang et al.,
    2024); it merges runs of neighbours around a pivot, at any budget.
    """

    name = "merge"
    summary = "evicted entries are merged into the most similar kept one"
    reference = "D2O (Wan et al., 2024); kernel of KVMerger (Wang et al., 2024)"

    threshold: Share | None = None
    weights: Literal["exponential", "gaussian"] = "exponential"

    def combine(
        self, states: AttentionStates, kept: Tensor, budgets: Tensor, **limits: Unpack[Limits]
    ) -> tuple[Tensor, Tensor]:
        """See `EvictionPolicy.combine`."""
        free = evictable(states.keys, **limits)
        n_kept = free_counts(states.keys, budgets, **limits)
        n_gone = int(kept.shape[2]) - budgets
        keys, values = states.keys.clone(), states.values.clone()
        if not bool(((n_kept > 0) & (n_gone > 0)).any()):
            return keys, values
        targets, taken = _front(free & kept, n_kept)
        sources, present = _front(free & ~kept, n_gone)
        blocks = torch.split(sources, max(_BLOCK_ENTRIES // n_kept.numel(), 1), dim=2)
        cosine, place = _nearest(keys, blocks, targets, taken)
        paired = present & taken.any(dim=-1, keepdim=True)
        threshold = _mean(cosine, paired) if self.threshold is None else self.threshold
        merged = paired & (cosine >= threshold)
        if self.weights == "exponential":
            weight, base_weight = cosine.exp(), math.e
        else:
            apart = gathered(keys, sources).float() - gathered(keys, targets.gather(2, place))
            square = apart.square().sum(dim=-1)
            spread = _mean(square.sqrt(), merged).square()
            spread = spread.clamp(min=torch.finfo(torch.float32).tiny)
            weight, base_weight = (-square / (2 * spread)).exp(), 1.0
        weight = weight.masked_fill(~merged, 0.0)
        total = torch.full(targets.shape, base_weight, device=keys.device).scatter_add_(
            2, place, weight
        )
        goals, shares = (torch.split(one, blocks[0].shape[2], dim=2) for one in (place, weight))
        for tensor in (keys, values):
            before = gathered(tensor, targets)
            mixed = before.float() * base_weight
            for block, goal, share in zip(blocks, goals, shares, strict=True):
                more = gathered(tensor, block).float() * share[..., None]
                mixed.scatter_add_(2, goal[..., None].expand_as(more), more)
            mixed = (mixed / total[..., None]).to(tensor.dtype)
            index = targets[..., None].expand_as(before)
            tensor.scatter_(2, index, torch.where(total[..., None] > base_weight, mixed, before))
        return keys, values


def _front(mask: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return places of True, increasing, and whether each is one."""
    order = mask.byte().argsort(dim=-1, descending=True, stable=True)[..., : int(counts.max())]
    return order, mask.gather(-1, order)


def _mean(values: Tensor, among: Tensor) -> Tensor:
    count = among.sum(dim=-1, keepdim=True).clamp(min=1)
    return values.masked_fill(~among, 0.0).sum(dim=-1, keepdim=True) / count


def _nearest(
    keys: Tensor, blocks: Sequence[Tensor], targets: Tensor, taken: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each source's best cosine, and its target's place."""
    normed = normalize(gathered(keys, targets).float(), dim=-1).mT
    cosines, places = [], []
    for block in blocks:
        cosine = normalize(gathered(keys, block).float(), dim=-1) @ normed
        best = cosine.masked_fill_(~taken[:, :, None], -math.inf).max(dim=-1)
        cosines.append(best.values)
        places.append(best.indices)
    return torch.cat(cosines, dim=2), torch.cat(places, dim=2)
