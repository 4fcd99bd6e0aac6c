"""Contract of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.runtime.extension import Extension
from kvalloc.scorers import Scorer
from kvalloc.scorers.base import Parameterized
from kvalloc.scorers.column_sums import weighted_rows
from kvalloc.scorers.lookahead import TURN_VOTES, latest_votes
from kvalloc.shape import LayerType

SHORT_TOKENS, FEW_ENTRIES = 768, 2**15
"""Longest text, and most entries of heads and layers, that are scored in one call. Separate calls
would take longer than the scores."""


class Limits(TypedDict):
    """Numbers of first and last tokens of each row, which always stay."""

    sinks: int
    window: int


@dataclass(frozen=True, kw_only=True)
class EvictionPolicy(Parameterized, ABC):
    """Choice of the entries of a layer that stay. It meets the budgets exactly.

    A policy is a frozen, keyword-only dataclass; fields are the profile's scorer, which it may
    ignore, and its parameters. An invalid value raises `InputError`. The cache stores its
    observations, so one policy serves any number of caches.

    Attributes
    ----------
    name : str
        Name in the registry.
    summary : str
        One line for ``kvalloc list policies``.
    reference : str
        Source of the method.
    """

    kind = "policy"
    summary: ClassVar[str]
    reference: ClassVar[str]
    unserved: ClassVar[tuple[LayerType, ...]] = ()
    """Kinds of layers that it does not serve; a policy that combines entries serves no latents
    either."""
    fits_new: ClassVar[bool] = False
    """Whether `combine` changes only the entries of a turn."""
    scorer: Scorer

    @abstractmethod
    def keep(self, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]) -> Tensor:
        """Choose the entries that stay.

        Parameters
        ----------
        states : AttentionStates
            One layer's attention when the prompt is complete, without padding. ``states.observed``
            holds the notes of `observe` about earlier chunks.
        budgets : Tensor of int64, (batch, n_kv_heads)
            Entries that each KV head keeps, sinks and window included; on the host.
        **limits
            See `Limits`.

        Returns
        -------
        Tensor of bool, (batch, n_kv_heads, n_tokens)
            Exactly ``budgets[row, head]`` True. Ties go to the earlier position, on every device.

        Raises
        ------
        InputError
            If a budget does not fit the row, or a score is not finite.
        """

    def combine(
        self, states: AttentionStates, kept: Tensor, budgets: Tensor, **limits: Unpack[Limits]
    ) -> tuple[Tensor, Tensor] | None:
        """Merge evicted entries into kept ones; their number stays the same.

        Parameters
        ----------
        states, budgets, **limits
            As for `keep`.
        kept : Tensor of bool, (batch, n_kv_heads, n_tokens)
            Result of `keep`.

        Returns
        -------
        keys, values : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
            Changed only in kept columns; others are not read. None, as by default, if evicted
            entries are dropped.
        """
        return None

    @property
    def combines(self) -> bool:
        """Whether `combine` does anything."""
        return type(self).combine is not EvictionPolicy.combine

    @property
    def rotates(self) -> bool:
        """Whether it rotates queries or keys by their token numbers, as its scorer does."""
        return self.scorer.rotates

    @property
    def holds(self) -> bool:
        """Whether the cache stores the whole prompt until it is complete; no by default."""
        return False

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed | None:
        """Return notes about a chunk that is not the last one; see `Scorer.observe`."""
        return self.scorer.observe(states, sinks=sinks)

    @property
    def observes(self) -> bool:
        """Whether `observe` takes notes; if not, it need not be called."""
        overridden = type(self).observe is not EvictionPolicy.observe
        return overridden or self.scorer.observes

    @property
    def across_layers(self) -> bool:
        """Whether heads of several layers may be passed as heads of one; no by default."""
        return False

    def query_rows(self, n_tokens: int) -> int:
        """Return how many of a prompt's last queries `keep` reads; see `Scorer.query_rows`."""
        return self.scorer.query_rows(n_tokens)

    def turn_policy(self, *, rotates: bool) -> EvictionPolicy:
        """Return the policy that ranks kept and new entries after the prompt.

        ``rotates``: whether the model's queries can be moved to other positions.
        """
        return replace(self, scorer=self._turn_scorer(rotates=rotates))

    def _turn_scorer(self, *, rotates: bool) -> Scorer:
        scorer = self.scorer.for_turns
        if scorer is not None and (rotates or not scorer.rotates):
            return scorer
        latest = latest_votes(window=self.scorer.window, rotates=rotates)
        return replace(latest, votes=TURN_VOTES)

    def extension(self, *, sinks: int, window: int) -> Extension | None:
        """Return the extension of a cache, if any."""
        return None

    def parameters(self) -> dict[str, Any]:
        """Return the parameters, without the scorer."""
        return {name: each for name, each in super().parameters().items() if name != "scorer"}


@dataclass(frozen=True, kw_only=True)
class VotedPolicy(EvictionPolicy):
    """Ranking by the summed attention of the prompt's last queries, without the scorer."""

    rotates = False

    @abstractmethod
    def query_rows(self, n_tokens: int) -> int:
        """Return the number of last queries that are summed."""

    @property
    def observes(self) -> bool:
        """False: the cache stores the queries."""
        return False

    def votes(self, states: AttentionStates) -> Tensor:
        """Return the summed attention of the queries, (batch, n_kv_heads, n_tokens).

        If keys between them were evicted, all queries of the states are summed.
        """
        votes = torch.ones(states.queries.shape[2], device="cpu")
        if not states.gaps:
            votes[: max(len(votes) - self.query_rows(int(states.keys.shape[2])), 0)] = 0
        return weighted_rows(states, votes)
