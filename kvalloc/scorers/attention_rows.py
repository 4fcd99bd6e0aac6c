"""Attention rows, logits and protected columns of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.attention import AttentionStates
from kvalloc.models.rope import known_rotation, rotate

if TYPE_CHECKING:
    from torch import Tensor

_KEY_BLOCK_TOKENS = 256
_BLOCK_ELEMENTS, _LEAST_ROWS = 1 << 18, 16
_WINDOW_ELEMENTS = 1 << 24

_MOVED, _REUSED, _ROWS = "moved", "reused", "rows"
"""Keys in `AttentionStates.shared`: the result of `states_behind`, rows of it to store for
`known_rows`, and these rows."""


def window_attention(states: AttentionStates, window: int) -> Tensor:
    """Return weights of the last `window` rows, or all if fewer; see `attention_rows`."""
    n_new = states.queries.shape[2]
    return attention_rows(states, max(n_new - window, 0), n_new)


def window_votes(
    states: AttentionStates, window: int, reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the window's reduced weights, float32, (batch, n_kv_heads, group, n_tokens).

    Parameters
    ----------
    reduce : callable
        From ``(batch, n_kv_heads, group, rows, n_tokens)``, each head separately.
    """
    import torch

    batch, n_kv_heads, n_tokens, _ = states.keys.shape
    size = batch * states.queries.shape[1] * min(window, states.queries.shape[2]) * n_tokens
    if size <= _WINDOW_ELEMENTS:
        return reduce(window_attention(states, window))
    heads = (states.kv_head(one) for one in range(n_kv_heads))
    return torch.cat([reduce(window_attention(one, window)) for one in heads], dim=1)


def window_maxima(states: AttentionStates, window: int) -> Tensor:
    """Return entries' largest window weights, float32, (batch, n_kv_heads, group, n_tokens)."""
    import torch

    batch, n_kv_heads, n_tokens, _ = states.keys.shape
    n_heads, n_new = states.queries.shape[1:3]
    maxima = states.keys.new_zeros(
        batch, n_kv_heads, n_heads // n_kv_heads, n_tokens, dtype=torch.float32
    )
    for first, end in row_blocks(max(n_new - window, 0), n_new, maxima.numel(), _BLOCK_ELEMENTS):
        largest = attention_rows(states, first, end).amax(dim=3)
        seen = maxima[..., : largest.shape[-1]]
        torch.maximum(seen, largest, out=seen)
    return maxima


