"""Merging: what is evicted is put into the most similar entry that stays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

import torch

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import Combined, Limits
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.selection import Room
from kvalloc.scorers.parameters import Range

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_ENTRIES = 1024


@dataclass(frozen=True, kw_only=True)
class Merge(Score):
    """The best scores stay, and each evicted entry is merged into its nearest one, or dropped.

    Within a KV head, entry i goes to the kept entry j whose key is most similar, by the cosine
    u_ij. It is merged where u_ij reaches a threshold, and dropped otherwise. Keys and values become
    the same weighted mean of the kept entry and of all that go to it. Sinks and window take nothing
    in: they stay as they are.

    Parameters
    ----------
    scorer : Scorer
        Picks the entries that stay.
    threshold : float, optional
        Least cosine, 0..1. By default the mean over the head's evicted entries of their best
        cosine, as in D2O's prefill. KVMerger takes a fixed one (0.75).
    weights : {"exponential", "gaussian"}
        ``exp(u_ij)`` for an evicted entry and e for the kept one, as in D2O; or
        ``exp(-d_ij ** 2 / (2 s ** 2))`` with the distance d of the keys and 1 for the kept one, the
        kernel of KVMerger, where s is the mean distance of the head's merged pairs (ours).

    Raises
    ------
    InputError
        If a parameter is out of range.

    Notes
    -----
    KVMerger merges runs of neighbours around a pivot, whatever the budget; here the budget is
    given, and the kept entry is the pivot.

    References
    ----------
    D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language
    Models (Wan et al., 2024), token level. Model Tells You Where to Merge: Adaptive KV Cache
    Merging for LLMs on Long-Context Tasks (Wang et al., 2024).
    """

    name = "merge"
    summary = "evicted entries are merged into the most similar kept one"
    reference = "D2O (Wan et al., 2024); kernel of KVMerger (Wang et al., 2024)"

    threshold: Annotated[float | None, Range(0, 1)] = None
    weights: Literal["exponential", "gaussian"] = "exponential"

    def combine(self, states: AttentionStates, kept: Tensor, **limits: Unpack[Limits]) -> Combined:
        """Merge what goes into what stays; see `EvictionPolicy.combine`."""
        room = Room.of(states.keys, kept.sum(dim=-1), **limits)
        keys, values = states.keys.clone(), states.values.clone()
        for row in range(keys.shape[0]):
            for head in range(keys.shape[1]):
                free = room.evictable[row, head]
                targets = (free & kept[row, head]).nonzero()[:, 0]
                sources = (free & ~kept[row, head]).nonzero()[:, 0]
                if targets.numel() and sources.numel():
                    self._merge(keys[row, head], values[row, head], targets, sources)
        return Combined(keys=keys, values=values)

    def _merge(self, keys: Tensor, values: Tensor, targets: Tensor, sources: Tensor) -> None:
        """Change the targets' keys and values (n_tokens, head_dim) in place."""
        wide = keys.float()
        cosine, place = _nearest(wide, targets, sources)
        least = cosine.mean() if self.threshold is None else self.threshold
        merged = cosine >= least
        sources, cosine, place = sources[merged], cosine[merged], place[merged]
        if self.weights == "exponential":
            weight, own = cosine.exp(), math.e
        else:
            square = (wide[sources] - wide[targets[place]]).square().sum(dim=-1)
            spread = square.sqrt().mean().square().clamp(min=torch.finfo(torch.float32).tiny)
            weight, own = (-square / (2 * spread)).exp(), 1.0
        total = torch.full((targets.numel(),), own, device=keys.device)
        total.index_add_(0, place, weight)
        for tensor in (keys, values):
            mixed = tensor[targets].float() * own
            mixed.index_add_(0, place, tensor[sources].float() * weight[:, None])
            tensor[targets] = (mixed / total[:, None]).to(tensor.dtype)


def _nearest(keys: Tensor, targets: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Best cosine of each source, and the place among the targets that has it.

    Block by block of sources, so that the scratch is ``1024 x n_targets``.
    """
    directions = torch.nn.functional.normalize(keys, dim=-1)
    others = directions[targets].T
    found = [
        (directions[block] @ others).max(dim=-1) for block in torch.split(sources, _BLOCK_ENTRIES)
    ]
    return torch.cat([best.values for best in found]), torch.cat([best.indices for best in found])
