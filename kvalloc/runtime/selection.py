"""Selection of the entries that a KV head keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError
from kvalloc.runtime.checks import ensure


def keep_best(
    scores: Tensor,
    budgets: Tensor,
    *,
    sinks: int,
    window: int,
    absent: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the mask of kept entries by KV head: sinks, window, and the best others.

    Parameters
    ----------
    scores : Tensor, (batch, n_kv_heads, n_tokens)
        Finite if the entry is evictable.
    budgets : Tensor of int64, (batch, n_kv_heads)
        Entries to keep, sinks and window included; best on the host.
    sinks, window : int
        Each row's first and last tokens, never evicted.
    absent, counts : Tensor, optional
        See `AttentionStates`.

    Returns
    -------
    Tensor of bool, (batch, n_kv_heads, n_tokens)
        Exactly ``budgets[row, head]`` True. Ties go to the earlier position, on every device.

    Raises
    ------
    InputError
        If a budget does not fit, or a score is not finite.

    Examples
    --------
    >>> scores = torch.tensor([[[0.0, 0.3, 0.9, 0.3, 0.1, 0.0]]])
    >>> keep_best(scores, torch.tensor([[4]]), sinks=1, window=1).int().tolist()
    [[[1, 1, 1, 0, 0, 1]]]
    """
    counts_free = free_counts(scores, budgets, sinks=sinks, window=window, counts=counts)
    free = evictable(scores, sinks=sinks, window=window, absent=absent, counts=counts)
    best = ~free | best_entries(scores, counts_free, among=free)
    return best if absent is None else best & ~absent


def chosen_widths(
    scores: Tensor, kept: Tensor, counts: Mapping[int, IntArray], free: Tensor
) -> Tensor:
    """Return the width of each kept entry, int16, as ``scores``; evicted ones have 0.

    Widths in ``counts``, (batch, n_kv_heads), decrease. Protected entries, kept but not ``free``,
    have the widest, then the best, earlier first.
    """
    ranked = scores.masked_fill(~free, inf).masked_fill_(~kept, -inf)
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(scores.shape[-1], device=scores.device)
    widths = torch.zeros_like(order, dtype=torch.int16)
    for width, count in reversed([*_ends(counts)]):
        ends = torch.from_numpy(count).to(scores.device)[..., None]
        widths.masked_fill_(place < ends, width)
    return torch.zeros_like(widths).scatter_(-1, order, widths)


def _ends(counts: Mapping[int, IntArray]) -> Iterator[tuple[int, IntArray]]:
    total: Any = 0
    for width, count in counts.items():
        total = total + count
        yield width, total


