"""When entries go, and how many stay: functions of numbers, without a tensor."""

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
"""Tokens after which a conversation is brought back within its budget: a full block of keys, and
where more of this share of the tokens seen, so that to do so takes the same part of the time."""

RANK_AGAIN = 1.5
"""Where heads share their budgets, kept entries are ranked again when the tokens seen have grown
by this factor. Until then new entries are ranked alone, for the places that they
brought, and entries with fitted values keep theirs (SmolLM2-135M at 20%, four speeches in blocks of
64 tokens: 0.0048 nats a token, and 0.0076 if all are ranked each time). Where each head has its own
budget, all are ranked each time (0.0085, and 0.0155 if new entries are ranked alone)."""

REFIT = 0.8
"""Where the memory leaves so much less than the share that the budgets were decided for, others are
decided: fewer entries at fewer bits lose less than the same bits of still fewer entries."""


def default_interval(seen: int) -> int:
    """Return the default number of tokens between an eviction and the next one."""
    return max(MIN_INTERVAL, seen // OF_SEEN)


def interval(row: Row, memory: int | None, seen: int) -> int:
    """Return the number of tokens between an eviction and the next one.

    Parameters
    ----------
    row : Row
    memory : int or None
        Bytes that the row may take: all that follow take at most a quarter.
    seen : int
        Tokens seen at the latest eviction.
    """
    tokens = row.method.options.decode_every or default_interval(seen)
    if memory is None:
        return tokens
    return max(min(tokens, memory // (4 * token_bytes(row.profile))), 1)


def token_bytes(profile: BudgetProfile) -> int:
    """Return the bytes of a token in all layers that are reduced, as the model makes it."""
    shape = profile.shape
    return len(shape.full_layers) * shape.n_kv_heads * shape.plain_bytes_per_entry


def layers_together(tokens: int, profile: BudgetProfile, memory: int | None) -> int:
    """Return in how many layers a prompt of these tokens, of all rows, evicts at once.

    Evictions of few entries take the time of their calls. Where memory is bounded at its peak, no
    layer waits for another, nor where the heads of a layer share its budget.
    """
    limited = memory is not None or profile.fits_a_peak
    if limited or profile.by_prompt or tokens > SHORT_TOKENS:
        return 1
    return max(FEW_ENTRIES // max(tokens * profile.shape.n_kv_heads, 1), 1)


def cuts(row: Row, memory: int | None, start: int, end: int) -> Iterator[int]:
    """Yield the columns before `end` at which a row evicts again after `start`."""
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
    """Return how many entries each layer of some rows keeps of a prompt, where any has to go.

    Parameters
    ----------
    rows : sequence of Row
    among : iterable of int
        Which rows.
    tokens : ndarray of int64, (n_rows,)
        Of the whole prompt.
    entries : ndarray of int64, (n_rows, n_layers, n_kv_heads)
        Entries that there are.
    padded : ndarray of bool, (n_rows,)
        Whether a layer that stores every column stores more than these.
    rounded : container of int
        Layers that are rounded now.

    Returns
    -------
    dict of int to dict of int to ndarray of int64, (n_kv_heads,)
        By row and layer.
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
    """Return the profile by which a conversation goes on.

    Parameters
    ----------
    row : Row
    left : int or None
        Bytes that the memory leaves for its entries; None without one.
    """
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
    """Return what may stay of all tokens that a row has seen, (n_layers, n_kv_heads).

    Parameters
    ----------
    row : Row
    left : int or None
        Bytes that the memory leaves for its entries; None without one.
    """
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
    """Return budgets of full layers within ``memory`` bytes.

    If the memory alone is requested, they take as much of it as the row's tokens can,
    in the proportions that were decided.
    """
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
    """Return whether a row keeps its stored entries, and only new ones are ranked.

    Where heads share their budgets, something has gone, and the newest tokens fit behind: as
    entries, and as bytes, scales included.

    Parameters
    ----------
    row : Row
    budgets, kept : ndarray of int64, (n_full_layers, n_kv_heads)
    new : ndarray of int64, (n_full_layers, 1)
        Tokens since the latest eviction.
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

    Parameters
    ----------
    room, entries : ndarray of int64, (n_full_layers, n_kv_heads)
        Entries that may stay, and all candidates.
    protected : int
        Entries that stay in any case: latest tokens, and sinks if they are candidates.
    shared : bool
        Whether the heads of all layers share their room: the sum over both counts.
    """
    few = (entries <= protected).all(axis=1, keepdims=True)
    return np.where(few, entries, room if shared else np.minimum(room, entries))


def widest(profile: BudgetProfile) -> int:
    """Return the width, or the mix of widths, of all heads of a profile that is `by_prompt`."""
    return int(profile.widths[list(profile.shape.full_layers)].max())


def evicted(row: Row, *, ranked: bool) -> Row:
    """Return a row after an eviction of all that has come of it."""
    return replace(row, evicted_at=row.seen, ranked_at=row.seen if ranked else row.ranked_at)
