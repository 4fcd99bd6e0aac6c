"""MPCache: read few clusters for each token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.models.attention import AttentionStates, Compute
from kvalloc.runtime.extension import Extension
from kvalloc.runtime.kept import Kept
from kvalloc.runtime.policies.base import Limits, VotedPolicy
from kvalloc.runtime.selection import best_entries, gathered, keep_best, kept_places
from kvalloc.scorers.base import Positive, Share, ShareAbove0

_FIRST_PAIR = 2


@dataclass(frozen=True, kw_only=True)
class MPCache(VotedPolicy):
    """Static: the best by the prompt's last rows. Dynamic: see `ClusterReader`.

    Parameters
    ----------
    scorer : Scorer
        Not used.
    rows_share : float
        Share of the prompt's rows, at its end; their attention is summed.
    alpha : float
        Weight of a cluster's largest key against its smallest.
    coarse_tokens, fine_tokens : int
        Entries of a cluster; the first a multiple of the second.
    coarse_share, fine_share : float
        Of clusters that stay.
    share_layers : bool
        Let each second layer, from the fourth on, read the previous one's clusters.

    Raises
    ------
    InputError
        If a parameter is out of range.

    References
    ----------
    MPCache: MPC-Friendly KV Cache Eviction for Efficient Private LLM Inference, Sections 4.2 to
    4.4, Algorithm 3; defaults are its values.
    """

    name = "mpcache"
    summary = "each decoded token reads the nearest clusters of what is stored"
    reference = "MPCache, Sections 4.2 to 4.4"
    unserved = ("latent", "shared")

    rows_share: ShareAbove0 = 0.2
    alpha: Share = 0.6
    coarse_tokens: Positive = 32
    coarse_share: ShareAbove0 = 0.7
    fine_tokens: Positive = 16
    fine_share: ShareAbove0 = 0.28
    share_layers: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coarse_tokens % self.fine_tokens:
            raise InputError(
                f"policy mpcache: coarse_tokens {self.coarse_tokens} is no multiple of fine_tokens "
                f"{self.fine_tokens}; choose sizes of which one divides the other"
            )

    def query_rows(self, n_tokens: int) -> int:
        """Return the number of summed rows."""
        return math.ceil(n_tokens * self.rows_share)

    def keep(self, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]) -> Tensor:
        """See `EvictionPolicy.keep`."""
        return keep_best(self.votes(states), budgets, **limits)

    def extension(self, *, sinks: int, window: int) -> ClusterReader:
        """Return the dynamic half."""
        return ClusterReader(self, sinks=sinks, window=window)


class ClusterReader(Extension):
    """Reads sinks, window, decoded tokens, and the prompt's nearest clusters.

    Nearness is ``q . (alpha * r_max + (1 - alpha) * r_min)``, with elementwise largest and smallest
    keys and a KV head's mean query. Coarse clusters are ranked, then fine ones within the best.
    Entries that fill none are read. Ties go to the earlier cluster.
    """

    def __init__(self, settings: MPCache, *, sinks: int, window: int) -> None:
        self._settings = settings
        self._sinks, self._window = sinks, window
        self._clusters = WeakKeyDictionary[Kept, tuple[Tensor, Tensor]]()  # coarse and fine
        self._led: tuple[int, Tensor, Tensor] | None = None

    def planned(self, targets: Mapping[int, IntArray]) -> None:
        """Refuse budgets that differ between a layer's rows or heads."""
        if any((counts != counts[0, 0]).any() for counts in targets.values()):
            raise UnsupportedRequestError(
                "the policy mpcache needs equally many entries in all rows and heads of a layer; "
                "use a profile of layer level and prompts of equal length, or another policy"
            )

    def refuse_taking_back(self, cache: Any) -> None:
        """Refuse drafts."""
        raise UnsupportedRequestError(
            "the policy mpcache leaves entries unread for one token at a time, and drafts come "
            "several at once; call generate() without assistance, or choose another policy"
        )

    def answer(self, cache: Any, store: Any, states: AttentionStates, compute: Compute) -> Any:
        """Attend to the `chosen` entries; see `Extension.answer`."""
        if store.tail.starts is not None or (store.kept.lengths != store.kept.lengths[0, 0]).any():
            return None
        *kept, positions = store.kept.padded(np.arange(store.rows))
        pairs = zip(kept, (states.keys, states.values), strict=True)
        keys, values = (torch.cat([old, new], dim=2) for old, new in pairs)
        place = cache.profile.shape.full_layers.index(states.layer)
        old = replace(states, keys=keys, values=values)
        indices = self.chosen(old, positions, place=place, kept=store.kept)
        if indices is None:
            return compute(None, keys, values)
        return compute(None, gathered(keys, indices), gathered(values, indices))

    def chosen(
        self, states: AttentionStates, positions: Tensor, *, place: int, kept: Kept
    ) -> Tensor | None:
        """Return the entries to read, rising, (batch, n_kv_heads, n_read), int64; None for all."""
        settings = self._settings
        n_coarse = (int(positions.shape[-1]) - self._window - self._sinks) // settings.coarse_tokens
        if n_coarse < 2:
            self._led = None
            return None
        entries = slice(self._sinks, self._sinks + n_coarse * settings.coarse_tokens)
        where = positions[..., entries].long().contiguous()
        nearest = None
        if settings.share_layers and place >= _FIRST_PAIR and place % 2:
            nearest = self._follow(place, where, n_coarse)
        inside = self._compare(states, kept, entries) if nearest is None else nearest
        inside = inside.repeat_interleave(settings.fine_tokens, dim=-1)
        if nearest is None:
            self._led = (place, where, inside)
        stored = int(states.keys.shape[2])
        read = nn.functional.pad(inside, (entries.start, stored - entries.stop), value=True)
        n_outside = stored - n_coarse * settings.coarse_tokens
        fine = self._counts(n_coarse)[1] * settings.fine_tokens
        counts = torch.full(read.shape[:2], n_outside + fine, device="cpu")
        return kept_places(read, counts).view(*counts.shape, -1)

    def _counts(self, n_coarse: int) -> tuple[int, int]:
        settings = self._settings
        coarse = math.ceil(settings.coarse_share * n_coarse)
        parts = settings.coarse_tokens // settings.fine_tokens
        return coarse, math.ceil(settings.fine_share * coarse * parts)

    def _compare(self, states: AttentionStates, kept: Kept, entries: slice) -> Tensor:
        """Return the nearest fine clusters, (batch, n_kv_heads, n_fine)."""
        settings = self._settings
        clusters = self._clusters.get(kept)
        if clusters is None:
            keys = states.keys[:, :, entries]
            clusters = self._clusters[kept] = (
                _summary(keys, settings.coarse_tokens, settings.alpha),
                _summary(keys, settings.fine_tokens, settings.alpha),
            )
        batch, n_kv_heads, n_coarse, head_dim = clusters[0].shape
        query = states.queries.view(batch, n_kv_heads, -1, head_dim).float().mean(dim=2)
        query = query[..., None]
        n_kept, n_fine = self._counts(n_coarse)
        coarse, fine = ((cluster.float() @ query).squeeze(-1) for cluster in clusters)
        open_coarse = _best(coarse, n_kept)
        parts = settings.coarse_tokens // settings.fine_tokens
        return _best(fine, n_fine, open_coarse.repeat_interleave(parts, dim=-1))

    def _follow(self, place: int, where: Tensor, n_coarse: int) -> Tensor | None:
        """Return the fine clusters with most of the previous layer's positions, if any."""
        if self._led is None or self._led[0] != place - 1:
            return None
        led, inside = (tensor.to(where.device) for tensor in self._led[1:])
        same = torch.searchsorted(led, where).clamp(max=led.shape[-1] - 1)
        shared = inside.gather(-1, same) & (led.gather(-1, same) == where)
        counts = shared.reshape(*shared.shape[:2], -1, self._settings.fine_tokens).sum(dim=-1)
        return _best(counts.float(), self._counts(n_coarse)[1])


def _summary(keys: Tensor, size: int, alpha: float) -> Tensor:
    clusters = keys.reshape(*keys.shape[:2], -1, size, keys.shape[-1])
    return alpha * clusters.amax(dim=3) + (1 - alpha) * clusters.amin(dim=3)


def _best(scores: Tensor, count: int, among: Tensor | None = None) -> Tensor:
    among = torch.ones_like(scores, dtype=torch.bool) if among is None else among
    return best_entries(scores, torch.full(scores.shape[:2], count, device="cpu"), among=among)
