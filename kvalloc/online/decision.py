"""Decisions on how the rows of a prompt are kept, and their caches."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvalloc.accounting import IntArray
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.loading import shape_of
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class PromptSize:
    """Size of a prompt that has not been read yet, for its cache.

    Attributes
    ----------
    tokens : int or None
        Length, padding included; None if unknown.
    lengths : tuple of int
        Tokens of each row, without padding; empty for a single row without any.
    chunked : bool
        Whether it comes in several forwards.
    rows : tuple of ndarray of int64, (n_tokens,)
        Token ids of each row, without padding; empty if unknown.
    scattered : tuple of bool
        Whether positions of a row differ from token numbers; empty if none do. See
        `kvalloc.runtime.rows.scattered_rows`.
    """

    tokens: int | None = None
    lengths: tuple[int, ...] = ()
    chunked: bool = False
    rows: tuple[IntArray, ...] = ()
    scattered: tuple[bool, ...] = ()

    @property
    def columns(self) -> int:
        """Return the length, padding included; 0 if unknown."""
        return self.tokens or 0

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return max(self.lengths or (self.columns,))

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return len(self.lengths) or 1

    def of_rows(self, indices: Sequence[int]) -> PromptSize:
        """Return the size of some rows, at least 1 token each, without their ids and positions."""
        lengths = self.lengths or (self.columns,)
        return replace(
            self, lengths=tuple(max(lengths[row], 1) for row in indices), rows=(), scattered=()
        )


UNKNOWN = PromptSize()
"""Size of a prompt that has not come yet."""


@dataclass(frozen=True, kw_only=True)
class Decision(ABC):
    """Decides how each prompt is kept.

    Attributes
    ----------
    options : CacheOptions
        Options of the caches.
    """

    options: CacheOptions = CacheOptions()

    @abstractmethod
    def ways(self, model: Any, shape: ModelShape, size: PromptSize) -> Sequence[Way]:
        """Return how each row of a prompt is kept, or one way for all of them."""

    def cache(self, model: Any, size: PromptSize = UNKNOWN) -> BudgetCache:
        """Make a cache for one prompt.

        Raises
        ------
        KVAllocError
            If the prompt cannot be kept, or as `kvalloc.make_cache`.
        """
        shape, begun = shape_of(model), time.perf_counter()
        ways = self.ways(model, shape, size)
        seconds = time.perf_counter() - begun
        announced, lengths = (size.tokens or 1, size.lengths) if size.chunked else (None, None)
        cache = build_rows(model, ways, prompt_tokens=announced, lengths=lengths, shape=shape)
        if any(way.once for way in ways):
            cache.decision_seconds = seconds
        return cache


@dataclass(frozen=True, kw_only=True)
class StoredProfile(Decision):
    """The budgets of a profile, for every prompt."""

    profile: BudgetProfile

    def ways(self, model: Any, shape: ModelShape, size: PromptSize) -> Sequence[Way]:
        """Return one way for all rows."""
        return [Way(profile=self.profile, options=self.options)]
