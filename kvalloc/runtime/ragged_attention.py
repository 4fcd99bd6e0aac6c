"""Attention over entries of different number for each row and KV head, and the tokens after them.

All kept entries of a segment lie before all new tokens, so every new token sees each of them and
only the tokens that followed need a causal mask. Blocks of all segments are read in one batched
product; rests and following tokens in another; the softmax is put together from partial ones:
with ``m`` the largest logit and ``l = sum exp(logit - m)`` of each part, ``l`` and the weighted
values of the parts are added after multiplication by ``exp(m - max m)``. Logits are float32 also
where the model is of half precision. Where there is a kernel for it, it does all of that in one
pass (`kvalloc.runtime.kernels`); without one, a decoded token on the CPU takes a shorter way
(`kvalloc.runtime.ragged_decoding`). Memory beside the result is bounded by `SCRATCH_ELEMENTS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvalloc.runtime.kernels import kernel_for
from kvalloc.runtime.ragged import BLOCK_TOKENS, RaggedEntries
from kvalloc.runtime.ragged_decoding import decoding_attention

__all__ = ["SCRATCH_ELEMENTS", "ragged_attention"]

SCRATCH_ELEMENTS = 1 << 23
"""Numbers that the logits of one step may take; one new token is always done at once."""


@dataclass(slots=True)
class _Softmax:
    """A softmax over the parts read so far.

    Attributes
    ----------
    most : Tensor, (n_segments, n_rows)
        Largest logit; finite, since every token sees itself.
    total : Tensor, (n_segments, n_rows)
        Sum of ``exp(logit - most)``.
    summed : Tensor, (n_segments, n_rows, head_dim)
        Values weighted by the same.
    """

    most: Tensor
    total: Tensor
    summed: Tensor


def ragged_attention(
    queries: Tensor,
    entries: RaggedEntries,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of the new tokens over kept entries and all tokens that followed.

    Parameters
    ----------
    queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
        The new tokens, positions applied.
    entries : RaggedEntries
        What is kept of the prompt.
    keys, values : Tensor, (batch, n_kv_heads, n_following, head_dim)
        The tokens that followed, the new ones last.
    scaling : float
        Factor on the logits.
    visible : Tensor of bool, (batch, n_following), optional
        False hides padding among the tokens that followed; a token always sees itself, so that
        no row is empty.
    softcap : float, optional
        Logits are ``softcap * tanh(logits / softcap)``.
    sink_logits : Tensor, (n_query_heads,), optional
        One more logit a query head, without a value.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
        Of the queries' type, contiguous.
    """
    kernel = kernel_for(queries, keys, values, entries.keys, entries.values)
    if kernel is not None:
        return kernel(
            queries,
            entries,
            keys,
            values,
            scaling=scaling,
            visible=visible,
            softcap=softcap,
            sink_logits=sink_logits,
        )
    batch, n_query_heads, n_new, head_dim = queries.shape
    exact = queries.dtype == entries.keys.dtype and queries.dtype in (torch.float32, torch.float64)
    plain = visible is None and softcap is None and sink_logits is None
    if n_new == 1 and queries.device.type == "cpu" and exact and plain:
        return decoding_attention(queries, entries, keys, values, scaling=scaling)
    n_kv_heads = keys.shape[1]
    group = n_query_heads // n_kv_heads
    grouped = queries.reshape(batch * n_kv_heads, group, n_new, head_dim)
    work = torch.float64 if queries.dtype == torch.float64 else torch.float32
    output = queries.new_empty(batch * n_kv_heads, group, n_new, values.shape[-1])
    step = _tokens_at_once(entries, keys, group)
    for first in range(0, n_new, step):
        part = grouped[:, :, first : first + step]
        rows = part.to(work).mul(scaling).flatten(1, 2)
        hidden = _hidden(n_new, first, part.shape[2], keys.shape[2], visible, keys.device)
        softmax = _near(rows, entries, keys, values, hidden, softcap, sink_logits)
        _add_blocks(softmax, rows, entries, softcap)
        result = softmax.summed / softmax.total.unsqueeze(-1)
        output[:, :, first : first + step] = result.view(*part.shape[:3], -1)
    shaped = output.view(batch, n_query_heads, n_new, -1)
    return shaped.transpose(1, 2).contiguous()


