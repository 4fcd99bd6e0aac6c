"""NaCl: proxy tokens vote, and a share of the budget is drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from kvalloc.errors import InputError
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import Limits, Rankings, VotedPolicy
from kvalloc.runtime.selection import best_entries, evictable, free_counts
from kvalloc.scorers.parameters import Count, Share


@dataclass(frozen=True, kw_only=True)
class NaCl(VotedPolicy):
    """Proxy tokens stay and score the others; some of the rest are drawn from those scores.

    1. ``F = sum over proxy rows of softmax(A)``, mean over the query heads of a KV head.
    2. The proxies stay. Where they alone are more than the budget, the last ones stay.
    3. Of what is left of the budget, a share is drawn without replacement from ``softmax(F)``,
       other than by score, with another seed in each layer and KV head; the rest are the best by F.

    The profile's scorer is not used. The same seed draws the same entries, on every device and
    whatever else is in the batch.

    Parameters
    ----------
    scorer : Scorer
        Not used.
    proxy_share : float
        Share of a row's tokens, at its end, that are proxies unless they are named.
    proxy_start, proxy_stop : int, optional
        The proxies by name, as a range of the row's tokens without padding: the place of the
        question. Both or none.
    random_share : float
        Share of the budget left after the proxies that is drawn at random.
    seed : int
        Of the draw.

    Raises
    ------
    InputError
        If a parameter is out of range, or the named proxies are beyond the prompt.

    References
    ----------
    NaCl: A General and Effective KV Cache Eviction Framework for LLMs at Inference Time (Chen et
    al., 2024), Algorithm 1; about 10% proxies and 70% at random did best there.
    """

    name = "nacl"
    summary = "proxy tokens (the question) vote and stay; a share is drawn at random"
    reference = "NaCl (Chen et al., 2024), Algorithm 1"

    proxy_share: Share = 0.1
    proxy_start: int | None = None
    proxy_stop: int | None = None
    random_share: Share = 0.7
    seed: Count = 0

    def __post_init__(self) -> None:
        """Check; see `Parameterized`."""
        super().__post_init__()
        start, stop = self.proxy_start, self.proxy_stop
        if (start is None) != (stop is None) or (
            start is not None and stop is not None and not 0 <= start < stop
        ):
            raise InputError(
                f"policy nacl: proxy_start {start} and proxy_stop {stop} name no range of tokens; "
                "give both, with 0 <= start < stop"
            )

    def voters(self, n_tokens: int) -> range:
        """Return the places of the proxies; see `VotedPolicy.voters`."""
        if self.proxy_start is not None and self.proxy_stop is not None:
            return range(self.proxy_start, self.proxy_stop)
        return range(n_tokens - max(math.ceil(n_tokens * self.proxy_share), 1), n_tokens)

    def rankings(self, states: AttentionStates, **limits: Unpack[Limits]) -> Rankings:
        """Return the proxies' votes F; see `RankedPolicy.rankings`.

        Raises
        ------
        InputError
            If a proxy that is named is beyond the prompt.
        """
        n_tokens = int(states.keys.shape[2])
        if (self.proxy_stop or 0) > n_tokens:
            raise InputError(
                f"policy nacl: proxy_stop is {self.proxy_stop}, but a prompt has only "
                f"{n_tokens} tokens"
            )
        return super().rankings(states, **limits)

    def keep_ranked(
        self, rankings: Rankings, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]
    ) -> Tensor:
        """Choose the entries that stay; see `RankedPolicy.keep_ranked`."""
        (scores,) = rankings
        free, counts = evictable(scores, **limits), free_counts(scores, budgets, **limits)
        n_tokens = int(scores.shape[2])
        proxies = self.voters(n_tokens)
        first = max(proxies.start, limits["sinks"])
        stop = max(min(proxies.stop, n_tokens - limits["window"]), first)
        n_own = counts.clamp(max=stop - first)
        place = torch.arange(n_tokens, device=free.device)
        own = free & (place >= first) & (place < stop)
        # latest first, where the proxies are more than the budget
        kept_proxies = own & (place >= stop - n_own[..., None].to(place.device))
        left = counts - n_own
        n_random = (left * self.random_share).floor().long()
        best = best_entries(scores, left - n_random, among=free & ~own)
        drawn = best_entries(scores + self._noise(states), n_random, among=free & ~own & ~best)
        return ~free | kept_proxies | best | drawn

    def _noise(self, states: AttentionStates) -> Tensor:
        """Return Gumbel noise, (n_kv_heads, n_tokens): the largest of ``F + noise`` are a draw.

        That is, from softmax(F).
        """
        heads = range(states.first_head, states.first_head + int(states.keys.shape[1]))
        noise = [
            np.random.default_rng([self.seed, states.layer, head]).gumbel(size=states.keys.shape[2])
            for head in heads
        ]
        return torch.from_numpy(np.stack(noise)).to(states.keys.device, torch.float32)