def row_blocks(begin: int, end: int, row: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of blocks of rows.

    Parameters
    ----------
    row, limit : int
        Elements of a row, and of a block, which has at least 16 rows.
    """
    step = max(limit // max(row, 1), _LEAST_ROWS)
    return ((first, min(first + step, end)) for first in range(begin, end, step))


def attention_rows(states: AttentionStates, first: int, end: int) -> Tensor:
    """Return weights of new tokens, float32, (batch, n_kv_heads, group, end - first, n_seen).

    Rows count from the states' first query. Query head ``h`` is at ``[:, h // group, h % group]``.
    Tokens after the first ``n_seen`` are invisible to all rows. Rows of padding are 0.
    """
    import torch

    rows, later_rows = end - first, states.queries.shape[2] - end
    n_tokens = states.keys.shape[2]
    n_seen = n_tokens if states.gaps or states.displaced else n_tokens - later_rows
    logits = attention_logits(states, states.keys[:, :, :n_seen], first, end)
    if states.absent is not None:
        absent = states.absent[:, :, None, None, :n_seen]
        logits.masked_fill_(absent, torch.finfo(torch.float32).min)
    mask = _row_mask(states, first, end)
    if mask is None:
        if not states.displaced:
            # only the rows' own square needs the causal mask: it is the end of every row
            later = torch.ones(rows, rows, dtype=torch.bool, device=logits.device).triu_(1)
            logits[..., -rows:].masked_fill_(later, float("-inf"))
        weights = attention_softmax(logits, states.sink_logits)
        if _REUSED in states.shared:
            n_rows, step = states.shared[_REUSED]
            begin = max(first, end + later_rows - n_rows)
            begin += (end + later_rows - 1 - begin) % step - first  # the last is among them
            known = logits[..., begin::step, :], weights[..., begin::step, :]
            states.shared.setdefault(_ROWS, []).append((known[1].clone(), row_divisors(*known)))
        return weights
    mask = mask[..., :n_seen]
    if mask.dtype != torch.bool:
        logits += mask.float()
    mask = _is_visible(mask)
    # a row of padding sees nothing: finite here and 0 afterwards, never NaN
    logits.masked_fill_(~mask, torch.finfo(torch.float32).min)
    return attention_softmax(logits, states.sink_logits).masked_fill_(~mask, 0.0)


def queries_behind(
    states: AttentionStates, places: Tensor, ahead: int | Tensor, *, user: str, instead: str
) -> Tensor:
    """Return moved queries, float32, (batch, n_query_heads, n_rows, head_dim).

    Parameters
    ----------
    places : Tensor of int64, (n_rows,)
        Indices among the states' queries.
    ahead : int, or Tensor of int64, (n_rows,)
        Positions after the newest token.

    Raises
    ------
    UnsupportedModelError
        See `known_rotation`, also for `user` and `instead`.
    """
    rotation = known_rotation(states.rotation, user=user, instead=instead)
    queries = states.queries
    places = places.to(queries.device)
    distances = queries.shape[2] - 1 - places + ahead
    return rotate(queries[:, :, places].float(), distances, rotation)


def states_behind(
    states: AttentionStates, rows: int, ahead: int, *, user: str, instead: str
) -> AttentionStates:
    """Return states with the last `rows` queries, or all if fewer, after the newest token.

    Each query sees it; a mask hides only padding. See `queries_behind`.
    """
    import torch

    n_new = states.queries.shape[2]
    first = max(n_new - rows, 0)
    queries = queries_behind(
        states, torch.arange(first, n_new, device="cpu"), ahead, user=user, instead=instead
    )
    mask = _row_mask(states, first, n_new)
    if mask is not None:
        mask = _is_visible(mask)[:, :1, 0].any(dim=-1, keepdim=True)
        mask = mask & ~protected_columns(states, sinks=0)[:, :, None]
    moved = states.shared[_MOVED, ahead] = replace(
        states, queries=queries, mask=mask, displaced=True
    )
    if _REUSED in states.shared:
        moved.shared[_REUSED] = states.shared[_REUSED]
    return moved


def want_rows(states: AttentionStates, rows: int, step: int) -> None:
    """Let `attention_rows` store each `step`-th of the last `rows` rows, and the last.

    They are the result's of `states_behind`, for `known_rows`.
    """
    states.shared[_REUSED] = rows, step


def known_rows(states: AttentionStates, ahead: int) -> tuple[Tensor, Tensor] | None:
    """Return weights of `want_rows` and their `row_divisors`; None if some lack.

    Weights are float32, (batch, n_kv_heads, group, n_rows, n_tokens).
    """
    import torch

    moved: AttentionStates | None = states.shared.get((_MOVED, ahead))
    if moved is None or _ROWS not in moved.shared:
        return None
    if moved.queries.shape[2] < min(moved.shared[_REUSED][0], states.queries.shape[2]):
        return None
    weights, divisors = (torch.cat(one, dim=3) for one in zip(*moved.shared[_ROWS], strict=True))
    return weights, divisors


def row_divisors(logits: Tensor, weights: Tensor) -> Tensor:
    """Return logs of the rows' softmax divisors, (..., 1), from largest logit and weight."""
    return logits.amax(dim=-1, keepdim=True) - weights.amax(dim=-1, keepdim=True).log_()


def attention_logits(states: AttentionStates, keys: Tensor, first: int, end: int) -> Tensor:
    """Return logits before any mask, float32, (batch, n_kv_heads, group, end - first, n_keys).

    Parameters
    ----------
    keys : Tensor, (batch, n_kv_heads, n_keys, head_dim)
    first, end : int
        See `attention_rows`.
    """
    batch, n_kv_heads, n_keys, head_dim = keys.shape
    queries = states.queries[:, :, first:end].float() * states.scaling
    queries = queries.reshape(batch, n_kv_heads, -1, head_dim)  # keys are never repeated
    logits = _dot_keys(queries, keys).view(batch, n_kv_heads, -1, end - first, n_keys)
    if states.softcap is not None:
        logits = (logits / states.softcap).tanh_().mul_(states.softcap)
    return logits


def attention_softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Return the softmax over the tokens, with any sink logits.

    Parameters
    ----------
    logits : Tensor of float32, (batch, n_kv_heads, group, n_rows, n_tokens)
    sink_logits : Tensor, (n_query_heads,), or None
    """
    import torch

    if sink_logits is None:
        return torch.softmax(logits, dim=-1)
    sinks = sink_logits.float().view(1, *logits.shape[1:3], 1, 1)
    largest = torch.maximum(logits.amax(dim=-1, keepdim=True), sinks)
    weights = (logits - largest).exp_()
    return weights.div_(weights.sum(dim=-1, keepdim=True) + (sinks - largest).exp())


def protected_columns(states: AttentionStates, *, sinks: int) -> Tensor:
    """Return a mask of padding and the first `sinks` visible tokens, (batch or 1, 1, n_tokens)."""
    import torch

    n_tokens = states.keys.shape[2]
    columns = torch.arange(n_tokens, device=states.keys.device)
    n_new = states.queries.shape[2]
    mask = _row_mask(states, n_new - 1, n_new)
    if mask is None:
        return (columns < sinks).view(1, 1, n_tokens)
    visible = _is_visible(mask)[:, 0, 0]  # (batch, 1, n_tokens): padding is the same for all heads
    return (visible.cumsum(dim=-1) <= sinks) | ~visible


def _dot_keys(queries: Tensor, keys: Tensor) -> Tensor:
    """Return logits without a float32 copy of all half-precision keys."""
    import torch

    if keys.dtype == torch.float32:
        return queries @ keys.transpose(2, 3)
    logits = queries.new_empty(*queries.shape[:3], keys.shape[2])
    for start in range(0, keys.shape[2], _KEY_BLOCK_TOKENS):
        block = keys[:, :, start : start + _KEY_BLOCK_TOKENS].float()
        logits[..., start : start + block.shape[2]] = queries @ block.transpose(2, 3)
    return logits


def _is_visible(mask: Tensor) -> Tensor:
    import torch

    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _row_mask(states: AttentionStates, first: int, end: int) -> Tensor | None:
    """Return mask rows, (batch or 1, n_kv_heads or 1, group or 1, end - first, n_tokens).

    None is plain causal attention.
    """
    import torch

    stated: Any = states.mask
    n_tokens = states.keys.shape[2]
    if stated is None:
        return None
    if not isinstance(stated, torch.Tensor):
        return _block_rows(stated, states, first, end)
    mask: Tensor = stated
    rows, n_new = end - first, states.queries.shape[2]
    if mask.dim() == 2:  # flash attention gets the padding alone, 1 for a real token
        causal = torch.ones(rows, n_tokens, dtype=torch.bool, device=mask.device)
        causal = causal.tril_(n_tokens - n_new + first)
        return causal & mask[:, None, None, None, :n_tokens].bool()
    if mask.shape[2] > 1:  # one row stands for all
        mask = mask[:, :, first - n_new + mask.shape[2] : end - n_new + mask.shape[2]]
    mask = mask[..., :n_tokens]
    if mask.shape[1] == 1:
        return mask[:, :, None]
    return mask.reshape(mask.shape[0], states.keys.shape[1], -1, mask.shape[2], n_tokens)


def _block_rows(mask: Any, states: AttentionStates, first: int, end: int) -> Tensor:
    """Return the rows of flex attention's `BlockMask`."""
    import torch

    rule = getattr(mask, "mask_mod", None)
    if rule is None:
        raise UnsupportedModelError(
            f"the scorers cannot read an attention mask of type {type(mask).__name__}; load the "
            "model with attention 'sdpa' or 'eager'"
        )
    device = states.queries.device
    row = torch.arange(states.queries.shape[0], device=device).view(-1, 1, 1, 1)
    query = torch.arange(first, end, device=device).view(1, 1, -1, 1)
    key = torch.arange(states.keys.shape[2], device=device).view(1, 1, 1, -1)
    # transformers' masks are the same for all heads
    seen: Tensor = rule(row, torch.zeros_like(row), query, key)
    return seen.expand(seen.shape[0], 1, end - first, key.numel())[:, :, None]
