"""What follows a prompt, turns and answers: when it competes with what is kept, and for how much.

How many entries stay of what is a function of numbers, see `targets_of`.
"""

from __future__ import annotations

import numpy as np
import torch

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.accounting.costs import filling_bytes, stored_bytes, within_bytes
from kvalloc.accounting.stored import layer_tensors
from kvalloc.runtime.arrival import row_tokens
from kvalloc.runtime.eviction import widest
from kvalloc.runtime.kept import WORK_BYTES
from kvalloc.runtime.layer import BudgetLayer
from kvalloc.runtime.prompt import Prompt
from kvalloc.runtime.schedule import Settlement
from kvalloc.runtime.unfinished import Queries

COMPETE_AGAIN = 1.5
"""Where heads share their budgets, all that is kept competes again when so many times the tokens
have been seen as when it did before; until then what is new competes for the places that it
brought, and what has fitted values keeps its place (SmolLM2-135M at 20%, four speeches in blocks of
64 tokens: 0.0048 nats a token, and 0.0076 if all compete each time). Where each head has its own
budget, all compete each time (0.0085, and 0.0155 if what is new competes alone)."""


def catch_up(prompt: Prompt) -> None:
    """Settle what followed, where enough has followed."""
    every = prompt.schedule.every
    if every and (prompt.n_seen >= _due(prompt, every) or _is_full(prompt, every)):
        settle(prompt)


def room_for_drafts(prompt: Prompt, longest: int) -> int:
    """Return the number of drafts, at least 1, before what followed has to compete."""
    every = prompt.schedule.every
    return max(1, min(longest, _due(prompt, every) - prompt.n_seen)) if every else longest


def cuts(prompt: Prompt, end: int) -> list[int]:
    """Return the columns at which a forward up to `end` is cut, in order.

    Where what is not given may be taken back: behind what is given, and wherever something is
    then evicted, so that each token sees what it would see if it had come alone. Else where
    what followed competes, if the memory does not take the forward whole.
    """
    arrival, seen, given = prompt.arrival, prompt.n_seen, prompt.given
    every, token_bytes = prompt.schedule.every, prompt.token_bytes
    if given is not None:
        columns = {given}
        if every:
            settled = arrival.settled if arrival.complete else given
            if given - settled >= every.interval(settled, token_bytes):
                settled = given
            columns.update(every.columns(settled, end, token_bytes))
        return sorted(one for one in columns if max(seen + 1, given) <= one < end)
    if every is None or every.memory is None or not arrival.complete:
        return []
    if end - seen <= prompt.free_tokens(every.memory):
        return []
    return [one for one in every.columns(arrival.settled, end, token_bytes) if one > seen]


@torch.no_grad()
def settle(prompt: Prompt) -> None:
    """Go back to the budgets of all tokens seen: what followed competes with what is kept."""
    every, arrival, policy = prompt.schedule.every, prompt.arrival, prompt.profile.policy
    if every is None or not arrival.complete:
        return
    noted = all(layer.unfinished.latest.pieces for layer in prompt.budget_layers)
    if prompt.n_seen == arrival.settled or not noted:
        return
    tokens = row_tokens(arrival.visible)
    idle = row_tokens(arrival.visible[:, arrival.settled :]) == 0
    left = None if every.memory is None else every.memory - _following_bytes(prompt, every)
    grown = not idle.any() and prompt.grown(int(tokens.min()), left)
    budgets = np.maximum(arrival.budgets(tokens), policy.protected_tokens)
    if left is not None:
        budgets = _within(left, budgets, tokens, prompt)
    else:
        budgets = _filled(budgets, tokens, prompt)
    full, shared = list(prompt.profile.shape.full_layers), prompt.profile.by_prompt
    dense = [layer.dense_tokens for layer in prompt.budget_layers]
    shown = [arrival.visible[:, prompt.n_seen - own :] for own in dense]
    new = np.stack([row_tokens(own) for own in shown], axis=1)[:, :, None]
    kept, room = prompt.stored_counts()[:, full] - np.array(dense)[:, None], budgets[:, full]
    # entries of other budgets have other widths
    alone = idle if grown else _new_alone(prompt, room, kept, new, tokens, idle)
    rest = alone[:, None, None]
    there, room = np.where(rest, new, kept + new), room - np.where(rest, kept, 0)
    least = np.where(rest, policy.window, policy.protected_tokens)
    targets = targets_of(room, there, idle, least=least, shared=shared)
    eviction = prompt.eviction(
        prompt.plan.after,
        prompt_tokens=prompt.n_seen,
        settles=True,
        idle=frozenset(np.flatnonzero(idle).tolist()),
        stays=alone,
    )
    anew = {
        index: targets[:, i]
        for i, index in enumerate(full)
        if shared
        or index in prompt.plan.bits
        or index in prompt.bits
        or grown
        or (targets[:, i] < there[:, i]).any()
        or not shown[i].all()
    }
    with prompt.half_way():
        prompt.evict_layers(eviction, anew)
    for layer in prompt.budget_layers:
        layer.unfinished.latest = Queries()
    arrival.settled = prompt.n_seen
    arrival.competed = np.where(alone, arrival.competed, tokens)


