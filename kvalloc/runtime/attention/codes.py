"""Attention of one new token over packed entries on the CPU, from the codes as they are stored.

A key is ``code * step + least`` with step and least of its channel in a block of 64 tokens, so a
query's product with it is that of ``query * step`` with the codes, and ``query . least``, which is
one number for the whole block. A value is ``code * step + least`` of its own token: weights times
steps are summed over codes, and ``weights . least`` is added to all channels. So each stored
number is made a float and read by one product, and nothing else is done for it; at 4 bits the low
halves of bytes (even channels) and the high ones (odd channels) stay apart in that. Some blocks at
a time, so few that their floats stay in the processor's cache.

A segment's rest, filled up to a whole block, is read as its blocks are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, VALUE_BLOCK_CHANNELS
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.attention.torch import merged
from kvalloc.runtime.kept import BLOCK_TOKENS
from kvalloc.runtime.packed import PackedHeads

__all__ = ["codes_attention"]

SCRATCH_NUMBERS = 1 << 19
"""Codes that are floats at the same time, those of one block at the least."""


def codes_attention(call: AttentionCall, part: PackedHeads) -> Tensor:
    """Attention of one new token to the entries of heads at 8 or 4 bits, and to what followed.

    Parameters
    ----------
    call : AttentionCall
        One new token, with no cap, sink logit or padding; only heads that ask those of `part`.
    part : PackedHeads
        What is kept.

    Returns
    -------
    Tensor, (batch, 1, n_query_heads, head_dim)
        Of the queries' type, contiguous.
    """
    queries = call.queries
    batch, n_query_heads, _, head_dim = queries.shape
    codes, n_blocks = part.codes, part.codes.n_blocks
    n_segments = codes.lengths.size
    rows = queries.reshape(n_segments, -1, head_dim).float() * call.scaling
    keys, values = (
        states.reshape(n_segments, states.shape[2], -1).float()
        for states in (call.keys, call.values)
    )
    near = rows.bmm(keys.transpose(1, 2))
    if not codes.keys.shape[0]:
        answer = near.softmax(dim=-1).bmm(values)
        return answer.to(queries.dtype).view(batch, 1, n_query_heads, -1)
    logits = _key_logits(rows, part)
    near = torch.cat([logits[n_blocks:].add_(part.padded_rests.logits), near], dim=-1)
    far = logits[:n_blocks]
    if codes.bias is not None:
        far += codes.blocks(codes.bias)[:, None]
    far_weights, near_weights = far.softmax(dim=-1), near.softmax(dim=-1)
    weights = torch.cat([far_weights, near_weights[..., :BLOCK_TOKENS]])
    answers = _value_answers(weights, part)
    answer = answers[n_blocks:].baddbmm_(near_weights[..., BLOCK_TOKENS:], values)
    if n_blocks:
        blocks = (far.amax(dim=-1), far_weights.amax(dim=-1), answers[:n_blocks])
        answer = merged(codes, [blocks, (near.amax(dim=-1), near_weights.amax(dim=-1), answer)])
    return answer.to(queries.dtype).view(batch, 1, n_query_heads, -1)


def _key_logits(rows: Tensor, part: PackedHeads) -> Tensor:
    """Logits of all units of `_units`, (n_units, group, 128); rows are segments' queries."""
    group, head_dim = rows.shape[1:]
    rests, n_scales = part.padded_rests, BLOCK_TOKENS // KEY_BLOCK_TOKENS
    assert part.key_scales is not None
    whole = part.key_scales[: part.codes.n_blocks * n_scales]
    scales = torch.cat([whole, part.key_scales.index_select(0, rests.scales.view(-1))]).float()
    scales = scales.view(-1, n_scales, 2, head_dim)
    own = rows.index_select(0, rests.owners)
    asked = (own[:, None] * scales[:, :, :1]).view(-1, group, head_dim)
    least = (scales[:, :, 1] @ own.transpose(1, 2)).view(-1, group, 1)
    halves = _halves(asked, part.bits)
    logits = rows.new_empty(len(asked), group, KEY_BLOCK_TOKENS)
    for units, floats in _units(part.codes.keys, part):
        some = slice(units.start * n_scales, units.stop * n_scales)
        base = least[some]
        for half, codes in zip(halves, floats, strict=True):
            turned = codes.view(len(base), KEY_BLOCK_TOKENS, -1).transpose(1, 2)
            base = torch.baddbmm(base, half[some], turned, out=logits[some])
    shaped = logits.view(-1, n_scales, group, KEY_BLOCK_TOKENS)
    return shaped.transpose(1, 2).reshape(-1, group, BLOCK_TOKENS)


