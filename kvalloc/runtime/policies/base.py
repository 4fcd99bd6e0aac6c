"""The contract of a policy: which entries stay within the budgets, and what happens to others."""

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
"""Of texts of no more tokens, up to so many entries of heads and layers are looked at in one call:
one by one they would take the time of their calls."""


class Limits(TypedDict):
    """Which entries are not for a policy to decide.

    Attributes
    ----------
    sinks, window : int
        First and last tokens of each row that always stay.
    """

    sinks: int
    window: int


@dataclass(frozen=True, kw_only=True)
class EvictionPolicy(Parameterized, ABC):
    """Decides which entries of a layer stay. The budgets are given, and met exactly.

    A policy is a frozen, keyword-only dataclass; its fields are its parameters, beside the scorer.
    What it has seen of a prompt belongs to the cache, so that one policy serves any number of
    caches.

    Parameters
    ----------
    scorer : Scorer
        The profile's scorer, which policies may use or not.

    Attributes
    ----------
    name : str
        Name in the registry.
    summary : str
        One line for ``kvalloc list policies``.
    reference : str
        Where the method comes from.
    """

    kind = "policy"
    summary: ClassVar[str]
    reference: ClassVar[str]
    unserved: ClassVar[tuple[LayerType, ...]] = ()
    """Kinds of layers that it does not serve; beside latents, if it combines entries."""
    fits_new: ClassVar[bool] = False
    """Whether `combine` changes the entries of a turn alone."""
    scorer: Scorer

    @abstractmethod
    def keep(self, states: AttentionStates, budgets: Tensor, **limits: Unpack[Limits]) -> Tensor:
        """Choose the entries that stay.

        Parameters
        ----------
        states : AttentionStates
            One layer's attention when the prompt is complete, without padding;
            ``states.observed`` is what `observe` left of earlier chunks.
        budgets : Tensor of int64, (batch, n_kv_heads)
            Entries that each KV head keeps, sinks and window included. The cache has them on the
            host, so that nobody has to ask the device.
        **limits
            Sinks and window; see `Limits`.

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
            What `keep` returned for them.

        Returns
        -------
        keys, values : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
            As before, but for some of the kept columns. The other columns are not read. Or None, as
            by default, where evicted entries are simply dropped.
        """
        return None

    @property
    def combines(self) -> bool:
        """Return whether `combine` does anything."""
        return type(self).combine is not EvictionPolicy.combine

    @property
    def rotates(self) -> bool:
        """Whether it rotates queries or keys by their numbers in the text, as its scorer does."""
        return self.scorer.rotates

    @property
    def holds(self) -> bool:
        """Return whether the cache holds a prompt whole until it is complete; no by default."""
        return False

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed | None:
        """Return what to remember of a chunk that is not the last one; see `Scorer.observe`."""
        return self.scorer.observe(states, sinks=sinks)

    @property
    def observes(self) -> bool:
        """Return whether `observe` has anything to note; if not, it need not be called."""
        overridden = type(self).observe is not EvictionPolicy.observe
        return overridden or self.scorer.observes

    @property
    def across_layers(self) -> bool:
        """Return whether heads of several layers may be shown as those of one; no by default."""
        return False

    def query_rows(self, n_tokens: int) -> int:
        """Return how many of a prompt's last queries `keep` sees; see `Scorer.query_rows`."""
        return self.scorer.query_rows(n_tokens)

    def turn_policy(self, *, rotates: bool) -> EvictionPolicy:
        """Return the policy that ranks kept and new entries after the prompt.

        Parameters
        ----------
        rotates : bool
            Whether the model's queries can be put elsewhere.
        """
        return replace(self, scorer=self._turn_scorer(rotates=rotates))

    def _turn_scorer(self, *, rotates: bool) -> Scorer:
        """Return `Scorer.for_turns`, or a scorer by the latest queries."""
        scorer = self.scorer.for_turns
        if scorer is not None and (rotates or not scorer.rotates):
            return scorer
        latest = latest_votes(window=self.scorer.window, rotates=rotates)
        return replace(latest, votes=TURN_VOTES)

    def extension(self, *, sinks: int, window: int) -> Extension | None:
        """Return what listens to a cache of this policy; None, as by default, for nothing.

        Parameters
        ----------
        sinks, window : int
            First and last tokens of the prompt, which always stay.
        """
        return None

    def parameters(self) -> dict[str, Any]:
        """Return what builds this policy again, apart from the scorer."""
        return {name: each for name, each in super().parameters().items() if name != "scorer"}


@dataclass(frozen=True, kw_only=True)
class VotedPolicy(EvictionPolicy):
    """A policy that ranks entries by the attention that the prompt's last rows pay, added up.

    How many rows is `query_rows`. The scorer is not used: the cache holds the rows' queries back.
    """

    rotates = False

    @abstractmethod
    def query_rows(self, n_tokens: int) -> int:
        """Return how many of a prompt's last rows are added up."""

    @property
    def observes(self) -> bool:
        """Return False: the rows' queries are held back by the cache."""
        return False

    def votes(self, states: AttentionStates) -> Tensor:
        """Return the sums of the rows' attention, (batch, n_kv_heads, n_tokens).

        Where the keys of some rows are gone, all rows of the states are added up.
        """
        votes = torch.ones(states.queries.shape[2], device="cpu")
        if not states.gaps:
            votes[: max(len(votes) - self.query_rows(int(states.keys.shape[2])), 0)] = 0
        return weighted_rows(states, votes)
