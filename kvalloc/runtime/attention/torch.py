"""Attention by torch's operations: right on every device and in every type.

The softmax over a segment (a row's KV head) is put together from those of its parts, each of which
is computed by itself: the whole blocks of all segments in one batched product, rests and following
tokens in another. The values of the parts are weighted by ``softmax(lse)`` over the parts, with
``lse`` a part's logarithm of the sum of exponentials. Of a normalised softmax ``p`` with largest
logit ``m`` it is ``m - log(max p)``. Logits are float32 also where the model is of half precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.kept import BLOCK_TOKENS, RaggedEntries

__all__ = ["Partial", "even_attention", "masked_attention", "merged", "ragged_attention"]

SCRATCH_ELEMENTS = 1 << 23
"""Numbers that the logits of one step may take; one new token is always done at once."""

EVEN_SCRATCH = 1 << 18
"""Numbers of half precision that `even_attention` makes float32 at the same time: so few that they
stay in the processor's cache."""

#: A part's softmax: largest logit and largest weight, (n_parts, n_rows), and the values so
#: weighted, (n_parts, n_rows, head_dim).
Partial: TypeAlias = tuple[Tensor, Tensor, Tensor]


def ragged_attention(call: AttentionCall, entries: RaggedEntries) -> Tensor:
    """Attention of the new tokens over kept entries and all tokens that followed.

    Memory beside the result is bounded by `SCRATCH_ELEMENTS`.

    Parameters
    ----------
    call : AttentionCall
    entries : RaggedEntries
        What is kept of the prompt.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
        Of the queries' type, contiguous.
    """
    batch, n_query_heads, n_new, head_dim = call.queries.shape
    work = torch.promote_types(call.queries.dtype, torch.float32)
    grouped = call.queries.reshape(entries.lengths.size, -1, n_new, head_dim)
    step = 1 if n_new == 1 else _tokens_at_once(call, entries)
    found = []
    for first in range(0, n_new, step):
        part = grouped[:, :, first : first + step]
        rows = part.flatten(1, 2).to(work) * call.scaling
        near = _near(rows, call, entries, first, int(part.shape[2]))
        parts = [*_blocks(rows, entries, call.softcap), near]
        answers = near[2] if len(parts) == 1 else merged(entries, parts)
        found.append(answers.view(batch, n_query_heads, part.shape[2], -1))
    output = found[0] if len(found) == 1 else torch.cat(found, dim=2)
    return output.to(call.queries.dtype).transpose(1, 2).contiguous()


def merged(entries: RaggedEntries, partials: Sequence[Partial]) -> Tensor:
    """One softmax of those of all parts.

    Parameters
    ----------
    entries : RaggedEntries
        Which says whose the blocks are.
    partials : sequence of Partial
        Of the whole blocks, in order, and last of each segment's rest and following tokens.

    Returns
    -------
    Tensor, (n_segments * n_rows, head_dim)
    """
    most, share, answers = (torch.cat(each) for each in zip(*partials, strict=True))
    places, absent = entries.parts(int(most.shape[1]))
    lse = most.sub_(share.log()).view(-1)
    weights = lse.index_select(0, places.view(-1)).view(places.shape)
    weights = weights.masked_fill_(absent, float("-inf")).softmax(dim=-1)
    return torch.nn.functional.embedding_bag(
        places, answers.view(-1, answers.shape[-1]), mode="sum", per_sample_weights=weights
    )