def _tokens_at_once(entries: RaggedEntries, keys: Tensor, group: int) -> int:
    """New tokens whose logits, and whose queries repeated for each block, fit the scratch."""
    near = entries.lengths.size * (keys.shape[2] + BLOCK_TOKENS)
    far = entries.n_blocks * (BLOCK_TOKENS + 2 * keys.shape[-1])
    return max(SCRATCH_ELEMENTS // (group * (near + far)), 1)


def _hidden(
    n_new: int,
    first: int,
    count: int,
    n_following: int,
    visible: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """What new tokens do not see of those that followed, (batch or 1, 1, 1, count, n_following)."""
    if n_new == 1 and visible is None:
        return None
    place = torch.arange(count, device=device) + (n_following - n_new + first)
    column = torch.arange(n_following, device=device)
    hidden = column > place[:, None]
    if visible is None:
        return hidden[None, None, None]
    padding = ~visible[:, None, :] & (column != place[:, None])
    return (hidden | padding)[:, None, None]


def _near(
    rows: Tensor,
    entries: RaggedEntries,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> _Softmax:
    """The softmax over the rests, the tokens that followed and the model's own sink logit."""
    batch, n_kv_heads, n_following, _ = keys.shape
    n_segments, n_rows, _ = rows.shape
    following = keys.to(rows.dtype).reshape(n_segments, n_following, -1)
    logits = _capped(rows @ following.transpose(1, 2), softcap)
    if hidden is not None:
        count = hidden.shape[3]
        shaped = logits.view(batch, n_kv_heads, -1, count, n_following)
        logits = shaped.masked_fill(hidden, float("-inf")).view(logits.shape)
    parts, rest = [logits], entries.rest_entries
    if rest.shape[1]:
        rest_keys = _rest(entries.keys, rest).to(rows.dtype)
        found = _capped(rows @ rest_keys.transpose(1, 2), softcap)
        if entries.bias is not None:
            found = found + entries.bias[rest][:, None]
        parts.append(found.masked_fill(entries.beyond_rest[:, None], float("-inf")))
    if sink_logits is not None:
        own = sink_logits.to(rows.dtype).view(1, n_kv_heads, -1, 1)
        own = own.expand(batch, -1, -1, n_rows // own.shape[2])
        parts.append(own.reshape(n_segments, n_rows, 1))
    joined = torch.cat(parts, dim=-1) if len(parts) > 1 else logits
    most = joined.amax(dim=-1)
    weights = (joined - most.unsqueeze(-1)).exp_()
    of_following = values.to(rows.dtype).reshape(n_segments, n_following, -1)
    summed = weights[..., :n_following] @ of_following
    if rest.shape[1]:
        of_rest = weights[..., n_following : n_following + rest.shape[1]]
        summed += of_rest @ _rest(entries.values, rest).to(rows.dtype)
    return _Softmax(most, weights.sum(dim=-1), summed)


def _rest(states: Tensor, rest: Tensor) -> Tensor:
    """The entries at ``rest``, (n_segments, most); whole rows are copied, so not by indexing."""
    return states.index_select(0, rest.reshape(-1)).view(*rest.shape, -1)


def _add_blocks(
    softmax: _Softmax, rows: Tensor, entries: RaggedEntries, softcap: float | None
) -> None:
    """Add the whole blocks, as many at a time as fit the scratch as numbers of the work type."""
    n_blocks = entries.n_blocks
    if not n_blocks:
        return
    keys, values = entries.blocks(entries.keys), entries.blocks(entries.values)
    step = n_blocks
    if keys.dtype != rows.dtype:
        step = max(SCRATCH_ELEMENTS // (2 * BLOCK_TOKENS * keys.shape[-1]), 1)
    for first in range(0, n_blocks, step):
        some = slice(first, first + step)
        owner = entries.block_segments[some]
        logits = rows.index_select(0, owner) @ keys[some].to(rows.dtype).transpose(1, 2)
        logits = _capped(logits, softcap)
        if entries.bias is not None:
            logits = logits + entries.blocks(entries.bias)[some][:, None]
        most = logits.amax(dim=-1)
        weights = logits.sub_(most.unsqueeze(-1)).exp_()
        summed = weights @ values[some].to(rows.dtype)
        _merge(softmax, owner, most, weights.sum(dim=-1), summed)


def _merge(softmax: _Softmax, owner: Tensor, most: Tensor, total: Tensor, summed: Tensor) -> None:
    """Add partial softmaxes, (n_parts, n_rows, ...), to those of the segments they belong to."""
    index = owner.unsqueeze(-1).expand_as(most)
    highest = softmax.most.scatter_reduce(0, index, most, "amax")
    factor = (softmax.most - highest).exp_()
    softmax.total *= factor
    softmax.summed *= factor.unsqueeze(-1)
    factor = (most - highest.index_select(0, owner)).exp_()
    softmax.total.index_add_(0, owner, total * factor)
    softmax.summed.index_add_(0, owner, summed.mul_(factor.unsqueeze(-1)))
    softmax.most = highest


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else (logits / softcap).tanh_().mul_(softcap)
