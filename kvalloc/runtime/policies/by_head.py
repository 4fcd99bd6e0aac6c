"""Several policies in one cache: each KV head of each layer has its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.errors import UnsupportedRequestError, option
from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.policies.base import EvictionPolicy, Limits
from kvalloc.scorers import Scorer


@dataclass(frozen=True, kw_only=True, eq=False)
class ByHead(EvictionPolicy):
    """Each KV head keeps what its own policy would keep there.

    A policy that some head of a layer has looks at that layer once, with all its heads, so that
    a ranking for a whole layer (TOVA) stays one. It has no name to be asked for: a budget profile
    that gives its heads different policies makes it.

    It observes nothing: there is one record of what earlier chunks brought, so a prompt comes in
    one piece where one of its policies would observe.

    Parameters
    ----------
    scorer : Scorer
        That of the first policy.
    policies : tuple of EvictionPolicy
    table : ndarray of int64, (n_layers, n_kv_heads)
        Which of them each KV head has.

    Raises
    ------
    UnsupportedRequestError
        If a policy does more than choose what is kept.
    """

    name = "by_head"
    summary = "each KV head by its own policy"
    reference = "ours"

    policies: tuple[EvictionPolicy, ...]
    table: IntArray

    def __post_init__(self) -> None:
        """Check that every policy only chooses."""
        for policy in self.policies:
            check_chooses_only(policy)

    @property
    def observes(self) -> bool:
        """Return False: one record cannot serve several policies."""
        return False

    @property
    def needs_whole_prompt(self) -> bool:
        """Return whether one of the policies adds up what each chunk brings."""
        return any(policy.observes for policy in self.policies)

    def query_rows(self, n_tokens: int) -> int:
        """Return the largest number of a policy: each takes those that it needs from the end."""
        return max(policy.query_rows(n_tokens) for policy in self.policies)

    def keep(self, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]) -> Tensor:
        """Choose the entries that stay; see `EvictionPolicy.keep`."""
        n_heads = int(states.keys.shape[1])
        places = self.table[states.layer, states.first_head : states.first_head + n_heads]
        kept = torch.zeros(states.keys.shape[:3], dtype=torch.bool, device=states.keys.device)
        for place in np.unique(places).tolist():
            heads = torch.from_numpy(np.flatnonzero(places == place)).to(kept.device)
            kept[:, heads] = self.policies[place].keep(states, budgets, **limits)[:, heads]
        return kept

    def again(self, *, rotates: bool) -> ByHead:
        """Return each head's own; see `EvictionPolicy.again`."""
        again = tuple(policy.again(rotates=rotates) for policy in self.policies)
        return replace(self, scorer=again[0].scorer, policies=again)

    def later_scorers(self, layer: int) -> tuple[Scorer, ...]:
        """Return those of the policies that some head of the layer has."""
        found: list[Scorer] = []
        for place in np.unique(self.table[layer]).tolist():
            found += self.policies[place].later_scorers(layer)
        return tuple(found)


def check_chooses_only(policy: EvictionPolicy) -> None:
    """Refuse a policy that cannot be one of several.

    Raises
    ------
    UnsupportedRequestError
        If it puts something of what is evicted into what is kept, or leaves entries unread while
        tokens are decoded.
    """
    if policy.combines or type(policy).reader is not EvictionPolicy.reader:
        does = "merges entries" if policy.combines else "leaves stored entries unread"
        raise UnsupportedRequestError(
            f"the policy {policy.name} {does} and cannot be one of several in a cache; give it to "
            f"all heads ({option('policy')}), or choose another one"
        )
