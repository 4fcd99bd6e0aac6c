"""Which entries a KV head keeps, and how many: sinks, window, and the best of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError

__all__ = ["Room", "best_entries", "handed_out", "keep_best", "row_places", "select_entries"]


def select_entries(scores: Tensor, budget: int, *, sinks: int, window: int) -> Tensor:
    """Positions that each KV head keeps, in position order.

    The first ``sinks`` and the last ``window`` entries always stay, whatever their scores. The
    rest of the budget goes to the highest scores; among equal scores the earlier position wins,
    on every device.

    Parameters
    ----------
    scores : Tensor, (batch, n_kv_heads, n_tokens)
        Importance of each entry, finite, any float type. Columns of sinks and window are not
        read.
    budget : int
        Entries that each KV head keeps, sinks and window included.
    sinks, window : int
        First and last tokens that are never evicted.

    Returns
    -------
    Tensor of int64, (batch, n_kv_heads, budget)
        Strictly increasing along the last axis.

    Raises
    ------
    InputError
        If the budget is below sinks and window or above the number of tokens, or a score is not
        finite.

    Examples
    --------
    >>> scores = torch.tensor([[[0.0, 0.3, 0.9, 0.3, 0.1, 0.0]]])
    >>> select_entries(scores, 4, sinks=1, window=1).tolist()
    [[[0, 1, 2, 5]]]
    """
    batch, n_kv_heads, n_tokens = scores.shape
    if budget < sinks + window or budget > n_tokens:
        raise _does_not_fit(budget, n_tokens, sinks, window)
    budgets = torch.full((batch, n_kv_heads), budget, device=scores.device)
    kept = keep_best(scores, budgets, sinks=sinks, window=window)
    # `nonzero` lists positions row by row in increasing order, and every row has `budget` of them.
    return kept.nonzero()[:, 2].view(batch, n_kv_heads, budget)


def keep_best(
    scores: Tensor, budgets: Tensor, *, sinks: int, window: int, valid: Tensor | None = None
) -> Tensor:
    """Mask of what each KV head keeps: sinks, window, and the best of the rest.

    Parameters
    ----------
    scores : Tensor, (batch, n_kv_heads, n_tokens)
        Importance of each entry, finite where it is evictable, any float type.
    budgets : Tensor of int64, (batch, n_kv_heads)
        Entries that each KV head keeps, sinks and window included.
    sinks, window : int
        First and last tokens of each row that are never evicted; padding does not count.
    valid : Tensor of bool, (batch, n_tokens), optional
        False marks padding, which is never kept; no padding by default.

    Returns
    -------
    Tensor of bool, (batch, n_kv_heads, n_tokens)
        Exactly ``budgets[row, head]`` True. Among equal scores the earlier position wins, on
        every device.

    Raises
    ------
    InputError
        If a budget is below sinks and window or above the row's number of tokens, or a score is
        not finite.
    """
    room = Room.of(scores, budgets, sinks=sinks, window=window, valid=valid)
    return room.always | best_entries(scores, room.counts, among=room.evictable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a policy may decide: all but sinks, window and padding.

    Attributes
    ----------
    always : Tensor of bool, (batch, 1, n_tokens)
        Sinks and window: a row's first and last tokens, padding left out.
    evictable : Tensor of bool, (batch, n_kv_heads, n_tokens)
        What may be kept or not.
    counts : Tensor of int64, (batch, n_kv_heads)
        How many of those each KV head keeps.
    rank : Tensor of int64, (batch, n_tokens)
        Place of each token in its row, padding left out, from 0; -1 for padding.
    n_tokens : Tensor of int64, (batch, 1)
        Tokens of each row without padding.
    """

    always: Tensor
    evictable: Tensor
    counts: Tensor
    rank: Tensor
    n_tokens: Tensor

    @classmethod
    def of(
        cls,
        entries: Tensor,
        budgets: Tensor,
        *,
        sinks: int,
        window: int,
        valid: Tensor | None = None,
    ) -> Room:
        """The room that budgets leave.

        Parameters
        ----------
        entries : Tensor, (batch, n_kv_heads, n_tokens, ...)
            Scores or keys: its sizes and its device count.
        budgets : Tensor of int64, (batch, n_kv_heads)
            Entries that each KV head keeps, sinks and window included.
        sinks, window : int
            First and last tokens of each row that always stay.
        valid : Tensor of bool, (batch, n_tokens), optional
            False marks padding.

        Raises
        ------
        InputError
            If a budget is below sinks and window or above the row's number of tokens.
        """
        batch, n_kv_heads, columns = entries.shape[:3]
        rank, n_tokens = row_places(entries, valid)
        valid, budgets = rank >= 0, budgets.to(entries.device)
        always = valid & ((rank < sinks) | (n_tokens - rank <= window))
        least = always.sum(dim=-1, keepdim=True)
        wrong = (budgets < least) | (budgets > n_tokens)
        if bool(wrong.any()):
            row, head = (int(index) for index in wrong.nonzero()[0])
            raise _does_not_fit(int(budgets[row, head]), int(n_tokens[row, 0]), sinks, window)
        return cls(
            always=always[:, None],
            evictable=(valid & ~always)[:, None].expand(batch, n_kv_heads, columns),
            counts=budgets - least,
            rank=rank,
            n_tokens=n_tokens,
        )


