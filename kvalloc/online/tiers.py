"""What is kept within a budget where a slow tier holds all entries."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import bits_fault, head_bytes, paged_bytes
from kvalloc.formats.budget_profile import Policy
from kvalloc.online.ways import Rows, Setting, Way
from kvalloc.shape import ModelShape

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
        kept = _kept(way_of(own, tokens), tokens)
        return float(paged_bytes(kept, tokens, own.bits, own.shape).mean()) > whole

    if not over(_PARTS):
        return setting
    return at(max(bisect.bisect_left(range(1, _PARTS), True, key=over), 1))


def peak_bytes(way: Way, read: Rows) -> int:
    """Return the bytes that rows take while they are read, pages and ranges included."""
    bits, shape = 16 if read.chunked else way.setting.bits, way.setting.shape
    kept = _kept(way, read.tokens)
    beside = paged_bytes(kept, read.tokens, bits, shape) - head_bytes(kept, bits, shape)
    return way.peak_bytes(read) + read.n_rows * int(beside.sum())


def _kept(way: Way, tokens: int) -> IntArray:
    """Return how many entries each head of the full layers keeps of a row."""
    profile = way.profile(tokens)
    profile = profile.with_policy(by_score(profile.policy))
    return profile.budgets_for(tokens)[list(way.setting.shape.full_layers)]