def _value_answers(weights: Tensor, part: PackedHeads) -> Tensor:
    """Values of all units of `_units`, weighted and summed, (n_units, group, head_dim).

    Parameters
    ----------
    weights : Tensor, (n_units, group, 128)
    """
    n_units, group, _ = weights.shape
    value_dim, bits = int(part.like[1].shape[-1]), part.bits
    n_bytes, width = -(-value_dim * bits // 8), VALUE_BLOCK_CHANNELS * bits // 8
    steps, leasts = _value_scales(part, n_bytes)
    asking = [weights * step for step in steps]
    columns = [slice(first, min(first + width, n_bytes)) for first in range(0, n_bytes, width)]
    found = [
        [weights.new_empty(n_units, group, own.stop - own.start) for _ in range(8 // bits)]
        for own in columns
    ]
    for units, floats in _units(part.codes.values, part):
        for asked, own, targets in zip(asking, columns, found, strict=True):
            for codes, target in zip(floats, targets, strict=True):
                some = codes.view(units.stop - units.start, BLOCK_TOKENS, -1)[..., own]
                torch.bmm(asked[units], some, out=target[units])
    answers = [
        _together(own).add_(weights @ least.unsqueeze(-1))
        for own, least in zip(found, leasts, strict=True)
    ]
    answer = answers[0] if len(answers) == 1 else torch.cat(answers, dim=-1)
    return answer[..., :value_dim].contiguous()


def _value_scales(part: PackedHeads, n_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of each block of channels: steps (n_units, 1, 128) and minima (n_units, 128) of tokens."""
    rests, rows = part.padded_rests, part.codes.values
    if n_bytes % 2:  # float16 cannot begin at an odd byte
        rows, n_bytes = rows[:, n_bytes:].clone(memory_format=torch.contiguous_format), 0
    halves = rows.view(torch.float16)
    whole, place = part.codes.n_blocks * BLOCK_TOKENS, n_bytes // 2
    n_columns = int(halves.shape[1]) - place
    wide = halves.new_empty(n_columns, whole + rests.entries.numel(), dtype=torch.float32)
    for number, column in enumerate(halves[:, place:].unbind(1)):
        wide[number, :whole] = column[:whole]
        wide[number, whole:] = column.index_select(0, rests.entries.view(-1))
    shaped = wide.view(n_columns, -1, BLOCK_TOKENS)
    return list(shaped[0::2].unsqueeze(2)), list(shaped[1::2])


def _units(states: Tensor, part: PackedHeads) -> Iterator[tuple[slice, list[Tensor]]]:
    """Codes of all whole blocks and then of each segment's rest as floats, some units at a time.

    At 4 bits the codes of low halves, and 16 times those of high ones. What was given is
    overwritten by the next.

    Parameters
    ----------
    states : Tensor of uint8, (n_entries, n_bytes)
        Packed keys or values; scales behind values are made floats like codes, which is faster
        than to leave them out.
    """
    n_blocks, rests = part.codes.n_blocks, part.padded_rests.entries
    n_bytes = int(states.shape[1])
    step = max(SCRATCH_NUMBERS * part.bits // (8 * n_bytes * BLOCK_TOKENS), 1)
    most = min(step, max(n_blocks, len(rests))) * BLOCK_TOKENS
    masks = [15, 240] if part.bits == 4 else [255]
    floats = [states.new_empty(most, n_bytes, dtype=torch.float32) for _ in masks]
    masked = states.new_empty(most if part.bits == 4 else 0, n_bytes)
    ends = [(first, min(first + step, n_blocks), True) for first in range(0, n_blocks, step)]
    n_rests = len(rests)
    ends += [(first, min(first + step, n_rests), False) for first in range(0, n_rests, step)]
    for first, end, whole in ends:
        if whole:
            packed, base = states[first * BLOCK_TOKENS : end * BLOCK_TOKENS], 0
        else:
            packed, base = states.index_select(0, rests[first:end].view(-1)), n_blocks
        count = len(packed)
        for mask, target in zip(masks, floats, strict=True):
            if mask < 255:
                target[:count] = torch.bitwise_and(packed, mask, out=masked[:count])
            else:
                target[:count] = packed
        yield slice(base + first, base + end), [target[:count] for target in floats]


def _halves(rows: Tensor, bits: int) -> list[Tensor]:
    """What is multiplied with each of a unit's floats: all channels, or the even and odd ones."""
    if bits == 8:
        return [rows]
    rows = torch.nn.functional.pad(rows, (0, 1)) if rows.shape[-1] % 2 else rows
    return [rows[..., 0::2].contiguous(), rows[..., 1::2] / 16]


def _together(found: list[Tensor]) -> Tensor:
    """Channels in order, where `found` was summed over a unit's floats; one too many if odd."""
    if len(found) == 1:
        return found[0]
    return torch.stack([found[0], found[1].div_(16)], dim=-1).flatten(-2)