def row_places(entries: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Place of each token in its row.

    Parameters
    ----------
    entries : Tensor, (batch, n_kv_heads, n_tokens, ...)
        Its sizes and its device count.
    valid : Tensor of bool, (batch, n_tokens), optional
        False marks padding.

    Returns
    -------
    rank : Tensor of int64, (batch, n_tokens)
        From 0, padding left out; -1 for padding.
    n_tokens : Tensor of int64, (batch, 1)
        Tokens of each row without padding.
    """
    batch, _, columns = entries.shape[:3]
    if valid is None:
        valid = torch.ones(batch, columns, dtype=torch.bool)
    valid = valid.to(entries.device)
    upto = valid.cumsum(dim=-1)
    return torch.where(valid, upto - 1, -1), upto[:, -1:]


def best_entries(scores: Tensor, counts: Tensor, *, among: Tensor) -> Tensor:
    """Mask of the highest scores along the last axis, ties to the lower index.

    A threshold instead of a sort: `topk` may pick any of several equal scores, but the value of
    the last one is certain. Everything above it is in, and the first of those equal to it.

    Parameters
    ----------
    scores : Tensor, (batch, n_kv_heads, n_tokens)
        Finite where `among` is True.
    counts : Tensor of int64, (batch, n_kv_heads)
        How many to take, at most as many as `among` offers.
    among : Tensor of bool, (batch, n_kv_heads, n_tokens)
        Entries that may be taken.

    Returns
    -------
    Tensor of bool, (batch, n_kv_heads, n_tokens)

    Raises
    ------
    InputError
        If a score that counts is not finite.
    """
    if not bool((torch.isfinite(scores) | ~among).all()):
        raise InputError(
            "the scorer gave a score that is not finite; the model's queries or keys overflow in "
            f"{scores.dtype}: load the model in bfloat16 or float32"
        )
    most = int(counts.max()) if counts.numel() else 0
    if most == 0:
        return torch.zeros_like(among)
    scores = scores.masked_fill(~among, float("-inf"))
    ranked = scores.topk(most, dim=-1).values
    threshold = ranked.gather(-1, (counts - 1).clamp(min=0)[..., None])
    above = (scores > threshold) & (counts > 0)[..., None]
    equal = (scores == threshold) & among
    room = counts[..., None] - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def _does_not_fit(budget: int, tokens: int, sinks: int, window: int) -> InputError:
    return InputError(
        f"a budget of {budget} entries does not fit a prompt of {tokens} tokens with "
        f"{sinks} sinks and a window of {window}; solve again with larger budgets"
    )


def handed_out(scores: Sequence[Tensor], total: int, *, protected: int) -> IntArray:
    """How many entries each head keeps of one prompt.

    Parameters
    ----------
    scores : sequence of Tensor, each (n_kv_heads, n_evictable)
        For each layer, of the entries that can be evicted; comparable across layers and heads.
        Layers may differ in their number, and a head may have -inf at its end: no entry.
    total : int
        Entries that all heads keep together, sinks and window included.
    protected : int
        Sinks and window of each head.

    Returns
    -------
    ndarray of int64, (n_layers, n_kv_heads)
        Sums to `total`, but at least to sinks and window everywhere, and at most to everything.
        Among equal scores the earlier layer wins, and in it the earlier head.
    """
    device = scores[0].device
    n_evictable = max(int(own.shape[-1]) for own in scores)
    joined = torch.stack(
        [
            nn.functional.pad(
                own.to(device, torch.float32), (0, n_evictable - own.shape[-1]), value=-inf
            )
            for own in scores
        ]
    )
    there = int((joined > -inf).sum())
    wanted = min(max(total - protected * (joined.shape[0] * joined.shape[1]), 0), there)
    if n_evictable == 0 or wanted == 0:
        return np.full(tuple(joined.shape[:2]), protected, dtype=np.int64)
    least = joined.reshape(-1).topk(wanted, sorted=False).values.min()
    counts = (joined > least).sum(dim=-1).cpu().numpy().astype(np.int64)
    ties = (joined == least).sum(dim=-1).cpu().numpy().astype(np.int64)
    before = np.cumsum(ties) - ties.ravel()
    room = np.clip(wanted - counts.sum() - before, 0, ties.ravel())
    found: IntArray = counts + room.reshape(counts.shape) + protected
    return found
