"""Plan of evictions: when they are due, and how many entries stay."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import filling_bytes, stored_bytes, within_bytes
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime.policies.base import FEW_ENTRIES, SHORT_TOKENS
from kvalloc.runtime.rows import Row

MIN_INTERVAL, OF_SEEN = 64, 16
"""Fewest tokens after which a conversation is brought back within its budget, a full block of keys,
and the share of the tokens seen from which more are awaited. So evictions take a constant part of
the time."""

RANK_AGAIN = 1.5
"""Growth of the tokens seen after which kept entries are ranked again, if heads share their
budgets. Until then only new entries are ranked, for the places that they brought, and entries with
fitted values keep theirs. SmolLM2-135M at 20%, four speeches in blocks of 64 tokens: 0.0048 nats a
token, and 0.0076 if all are ranked each time. If each head has its own budget, all are ranked each
time (0.0085, and 0.0155 if only new entries are)."""

REFIT = 0.8
"""Share of the decided bytes below which new budgets are decided: fewer entries at fewer bits lose
less than the same bits of still fewer entries."""


def default_interval(seen: int) -> int:
    """Return the default of `interval`."""
    return max(MIN_INTERVAL, seen // OF_SEEN)


def interval(row: Row, memory: int | None, seen: int) -> int:
    """Return the number of tokens between two evictions, the latest at ``seen``.

    They take at most a quarter of ``memory``, in bytes.
    """
    tokens = row.method.options.decode_every or default_interval(seen)
    if memory is None:
        return tokens
    return max(min(tokens, memory // (4 * token_bytes(row.profile))), 1)


def token_bytes(profile: BudgetProfile) -> int:
    """Return a token's bytes in all reduced layers, before rounding."""
    shape = profile.shape
    return len(shape.full_layers) * shape.n_kv_heads * shape.plain_bytes_per_entry


def layers_together(tokens: int, profile: BudgetProfile, memory: int | None) -> int:
    """Return in how many layers a prompt evicts at once; ``tokens`` counts all rows.

    Layers wait only if memory has no bound and heads do not share budgets.
    """
    limited = memory is not None or profile.fits_a_peak
    if limited or profile.by_prompt or tokens > SHORT_TOKENS:
        return 1
    return max(FEW_ENTRIES // max(tokens * profile.shape.n_kv_heads, 1), 1)


def cuts(row: Row, memory: int | None, start: int, end: int) -> Iterator[int]:
    """Yield columns before `end` at which a row evicts again after `start`."""
    while (start := start + interval(row, memory, start)) < end:
        yield start


def prompt_targets(
    rows: Sequence[Row],
    among: Iterable[int],
    tokens: IntArray,
    entries: IntArray,
    padded: IntArray,
    rounded: Container[int],
) -> dict[int, dict[int, IntArray]]:
    """Return counts of kept prompt entries, (n_kv_heads,), by row and layer with too many.

    ``tokens``, (n_rows,), count the whole prompt, ``entries``, (n_rows, n_layers, n_kv_heads), are
    stored now. In ``padded`` rows, whole layers store padding too. ``rounded`` layers always evict.
    """
    targets = {}
    for number in among:
        row, present = rows[number], entries[number]
        profile, budgets = row.profile, row.budgets(int(tokens[number]))
        fits, full = present <= budgets, profile.shape.full_layers
        if profile.by_prompt and not row.holds:  # heads of a layer share its budget
            in_layers = present.sum(axis=1, keepdims=True) <= budgets.sum(axis=1, keepdims=True)
            fits = np.broadcast_to(in_layers, fits.shape)
        goes = [i for i in full if padded[number] or not fits[i].all() or i in rounded]
        if goes and profile.by_prompt and row.holds:  # heads of all layers share their budgets
            goes = [*full]
        counts = np.where(fits, present, budgets)
        targets[number] = {layer: counts[layer] for layer in goes}
    return targets


def grown(row: Row, left: int | None) -> BudgetProfile:
    """Return the profile to go on with."""
    now, later, within = row.profile, row.method.longer_profile, row.method.within
    if left is None:  # the share of a short text holds a little later
        if later is None or later.share_at(row.seen) > (later.target_share or 0):
            return now
        return later
    shape = now.shape
    wider = shape.plain_bytes_per_entry / shape.bytes_per_entry
    share = left * wider / max(token_bytes(now) * row.seen, 1)
    rounds = bool(row.widths)
    if within is None or share > (REFIT * (now.target_share or 0) if rounds else wider):
        return now
    return within(max(min(share, 0.999), 1e-6), row.seen)


def turn_budgets(row: Row, left: int | None) -> IntArray:
    """Return the budgets of all tokens seen, (n_layers, n_kv_heads)."""
    profile = row.profile
    budgets = np.maximum(row.budgets(row.seen), profile.policy.protected_tokens)
    full, shape = list(profile.shape.full_layers), profile.shape
    if left is not None:
        budgets[full] = _within(left, budgets[full], row)
    elif share_bytes := profile.filled_bytes_at(row.seen):
        # of longer rows scales, and sinks and windows of heads that keep little else, take less
        budgets[full] = filling_bytes(
            budgets[full], share_bytes, profile.widths[full], shape, tokens=row.seen
        )
    return budgets


def _within(memory: int, budgets: IntArray, row: Row) -> IntArray:
    profile = row.profile
    shape = profile.shape
    if not row.widths:  # nothing is rounded: entries are as the model makes them
        memory = memory * shape.bytes_per_entry // shape.plain_bytes_per_entry
    if profile.fits_a_peak:
        budgets = np.minimum(budgets * row.seen // max(budgets.min(), 1), row.seen)
    return within_bytes(
        budgets,
        memory,
        profile.widths[list(shape.full_layers)],
        shape,
        minimum=profile.policy.protected_tokens,
    )


def new_alone(row: Row, budgets: IntArray, kept: IntArray, new: IntArray) -> bool:
    """Return whether a row keeps stored entries, and ranks only ``new`` ones.

    True if heads share budgets, some entry was evicted, and the newest tokens fit in number and
    bytes.
    """
    profile, after = row.profile, row.after
    if after.observes or (after.combines and not after.fits_new) or not profile.by_prompt:
        return False
    latest, width = kept + np.minimum(new, profile.policy.window), widest(profile)
    needed, granted = (
        stored_bytes(counts, width, profile.shape).sum() for counts in (latest, budgets)
    )
    fits = latest.sum() <= budgets.sum() and needed <= granted
    fits &= bool((kept + new < row.seen).any())
    return bool(fits) and row.seen < RANK_AGAIN * row.ranked_at


def turn_targets(room: IntArray, entries: IntArray, *, protected: int, shared: bool) -> IntArray:
    """Return how many candidates of a row stay, (n_full_layers, n_kv_heads).

    ``room`` are entries that may stay, ``entries`` all candidates. ``protected`` counts latest
    tokens, and candidate sinks. If ``shared``, heads share their sum.
    """
    few = (entries <= protected).all(axis=1, keepdims=True)
    return np.where(few, entries, room if shared else np.minimum(room, entries))


def widest(profile: BudgetProfile) -> int:
    """Return the width, or mix of widths, of a `by_prompt` profile."""
    return int(profile.widths[list(profile.shape.full_layers)].max())


def evicted(row: Row, *, ranked: bool) -> Row:
    """Return a row after an eviction."""
    return replace(row, evicted_at=row.seen, ranked_at=row.seen if ranked else row.ranked_at)
