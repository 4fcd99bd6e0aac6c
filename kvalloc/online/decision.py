"""Decisions on how prompts are kept."""

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
    """Size of an unread prompt; with `chunked` it comes in several forwards.

    `tokens` include padding, None if unknown. `lengths` do not, empty for one unpadded row.
    `rows` are token ids, (n_tokens,) each, empty if unknown. For `scattered`, empty if none, see
    `kvalloc.runtime.rows.scattered_rows`.
    """

    tokens: int | None = None
    lengths: tuple[int, ...] = ()
    chunked: bool = False
    rows: tuple[IntArray, ...] = ()
    scattered: tuple[bool, ...] = ()

    @property
    def columns(self) -> int:
        """Return `tokens`, or 0."""
        return self.tokens or 0

    @property
    def longest(self) -> int:
        """Return the longest row's tokens."""
        return max(self.lengths or (self.columns,))

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return len(self.lengths) or 1

    def of_rows(self, indices: Sequence[int]) -> PromptSize:
        """Return the size of some rows, at least 1 token each."""
        lengths = self.lengths or (self.columns,)
        return replace(
            self, lengths=tuple(max(lengths[row], 1) for row in indices), rows=(), scattered=()
        )


UNKNOWN = PromptSize()
"""Size of a prompt that has not come yet."""


@dataclass(frozen=True, kw_only=True)
class Decision(ABC):
    """Decides how each prompt is kept."""

    options: CacheOptions = CacheOptions()

    @abstractmethod
    def ways(self, model: Any, shape: ModelShape, size: PromptSize) -> Sequence[Way]:
        """Return each row's way, or one way for all."""

    def cache(self, model: Any, size: PromptSize = UNKNOWN) -> BudgetCache:
        """Make a prompt's cache.

        Raises
        ------
        KVAllocError
            As `ways` and `kvalloc.make_cache`.
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
    """A profile's budgets, for every prompt."""

    profile: BudgetProfile

    def ways(self, model: Any, shape: ModelShape, size: PromptSize) -> Sequence[Way]:
        """See `Decision.ways`."""
        return [Way(profile=self.profile, options=self.options)]
