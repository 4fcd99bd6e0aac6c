"""Attention of one new token over ragged entries on the CPU, in as few operations as it takes.

At each decoded token and layer the time of an operation's call counts as much as its work. So the
blocks of all segments go through one product, one softmax and one product, each block by itself;
rests and following tokens through another; and what the softmaxes of a segment's parts say is
weighted by ``softmax(lse)`` over the parts, with ``lse`` a part's logarithm of the sum of
exponentials. Of a normalised softmax ``p`` with largest logit ``m`` it is ``m - log(max p)``.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from kvalloc.runtime.ragged import RaggedEntries

__all__ = ["Partial", "decoding_attention", "joined"]

#: A part's softmax: largest logit and largest weight, (n_parts, group), and the values so
#: weighted, (n_parts, group, head_dim).
Partial: TypeAlias = tuple[Tensor, Tensor, Tensor]


def decoding_attention(
    queries: Tensor, entries: RaggedEntries, keys: Tensor, values: Tensor, *, scaling: float
) -> Tensor:
    """`ragged_attention` of one new token in float32 or float64, without cap or padding.

    Parameters
    ----------
    queries : Tensor, (batch, n_query_heads, 1, head_dim)
        The new token, positions applied.
    entries : RaggedEntries
        What is kept of the prompt.
    keys, values : Tensor, (batch, n_kv_heads, n_following, head_dim)
        The tokens that followed, the new one last.
    scaling : float
        Factor on the logits.

    Returns
    -------
    Tensor, (batch, 1, n_query_heads, head_dim)
        Contiguous.
    """
    batch, n_query_heads, _, head_dim = queries.shape
    n_segments = entries.lengths.size
    group = n_query_heads * batch // n_segments
    rows = queries.reshape(n_segments, group, head_dim) * scaling
    near = _near(rows, entries, keys, values)
    if not entries.n_blocks:
        return near[2].view(batch, 1, n_query_heads, -1)
    block_keys, block_values = entries.blocks(entries.keys), entries.blocks(entries.values)
    asked = rows.index_select(0, entries.block_segments)
    logits = asked.bmm(block_keys.transpose(1, 2))
    if entries.block_logits is not None:
        logits += entries.block_logits
    weights = logits.softmax(dim=-1)
    blocks = (logits.amax(dim=-1), weights.amax(dim=-1), weights.bmm(block_values))
    return joined(entries, blocks, near).view(batch, 1, n_query_heads, -1)


def joined(entries: RaggedEntries, blocks: Partial, near: Partial) -> Tensor:
    """One softmax of those of all blocks and of all that is near.

    Parameters
    ----------
    entries : RaggedEntries
        Which tells whose the blocks are.
    blocks : Partial
        Of each whole block.
    near : Partial
        Of each segment's rest and the tokens that followed.

    Returns
    -------
    Tensor, (n_segments * group, head_dim)
    """
    most, share, answers = (torch.cat(pair) for pair in zip(blocks, near, strict=True))
    parts, absent = entries.parts(int(most.shape[1]))
    lse = most.sub_(share.log_()).view(-1)
    weights = lse.index_select(0, parts.view(-1)).view(parts.shape)
    weights = weights.masked_fill_(absent, float("-inf")).softmax(dim=-1)
    return torch.nn.functional.embedding_bag(
        parts, answers.view(-1, answers.shape[-1]), mode="sum", per_sample_weights=weights
    )


def _near(rows: Tensor, entries: RaggedEntries, keys: Tensor, values: Tensor) -> Partial:
    """The softmax of each segment's rest and followers."""
    n_segments = rows.shape[0]
    keys = keys.reshape(n_segments, keys.shape[2], -1)
    values = values.reshape(n_segments, values.shape[2], -1)
    logits = rows.bmm(keys.transpose(1, 2))
    rest = entries.rest_entries
    n_rest = rest.shape[1]
    if n_rest:
        rest_keys = entries.keys.index_select(0, rest.view(-1)).view(n_segments, n_rest, -1)
        of_rest = torch.baddbmm(entries.rest_logits, rows, rest_keys.transpose(1, 2))
        logits = torch.cat([of_rest, logits], dim=-1)
    weights = logits.softmax(dim=-1)
    answer = weights[..., n_rest:].bmm(values)
    if n_rest:
        rest_values = entries.values.index_select(0, rest.view(-1)).view(n_segments, n_rest, -1)
        answer = answer.baddbmm(weights[..., :n_rest], rest_values)
    return logits.amax(dim=-1), weights.amax(dim=-1), answer