def evictable(
    entries: Tensor,
    *,
    sinks: int,
    window: int,
    absent: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the mask of entries that a policy may evict, (batch, n_kv_heads, n_tokens).

    ``entries`` may have one axis more; for other tensors see `AttentionStates`.
    """
    if absent is not None and counts is not None:
        place = (~absent).cumsum(dim=-1) - 1  # of each entry in its head
        ends = counts.to(entries.device)[..., None] - window
        return (place >= sinks) & (place < ends) & ~absent
    place = torch.arange(entries.shape[2], device=entries.device)
    return ((place >= sinks) & (place < entries.shape[2] - window)).expand(entries.shape[:3])


def free_counts(
    entries: Tensor, budgets: Tensor, *, sinks: int, window: int, counts: Tensor | None = None
) -> Tensor:
    """Return how many `evictable` entries each KV head keeps, (batch, n_kv_heads).

    Raises
    ------
    InputError
        If a budget is below sinks and window or above the tokens.
    """
    n_tokens = torch.full_like(budgets, entries.shape[2]) if counts is None else counts
    protected = n_tokens.clamp(max=sinks + window)
    wrong = (budgets < protected) | (budgets > n_tokens)
    if bool(wrong.any()):
        raise InputError(
            f"a budget of {int(budgets[wrong][0])} entries does not fit a prompt of "
            f"{int(n_tokens[wrong][0])} tokens with {sinks} sinks and a window of {window}; solve "
            "again with larger budgets"
        )
    return budgets - protected


def kept_places(kept: Tensor, counts: Tensor) -> Tensor:
    """Return places of kept entries in their heads, row by row and head by head.

    Their ``counts`` are on the host: nothing waits.
    """
    return kept.nonzero_static(size=int(counts.sum()), fill_value=0)[:, 2]


def gathered(states: Tensor, indices: Tensor) -> Tensor:
    """Return a contiguous copy of the entries at ``indices``, (batch, n_kv_heads, n_wanted)."""
    entries, index = flat_entries(states, *_segments(indices), indices)
    return entries.index_select(0, index.flatten()).view(*indices.shape, -1)


def put_at(states: Tensor, indices: Tensor, entries: Tensor) -> None:
    """Put entries at the indices of `gathered`, into contiguous states."""
    flat, index = flat_entries(states, *_segments(indices), indices)
    flat.index_copy_(0, index.flatten(), entries.flatten(0, 2))


def _segments(indices: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads = (torch.arange(size, device=indices.device) for size in indices.shape[:2])
    return rows[:, None, None], heads[:, None]


def flat_entries(
    states: Tensor, rows: Tensor, heads: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a view of all entries in storage order, (n, dim), and places of selected ones.

    ``states``, (batch, n_kv_heads, n_tokens, dim), are copied only if vectors do not stand at
    multiples of their size. Indices broadcast.
    """
    dim = int(states.shape[-1])
    if states.stride(-1) != 1 or any(step % dim for step in states.stride()[:3]):
        states = states.contiguous()
    steps = [step // dim for step in states.stride()[:3]]
    last = sum((size - 1) * step for size, step in zip(states.shape[:3], steps, strict=True))
    index = rows * steps[0] + heads * steps[1] + tokens * steps[2]
    return states.as_strided((last + 1, dim), (dim, 1)), index


def best_entries(scores: Tensor, counts: Tensor, *, among: Tensor) -> Tensor:
    """Return the mask of the highest scores ``among`` some, (batch, n_kv_heads, n_tokens).

    Ties go to the lower index: `topk` may pick any, so only its threshold counts. ``counts``, best
    on the host, are within `among`.

    Raises
    ------
    InputError
        If a score in `among` is not finite.
    """
    dtype = scores.dtype

    def fail() -> None:
        raise InputError(
            "the scorer gave a score that is not finite; the model's queries or keys overflow in "
            f"{dtype}: load the model in bfloat16 or float32"
        )

    ensure((torch.isfinite(scores) | ~among).all(), fail)
    largest = int(counts.max()) if counts.numel() else 0
    if largest == 0:
        return torch.zeros_like(among)
    counts = counts.to(scores.device)
    scores = scores.masked_fill(~among, float("-inf"))
    ranked = scores.topk(largest, dim=-1).values
    threshold = ranked.gather(-1, (counts - 1).clamp(min=0)[..., None])
    above = (scores > threshold) & (counts > 0)[..., None]
    equal = (scores == threshold) & among
    room = counts[..., None] - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def handed_out(scores: Sequence[Tensor], total: int, *, protected: int) -> IntArray:
    """Return how many entries each head keeps of one prompt, (n_layers, n_kv_heads).

    They sum to `total`, each between ``protected`` sinks and window and all entries. Ties go to the
    earlier layer, in it to the earlier head.

    Parameters
    ----------
    scores : sequence of Tensor, each (n_kv_heads, n_evictable)
        Comparable across layers and heads. A shorter head ends in -inf.
    total : int
        Entries of all heads, sinks and window included.
    """
    device = scores[0].device
    layers = [layer.to(device, torch.float32).mT for layer in scores]
    joined = pad_sequence(layers, batch_first=True, padding_value=-inf).mT
    free = max(total - protected * (joined.shape[0] * joined.shape[1]), 0)
    n_free = min(free, joined.numel())
    if n_free == 0:
        return np.full(tuple(joined.shape[:2]), protected, dtype=np.int64)
    threshold = joined.reshape(-1).topk(n_free, sorted=False).values.min()
    masks = torch.stack([joined > threshold, (joined == threshold) & (joined > -inf)])
    counts, ties = masks.sum(dim=-1).cpu().numpy()  # all that is read of the device
    before = np.cumsum(ties) - ties.ravel()
    room = np.clip(n_free - counts.sum() - before, 0, ties.ravel())
    result: IntArray = counts + room.reshape(counts.shape) + protected
    return result
