"""NaCl: proxy tokens vote, and a share of the budget is drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch

from kvalloc.errors import InputError
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import Limits, RankedPolicy, Rankings
from kvalloc.runtime.selection import Room, best_entries, row_places
from kvalloc.scorers.column_sums import last_rows, weighted_rows
from kvalloc.scorers.parameters import Count, Share

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NaCl(RankedPolicy):
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

    def rankings(self, states: AttentionStates, **limits: Unpack[Limits]) -> Rankings:
        """The proxies' votes F; see `RankedPolicy.rankings`."""
        proxies = self._proxies(*row_places(states.keys, limits.get("valid")))
        return (weighted_rows(states, last_rows(states, proxies)),)

    def keep_ranked(
        self, rankings: Rankings, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]
    ) -> Tensor:
        """Choose the entries that stay; see `RankedPolicy.keep_ranked`."""
        (scores,) = rankings
        room = Room.of(states.keys, budgets, **limits)
        proxies = self._proxies(room.rank, room.n_tokens)
        # latest first, where the proxies are more than the budget
        own = room.evictable & proxies[:, None]
        n_own = torch.minimum(own.sum(dim=-1), room.counts)
        latest = room.rank[:, None].expand(scores.shape).float()
        kept_proxies = best_entries(latest, n_own, among=own)
        left = room.counts - n_own
        n_random = (left * self.random_share).floor().long()
        others = room.evictable & ~own
        best = best_entries(scores, left - n_random, among=others)
        drawn = best_entries(scores + self._noise(states, room), n_random, among=others & ~best)
        return room.always | kept_proxies | best | drawn

    def _proxies(self, rank: Tensor, n_tokens: Tensor) -> Tensor:
        """(batch, n_tokens); `rank` counts a row's tokens from 0, -1 for padding."""
        if self.proxy_start is not None and self.proxy_stop is not None:
            shortest = int(n_tokens.min())
            if self.proxy_stop > shortest:
                raise InputError(
                    f"policy nacl: proxy_stop is {self.proxy_stop}, but a prompt has only "
                    f"{shortest} tokens"
                )
            return (rank >= self.proxy_start) & (rank < self.proxy_stop)
        count = (n_tokens.double() * self.proxy_share).ceil().long().clamp(min=1)
        return (rank >= 0) & (rank >= (n_tokens - count))

    def _noise(self, states: AttentionStates, room: Room) -> Tensor:
        """Gumbel noise: the largest of ``F + noise`` are a draw from softmax(F)."""
        n_heads, n_columns = room.evictable.shape[1:]
        noise = np.empty((n_heads, n_columns))
        for head in range(n_heads):
            own = [self.seed, states.layer, states.first_head + head]
            generator = np.random.default_rng(own)
            noise[head] = generator.gumbel(size=n_columns)
        # by a row's own tokens, so that padding in front of them draws nothing else
        places = room.rank.clamp(min=0)[:, None].expand(-1, n_heads, -1).cpu()
        spread = torch.from_numpy(noise)[None].expand(places.shape[0], -1, -1)
        return spread.gather(-1, places).to(room.rank.device, torch.float32)

    def observe(self, states: AttentionStates, *, sinks: int) -> None:
        """Nothing: the proxies' queries are held back by the cache."""

    @property
    def observes(self) -> bool:
        """It does not."""
        return False

    def query_rows(self, n_tokens: int) -> int:
        """From the first proxy to the end."""
        if self.proxy_start is not None:
            return max(n_tokens - self.proxy_start, 0)
        return max(int(np.ceil(n_tokens * self.proxy_share)), 1)