def targets_of(
    room: IntArray, there: IntArray, idle: BoolArray, *, least: IntArray, shared: bool
) -> IntArray:
    """Return how many of what competes stay, (batch, n_layers, n_kv_heads), row by row.

    Parameters
    ----------
    room, there : ndarray of int64, (batch, n_layers, n_kv_heads)
        Entries that may stay, and all that compete.
    idle : ndarray of bool, (batch,)
        Rows of which nothing has come since the latest eviction.
    least : ndarray of int64, (batch, 1, 1)
        Entries that stay in any case: latest tokens, and sinks where these compete.
    shared : bool
        Whether the heads of all layers share their room: each row's sum over both counts.
    """
    few = (there <= least).all(axis=2, keepdims=True) | idle[:, None, None]
    return np.where(few, there, room if shared else np.minimum(room, there))


def _new_alone(
    prompt: Prompt,
    budgets: IntArray,
    kept: IntArray,
    new: IntArray,
    tokens: IntArray,
    idle: BoolArray,
) -> BoolArray:
    """Return the rows in which what was kept stays, and only what is new competes, (batch,).

    Rows of which nothing has come; and where heads share their budgets, those of which something
    has gone, and behind which the newest tokens fit: as entries, and as bytes, scales included.

    Parameters
    ----------
    prompt : Prompt
    budgets, kept : ndarray of int64, (batch, n_layers, n_kv_heads)
    new : ndarray of int64, (batch, n_layers, 1)
        Tokens since the latest eviction, padding left out.
    tokens : ndarray of int64, (batch,)
        All tokens seen.
    idle : ndarray of bool, (batch,)
    """
    profile, who = prompt.profile, prompt.plan.after
    if who.observes or who.combines:
        return np.zeros_like(idle)
    if not profile.by_prompt:
        return idle
    latest, width = kept + np.minimum(new, profile.policy.window), widest(profile)
    needed, granted = (stored_bytes(own, width, profile.shape) for own in (latest, budgets))
    fits = np.asarray(latest.sum(axis=(1, 2)) <= budgets.sum(axis=(1, 2)))
    fits &= needed.sum(axis=(1, 2)) <= granted.sum(axis=(1, 2))
    fits &= (kept + new < tokens[:, None, None]).any(axis=(1, 2))
    return idle | (fits & (tokens < COMPETE_AGAIN * prompt.arrival.competed))


def _filled(budgets: IntArray, tokens: IntArray, prompt: Prompt) -> IntArray:
    """Return budgets that take as large a share of the bytes as at the length they are of.

    In longer rows scales, and sinks and windows of heads that keep little else, take less of it,
    which is left for entries.

    Parameters
    ----------
    budgets : ndarray of int64, (batch, n_layers, n_kv_heads)
    tokens : ndarray of int64, (batch,)
    prompt : Prompt
        Whose budgets these are.
    """
    result, full = budgets.copy(), list(prompt.profile.shape.full_layers)
    for row, (n_tokens, profile) in enumerate(zip(tokens, prompt.row_profiles, strict=True)):
        if most := profile.filled_bytes_at(int(n_tokens)):
            bits, shape = profile.widths[full], profile.shape
            own = filling_bytes(budgets[row, full], most, bits, shape, tokens=int(n_tokens))
            result[row, full] = own
    return result


def _within(memory: int, budgets: IntArray, tokens: IntArray, prompt: Prompt) -> IntArray:
    """Return budgets whose entries take at most so many bytes.

    Where the memory is all that is asked, they take as much of it as rows of so many tokens can,
    in the proportions that were decided.

    Parameters
    ----------
    memory : int
    budgets : ndarray of int64, (batch, n_layers, n_kv_heads)
    tokens : ndarray of int64, (batch,)
    prompt : Prompt
        Whose budgets these are.
    """
    result, profile = budgets.copy(), prompt.profile
    full, shape = list(profile.shape.full_layers), profile.shape
    bits = profile.widths[full]
    if not prompt.bits:  # nothing is rounded: entries are as the model makes them
        memory = memory * shape.bytes_per_entry // shape.plain_bytes_per_entry
    for row, own in enumerate(budgets[:, full]):
        if profile.fits_a_peak:
            own = np.minimum(own * tokens[row] // max(own.min(), 1), tokens[row])
        result[row, full] = within_bytes(
            own,
            memory // len(budgets),
            bits,
            shape,
            least=profile.policy.protected_tokens,
        )
    return result


def _is_full(prompt: Prompt, every: Settlement) -> bool:
    """Return whether the memory has no room for one more token."""
    if every.memory is None or not prompt.arrival.complete:
        return False
    layer = prompt.budget_layers[0]
    has_room = layer.tail is not None and layer.tail.tokens < int(layer.tail.buffers[0].shape[2])
    return not has_room and prompt.free_tokens(every.memory) < 1


def _due(prompt: Prompt, every: Settlement) -> int:
    """Return the column at which what followed competes."""
    settled = prompt.arrival.settled
    return settled + every.interval(settled, prompt.token_bytes)


def _following_bytes(prompt: Prompt, every: Settlement) -> int:
    """Return what is taken beside entries: by sliding layers, what follows, and lists of tiles."""
    slid = (layer for layer in prompt.layers if not isinstance(layer, BudgetLayer))
    tokens = every.interval(prompt.n_seen, prompt.token_bytes)
    taken: int = sum(own.nbytes for layer in slid for own in layer_tensors(layer))
    if prompt.budget_layers[0].keys.is_cuda:  # where a kernel reads by lists
        taken += WORK_BYTES * max(prompt.batch, 1) * prompt.profile.budgets.size
    return taken + tokens * prompt.token_bytes
