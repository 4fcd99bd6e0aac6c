"""The default for any model, nothing measured: the best way known within a share of the bytes.

At equal bytes it pays to round first and to evict then. So entries are stored at 4 bits (at 8 where
the share is large, at 3 where it is small), as many as fit. The first tokens after the prompt
choose which: the full cache is held until they have come, if it fits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvalloc.accounting.costs import bits_fault, entries_in_share
from kvalloc.errors import InputError, option
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.models.loading import shape_of
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.making import make_cache
from kvalloc.scorers import get_scorer
from kvalloc.shape import ModelShape
from kvalloc.units import parse_bytes, parse_share, size

__all__ = ["Default"]

_LOG = logging.getLogger(__name__)

EIGHT_BITS_FROM, THREE_BITS_BELOW = 0.42, 0.15
"""Shares of the bytes from which on fewer entries at 8 bits lose less than more at 4, and below
which more at 3 do (SmolLM2-135M; the first one Qwen2.5-Coder-0.5B, too)."""

COST = 1.1
"""Processor time of a prompt of 1,000 tokens against a plain prefill, late or early
(SmolLM2-135M, one thread)."""

SINKS, WINDOW, VOTES, AWAITED = 4, 8, 128, 16
"""Tokens: never evicted at the prompt's begin and end; whose queries vote, of the prompt's last
and of those that follow it."""


@dataclass(frozen=True, kw_only=True)
class Default:
    """What is asked of every prompt: a share of the bytes, and the memory while it is read.

    Parameters
    ----------
    share : float
        Of the bytes of a cache at 16 bits a number, whatever the model's type; above 0 and up to 1.
    memory : int or None
        Bytes that the cache may take at its peak; None where the full cache fits.
    """

    share: float
    memory: int | None = None

    @staticmethod
    def is_asked(**given: object) -> bool:
        """Whether a budget is all that is asked, with or without the memory."""
        named = {name for name, value in given.items() if value is not None and value is not False}
        return "budget" in named and named <= {"budget", "memory"}

    @classmethod
    def parse(cls, budget: Any, memory: Any = None, **unset: Any) -> Default:
        """From what the user wrote; all else is left out, see `is_asked`.

        Raises
        ------
        InputError
            If it is no share, or no size.
        """
        return cls(
            share=parse_share(budget), memory=None if memory is None else parse_bytes(memory)
        )

    def cache(
        self, model: Any, tokens: int | None = None, rows: int = 1, **options: Any
    ) -> BudgetCache:
        """A cache for one prompt.

        Parameters
        ----------
        model : transformers.PreTrainedModel
        tokens : int, optional
            Length of the prompt, padding included; None where it is not known, and its full cache
            is taken to fit.
        rows : int
            Of the batch.
        **options
            As for `kvalloc.runtime.make_cache`.

        Raises
        ------
        InputError
            If neither way fits the memory, or the share is below sinks and window.
        KVAllocError
            As `kvalloc.runtime.make_cache`.
        """
        shape = shape_of(model)
        late = tokens is None or self._fits_late(shape, tokens, rows)
        profile = self.profile(shape, tokens, late=late)
        if tokens is not None:
            profile = profile.replace(detail=self._said(profile, tokens, rows))
            _LOG.info(profile.detail)
        return make_cache(profile, model, **options)

    def bits(self, shape: ModelShape) -> int:
        """Width of the entries that are kept."""
        if self.share >= EIGHT_BITS_FROM:
            return 16 if self.share == 1 else 8
        return 4 if self.share >= THREE_BITS_BELOW or bits_fault(3, shape.head_dim) else 3

    def profile(self, shape: ModelShape, tokens: int | None = None, *, late: bool) -> BudgetProfile:
        """Budgets for a model, whatever is known of the prompt.

        Parameters
        ----------
        shape : ModelShape
        tokens : int, optional
            For which the budgets are written down; they hold for all lengths.
        late : bool
            Evict after the first tokens that follow the prompt, instead of while it is read.

        Raises
        ------
        InputError
            If the share is below sinks and window.
        """
        context = tokens or min(shape.max_context_tokens or 4096, 4096)
        table = (shape.n_layers, shape.n_kv_heads)
        width = self.bits(shape)
        bits = np.full(table, width)
        bits[list(shape.sliding_layers)] = 16
        kept = entries_in_share(self.share, context, width, shape, least=SINKS + WINDOW)
        budgets = np.full(table, kept)
        budgets[list(shape.sliding_layers)] = shape.sliding_entries(context)
        late = late and kept < context
        scorer = get_scorer(
            "lookahead",
            tokens=AWAITED if late else 0,
            window=WINDOW,
            votes=VOTES,
            row_reduce="max",
            group_reduce="max",
        )
        return BudgetProfile(
            shape=shape,
            level="head",
            context_tokens=context,
            budgets=budgets,
            share_of_16_bits=self.share,
            bits=None if width == 16 else bits,
            by_prompt=late,
            policy=Policy(
                scorer=scorer.name,
                scorer_parameters=scorer.parameters(),
                sinks=SINKS,
                window=WINDOW,
            ),
            requested={"target": "budget", "value": self.share},
        )

    def _fits_late(self, shape: ModelShape, tokens: int, rows: int) -> bool:
        """Whether late eviction fits the memory; refuses where the other way does not, either."""
        if self.memory is None:
            return True
        needs = {late: self.peak_bytes(shape, tokens, rows, late=late) for late in (True, False)}
        if needs[False] > self.memory:
            in_rows = f" in {rows} rows" if rows > 1 else ""
            raise InputError(
                f"{option('memory')} is {size(self.memory)}, but a prompt of {tokens:,} tokens"
                f"{in_rows} needs {size(needs[True])} where its full cache is held, and "
                f"{size(needs[False])} where it is evicted while it is read (the budget, and one "
                "layer in full); give more, a smaller budget or a shorter prompt"
            )
        return needs[True] <= self.memory

    def peak_bytes(self, shape: ModelShape, tokens: int, rows: int, *, late: bool) -> int:
        """Bytes of K and V, and of queries that are held, while a prompt is read."""
        if late:
            queries = len(shape.full_layers) * shape.n_query_heads * shape.head_dim
            held = queries * (min(VOTES, tokens) + AWAITED) * shape.dtype_bytes
            return shape.full_bytes(tokens, rows) + rows * held
        one_layer = tokens * shape.n_kv_heads * shape.bytes_per_entry * rows
        return self.profile(shape, tokens, late=False).retained_bytes_at(tokens, rows) + one_layer

    def _said(self, profile: BudgetProfile, tokens: int, rows: int) -> str:
        """One line: which way, how much is kept, its peak and its cost."""
        shape, late = profile.shape, profile.by_prompt
        kept = profile.budgets[shape.full_layers[0], 0] / tokens
        stored = profile.retained_bytes_at(tokens, rows)
        reached = profile.of_16_bits(stored, tokens, rows)
        peak = self.peak_bytes(shape, tokens, rows, late=late)
        way = "evicts while the prompt is read"
        if late:
            way = f"holds the full cache until {AWAITED} tokens have followed the prompt"
        elif kept == 1:
            way = "evicts nothing"
        bits = self.bits(shape)
        width = "as they are" if bits == 16 else f"at {bits} bits"
        return (
            f"by default, nothing measured: {way}; {kept:.0%} of the entries {width}, "
            f"{size(stored)}, {reached:.1%} of a cache at 16 bits; about {size(peak)} while it is "
            f"read, and {1.0 if kept == 1 else COST} times a plain prefill"
        )
