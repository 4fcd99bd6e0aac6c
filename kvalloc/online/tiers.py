"""What is kept within a budget where a slow tier holds all entries."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace

from kvalloc.accounting.costs import (
    BIAS_BYTES,
    KEY_BLOCK_TOKENS,
    SCALE_BYTES,
    bits_fault,
    head_bytes,
)
from kvalloc.formats.budget_profile import Policy
from kvalloc.online.ways import Setting, Way
from kvalloc.runtime.tier import page_counts, range_bytes
from kvalloc.shape import ModelShape

__all__ = ["by_score", "tier_width", "with_pages"]

_WIDE, _TOKENS, _PARTS = (8, 5, 4), 1024, 256


def tier_width(share: float, shape: ModelShape) -> int:
    """Return the width of kept entries: the largest at which all fit the share, else 3 bits.

    What counts is read again at 8 bits, so more entries lose less than more bits.
    """
    whole = share * _TOKENS * shape.bytes_per_entry
    fits = (width for width in _WIDE if head_bytes(_TOKENS, width, shape) <= whole)
    return next(fits, 4 if bits_fault(3, shape.head_dim) else 3)


def by_score(policy: Policy) -> Policy:
    """Return a policy that keeps what another one does, and puts nothing else into it."""
    return Policy(
        scorer=policy.scorer,
        scorer_parameters=policy.scorer_parameters,
        sinks=policy.sinks,
        window=policy.window,
    )


def with_pages(way_of: Callable[[Setting, int], Way], setting: Setting, tokens: int) -> Setting:
    """Return the setting at which kept entries and pages of all others take its share of a row.

    Parameters
    ----------
    way_of : callable
        Given a setting and a length: the way.
    setting : Setting
    tokens : int
        Length of the row.
    """
    whole = setting.share * tokens * setting.shape.bytes_per_entry

    def at(part: int) -> Setting:
        return replace(setting, share=setting.share * part / _PARTS)

    def over(part: int) -> bool:
        own = at(part)
        profile = way_of(own, tokens).profile(tokens)
        profile = profile.with_policy(by_score(profile.policy))
        kept = profile.budgets_for(tokens)[list(own.shape.full_layers)]
        pages = page_counts(tokens - kept)
        # what follows may begin a page and a block of keys in each head: room for one of each, but
        # for what the last block has left
        entries, dim = kept + pages + 1, own.shape.head_dim
        begun = 1 - (-(-entries // KEY_BLOCK_TOKENS) - entries / KEY_BLOCK_TOKENS)
        stored = head_bytes(entries, own.bits, own.shape) + BIAS_BYTES * (pages + 1)
        room = begun * dim * 2 * SCALE_BYTES + range_bytes(dim)
        return float((stored + room).mean()) > whole

    if not over(_PARTS):
        return setting
    return at(max(bisect.bisect_left(range(1, _PARTS), True, key=over), 1))
