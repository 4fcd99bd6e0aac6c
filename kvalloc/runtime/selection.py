"""Which entries a KV head keeps: sinks, window, and the best of the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from kvalloc.errors import InputError

__all__ = ["select_entries"]


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
    chosen = budget - sinks - window
    if chosen < 0 or budget > n_tokens:
        raise InputError(
            f"a budget of {budget} entries does not fit a prompt of {n_tokens} tokens with "
            f"{sinks} sinks and a window of {window}; solve again with larger budgets"
        )
    keep = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    keep[..., sinks : n_tokens - window] = _best(scores[..., sinks : n_tokens - window], chosen)
    # `nonzero` lists positions row by row in increasing order, and every row has `budget` of them.
    return keep.nonzero()[:, 2].view(batch, n_kv_heads, budget)


def _best(scores: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` highest scores along the last axis, ties to the lower index.

    A threshold instead of a sort: `topk` may pick any of several equal scores, but the value of
    the last one is certain. Everything above it is in, and the first of those equal to it.
    """
    if not bool(torch.isfinite(scores).all()):
        raise InputError(
            "the scorer gave a score that is not finite; the model's queries or keys overflow in "
            f"{scores.dtype}: load the model in bfloat16 or float32"
        )
    if count == 0:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    threshold = scores.topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above = scores > threshold
    equal = scores == threshold
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))