def _tokens_at_once(call: AttentionCall, entries: RaggedEntries) -> int:
    """New tokens whose logits, queries and answers of each block fit the scratch."""
    group = call.queries.shape[1] // call.keys.shape[1]
    near = entries.lengths.size * (call.keys.shape[2] + BLOCK_TOKENS)
    far = entries.n_blocks * (BLOCK_TOKENS + 3 * call.keys.shape[-1])
    return max(SCRATCH_ELEMENTS // (group * (near + far)), 1)


def _near(
    rows: Tensor, call: AttentionCall, entries: RaggedEntries, first: int, count: int
) -> Partial:
    """The softmax over the rests, the tokens that followed and the model's own sink logit.

    ``rows`` are the scaled queries of ``count`` new tokens from ``first`` on, (n_segments,
    group * count, head_dim).
    """
    batch, n_kv_heads, n_following, _ = call.keys.shape
    n_segments, n_rows, _ = rows.shape
    keys, values = (
        states.reshape(n_segments, n_following, -1).to(rows.dtype)
        for states in (call.keys, call.values)
    )
    logits = _capped(rows.bmm(keys.transpose(1, 2)), call.softcap)
    if (hidden := _hidden(call, first, count)) is not None:
        shaped = logits.view(batch, n_kv_heads, -1, count, n_following)
        logits = shaped.masked_fill(hidden, float("-inf")).view(logits.shape)
    parts, rest = [logits], entries.rest_entries
    n_rest = int(rest.shape[1])
    if n_rest:
        parts.insert(0, _logits(rows, _rest(entries.keys, rest), entries.rest_logits, call.softcap))
    if call.sink_logits is not None:
        own = call.sink_logits.to(rows.dtype).view(1, n_kv_heads, -1, 1)
        parts.append(own.expand(batch, -1, -1, count).reshape(n_segments, n_rows, 1))
    logits = torch.cat(parts, dim=-1) if len(parts) > 1 else logits
    most = logits.amax(dim=-1)
    weights = _softmax(logits)
    answers = weights[..., n_rest : n_rest + n_following].bmm(values)
    if n_rest:
        of_rest = _rest(entries.values, rest).to(rows.dtype)
        answers = answers.baddbmm(weights[..., :n_rest], of_rest)
    return most, weights.amax(dim=-1), answers


def _hidden(call: AttentionCall, first: int, count: int) -> Tensor | None:
    """What new tokens do not see of those that followed, (batch or 1, 1, 1, count, n_following)."""
    n_new, n_following, visible = call.queries.shape[2], call.keys.shape[2], call.visible
    if n_new == 1 and visible is None:
        return None
    column = torch.arange(n_following, device=call.keys.device)
    place = column[n_following - n_new + first :][:count, None]
    hidden = (column > place)[None]
    if visible is not None:
        hidden = hidden | (~visible[:, None] & (column != place))
    return hidden[:, None, None]


def _blocks(rows: Tensor, entries: RaggedEntries, softcap: float | None) -> list[Partial]:
    """The softmax of each whole block; as many at a time as fit the scratch in the work type."""
    keys, values = entries.blocks(entries.keys), entries.blocks(entries.values)
    step = max(entries.n_blocks, 1)
    if keys.dtype != rows.dtype:
        step = max(SCRATCH_ELEMENTS // (2 * BLOCK_TOKENS * keys.shape[-1]), 1)
    found = []
    for first in range(0, entries.n_blocks, step):
        some = slice(first, first + step)
        asked = rows.index_select(0, entries.block_segments[some])
        added = None if entries.block_logits is None else entries.block_logits[some]
        logits = _logits(asked, keys[some], added, softcap)
        most = logits.amax(dim=-1)
        weights = _softmax(logits)
        answers = weights.bmm(values[some].to(rows.dtype))
        found.append((most, weights.amax(dim=-1), answers))
    return found


def _logits(rows: Tensor, keys: Tensor, added: Tensor | None, softcap: float | None) -> Tensor:
    """Logits of keys (n, n_keys, head_dim), to which a bias is added after the cap."""
    turned = keys.to(rows.dtype).transpose(1, 2)
    if added is not None and softcap is None:
        return torch.baddbmm(added.to(rows.dtype), rows, turned)
    logits = _capped(rows.bmm(turned), softcap)
    return logits if added is None else logits + added


def _softmax(logits: Tensor) -> Tensor:
    """The weights, in place of the logits where nobody asks for a gradient."""
    return logits.softmax(-1) if logits.requires_grad else torch.softmax(logits, -1, out=logits)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else (logits / softcap).tanh().mul(softcap)


def _rest(states: Tensor, rest: Tensor) -> Tensor:
    """The entries at ``rest``, (n_segments, most); whole rows are copied, so not by indexing."""
    return states.index_select(0, rest.reshape(-1)).view(*rest.shape, -1)


# As many entries in every segment


def even_attention(
    call: AttentionCall, kept: tuple[Tensor, Tensor], bias: Tensor | None = None
) -> Tensor:
    """Attention of one new token to entries of equal number and to the tokens that followed.

    Parameters
    ----------
    call : AttentionCall
        One new token, with no cap, sink logit or padding.
    kept : tuple of Tensor, each (batch, n_kv_heads, n_entries, head_dim)
        Keys and values before those of the call.
    bias : Tensor of float32, (batch, n_kv_heads, n_biased), optional
        Added to the logits of the first kept ones.

    Returns
    -------
    Tensor, (batch, 1, n_query_heads, head_dim)
        Of the queries' type, contiguous.
    """
    batch, n_query_heads, _, head_dim = call.queries.shape
    segments = batch * call.keys.shape[1]
    work = torch.promote_types(call.queries.dtype, torch.float32)
    rows = call.queries.reshape(segments, -1, head_dim).to(work) * call.scaling
    keys, values = (
        [states.reshape(segments, *states.shape[2:]) for states in pair]
        for pair in zip(kept, (call.keys, call.values), strict=True)
    )
    logits = torch.cat([_even_logits(rows, own) for own in keys], dim=-1)
    if bias is not None:
        logits[..., : bias.shape[-1]] += bias.reshape(segments, 1, -1)
    # under autocast products have another type
    weights, n_kept = logits.softmax(dim=-1).to(work), int(values[0].shape[1])
    parts = list(zip((weights[..., :n_kept], weights[..., n_kept:]), values, strict=True))
    if values[0].dtype == work:  # a tenth of the whole faster than adding to zeros
        result = torch.bmm(*parts.pop(0)).to(work)
    else:
        result = rows.new_zeros(segments, rows.shape[1], values[0].shape[-1])
    for share, own in parts:
        for some in _slices(own, work):
            result.baddbmm_(share[..., some], own[:, some].to(work))
    return result.to(call.queries.dtype).view(batch, 1, n_query_heads, -1)


def _even_logits(rows: Tensor, keys: Tensor) -> Tensor:
    """Of rows (n_segments, group, head_dim) in float32 or float64, (n_segments, group, n)."""
    some = _slices(keys, rows.dtype)
    found = [rows.bmm(keys[:, own].to(rows.dtype).transpose(1, 2)) for own in some]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _slices(states: Tensor, work: torch.dtype) -> Iterator[slice]:
    """Which entries of (n_segments, n, head_dim) are read together: all that need no conversion."""
    n = int(states.shape[1])
    step = max(EVEN_SCRATCH // (int(states.shape[0]) * int(states.shape[2])), 1)
    step = max(n, 1) if states.dtype == work else step
    return (slice(first, first + step) for first in range(0, max(n, 1), step))


def masked_attention(states: AttentionStates, mask: Tensor) -> Tensor:
    """Softmax attention with a mask that is added to the logits.

    sdpa and eager take a bias for each head in their mask. Flash attention takes none, and flex
    attention one for all heads, so that there it is computed here.

    Parameters
    ----------
    states : AttentionStates
        Its own mask is not used.
    mask : Tensor, (batch or 1, n_query_heads or 1, n_new_tokens, n_tokens)

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, head_dim)
        Contiguous.
    """
    queries, keys, values = states.queries, states.keys, states.values
    if states.softcap is None and states.sink_logits is None:
        output = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=states.scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous()
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    logits = _capped((queries @ keys.transpose(2, 3)).float() * states.scaling, states.softcap)
    logits = logits + mask.float()
    if states.sink_logits is not None:
        sinks = states.sink_logits.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(dim=-1)[..., : keys.shape[2]].to(values.dtype)
    return (weights @ values).transpose(1, 2).contiguous()
