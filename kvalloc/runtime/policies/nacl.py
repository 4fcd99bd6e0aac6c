"""NaCl: proxy tokens score entries, and some are drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import Limits, VotedPolicy
from kvalloc.runtime.selection import best_entries, evictable, free_counts
from kvalloc.scorers.base import Count, Share


@dataclass(frozen=True, kw_only=True)
class NaCl(VotedPolicy):
    """Proxy tokens, those with most attention from them, and a random share.

    1. ``F = sum over proxy rows of softmax(A)``, mean over the query heads of a KV head.
    2. The proxies stay. If they exceed the budget, the last ones stay.
    3. A share of the remaining budget is drawn without replacement from ``softmax(F)``. The best by
    F fill the budget.

    A seed draws the same on every device and in every batch, different in each layer and KV head.

    Parameters
    ----------
    proxy_share : float
        Share of a row's last tokens that are proxies: it should hold the question.
    random_share : float
        Share of the remaining budget to draw.
    seed : int

    References
    ----------
    NaCl (Chen et al., 2024), Algorithm 1; about 10% proxies and 70% at random did best there.
    """

    name = "nacl"
    summary = "proxy tokens (the question) vote and stay; a share is drawn at random"
    reference = "NaCl (Chen et al., 2024), Algorithm 1"

    proxy_share: Share = 0.1
    random_share: Share = 0.7
    seed: Count = 0

    def query_rows(self, n_tokens: int) -> int:
        """Return the number of proxies; see `VotedPolicy.query_rows`."""
        return max(math.ceil(n_tokens * self.proxy_share), 1)

    def keep(self, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]) -> Tensor:
        """See `EvictionPolicy.keep`."""
        scores = self.votes(states)
        free, counts = evictable(scores, **limits), free_counts(scores, budgets, **limits)
        n_tokens = int(scores.shape[2])
        first = max(n_tokens - self.query_rows(n_tokens), limits["sinks"])
        stop = max(n_tokens - limits["window"], first)
        n_own = counts.clamp(max=stop - first)
        place = torch.arange(n_tokens, device=free.device)
        proxies = free & (place >= first) & (place < stop)
        # latest first, where the proxies are more than the budget
        kept_proxies = proxies & (place >= stop - n_own[..., None].to(place.device))
        left = counts - n_own
        n_random = (left * self.random_share).floor().long()
        best = best_entries(scores, left - n_random, among=free & ~proxies)
        drawn = best_entries(scores + self._noise(states), n_random, among=free & ~proxies & ~best)
        return ~free | kept_proxies | best | drawn

    def _noise(self, states: AttentionStates) -> Tensor:
        """Return Gumbel noise: the largest F + noise are a draw."""
        heads = range(states.first_head, states.first_head + int(states.keys.shape[1]))
        noise = [
            np.random.default_rng([self.seed, states.layer, head]).gumbel(size=states.keys.shape[2])
            for head in heads
        ]
        return torch.from_numpy(np.stack(noise)).to(states.keys.device, torch.float32)
