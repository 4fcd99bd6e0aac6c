"""Attention of tokens that follow a stored prompt, many variants of what is hidden at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates


def attend_over_stored(
    states: AttentionStates,
    keys: Tensor,
    values: Tensor,
    keep: Tensor | None,
    *,
    window: int | None,
) -> Tensor:
    """Attention of new tokens over what is stored and over each other.

    The variants are folded into the rows of one product with the stored keys, which are therefore
    never copied.

    Parameters
    ----------
    states : AttentionStates
        Of the new tokens, (n_variants, n_heads, n_new, head_dim).
    keys, values : Tensor, (n_kv_heads, n_stored, head_dim)
        Shared by all variants.
    keep : Tensor of bool, (n_variants, n_kv_heads, n_stored), or None
        What each variant sees of them; all by default. Of float: the logarithm of how much of each
        entry is kept.
    window : int or None
        Tokens that a sliding layer sees; None for full attention.

    Returns
    -------
    Tensor, (n_variants, n_new, n_query_heads, head_dim)
    """
    variants, _, n_new, head_dim = states.queries.shape
    n_kv_heads, stored = keys.shape[:2]
    queries = states.queries.reshape(variants, n_kv_heads, -1, n_new, head_dim)
    rows = queries.transpose(0, 1).reshape(n_kv_heads, -1, head_dim)
    before = (rows @ keys.transpose(1, 2)).float() * states.scaling
    before = before.view(n_kv_heads, variants, -1, n_new, stored)
    among = (queries @ states.keys[:, :, None].transpose(-1, -2)).float() * states.scaling
    visible = _visible(n_new, stored, window, before.device)
    if states.softcap is not None:
        before = states.softcap * torch.tanh(before / states.softcap)
        among = states.softcap * torch.tanh(among / states.softcap)
    before.masked_fill_(~visible[:, :stored], float("-inf"))
    among.masked_fill_(~visible[:, stored:], float("-inf"))
    if keep is not None:
        kept = keep.transpose(0, 1)[:, :, None, None]
        if kept.dtype == torch.bool:
            before.masked_fill_(~kept, float("-inf"))
        else:  # logarithms of how much is kept of each entry
            before = before + kept
    logits = [before.transpose(0, 1), among]
    if states.sink_logits is not None:
        extra = states.sink_logits.float().view(1, n_kv_heads, -1, 1, 1)
        logits.append(extra.expand(*among.shape[:-1], 1))
    weights = torch.cat(logits, dim=-1).softmax(dim=-1).to(values.dtype)
    seen = weights[..., :stored].transpose(0, 1).reshape(n_kv_heads, -1, stored) @ values
    output = seen.view(n_kv_heads, variants, -1, n_new, head_dim).transpose(0, 1)
    output = output + weights[..., stored : stored + n_new] @ states.values[:, :, None]
    return output.reshape(variants, -1, n_new, head_dim).transpose(1, 2).contiguous()


def _visible(n_new: int, stored: int, window: int | None, device: torch.device) -> Tensor:
    """Which of stored and new tokens each new token sees, ``(n_new, stored + n_new)``."""
    place = torch.arange(stored + n_new, device=device)
    distance = place[stored:, None] - place
    visible: Tensor = distance >= 0
    return visible if window is None else visible & (distance < window)
