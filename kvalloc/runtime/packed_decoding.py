"""Attention of one new token over packed entries on the CPU, from the codes as they are stored.

A key is ``code * step + least`` with step and least of its channel in a block of 64 tokens, so a
query's product with it is that of ``query * step`` with the codes, and ``query . least``, which is
one number for the whole block. A value is ``code * step + least`` of its own token: weights times
steps are summed over codes, and ``weights . least`` is added to all channels. So each stored
number is made a float and read by one product, and nothing else is done for it; at 4 bits the low
halves of bytes (even channels) and the high ones (odd channels) stay apart in that. At
most `SCRATCH_NUMBERS` at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvalloc.runtime.packed import PackedHeads
from kvalloc.runtime.ragged import BLOCK_TOKENS
from kvalloc.runtime.ragged_decoding import Partial, joined
from kvalloc.stored_bytes import KEY_BLOCK_TOKENS, VALUE_BLOCK_CHANNELS

__all__ = ["SCRATCH_NUMBERS", "packed_decoding"]

SCRATCH_NUMBERS = 1 << 21
"""Codes of whole blocks that are floats at the same time, one block at the least."""


def packed_decoding(
    queries: Tensor, part: PackedHeads, keys: Tensor, values: Tensor, *, scaling: float
) -> Tensor:
    """Attention of one new token to the entries of heads at 8 or 4 bits, and to what followed.

    Parameters
    ----------
    queries : Tensor, (batch, n_query_heads, 1, head_dim)
        The new token, positions applied, in float32; only heads that ask those of `part`.
    part : PackedHeads
        What is kept.
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
    codes = part.codes
    rows = queries.reshape(codes.lengths.size, -1, head_dim) * scaling
    near = _near(rows, part, keys, values)
    found = near[2] if not codes.n_blocks else joined(codes, _blocks(rows, part), near)
    return found.view(batch, 1, n_query_heads, -1)


def _near(rows: Tensor, part: PackedHeads, keys: Tensor, values: Tensor) -> Partial:
    """The softmax of each segment's rest and followers."""
    n_segments, rests, codes = rows.shape[0], part.padded_rests, part.codes
    keys = keys.reshape(n_segments, keys.shape[2], -1)
    values = values.reshape(n_segments, values.shape[2], -1)
    logits = rows.bmm(keys.transpose(1, 2))
    n_rest = rests.entries.shape[1]
    if not n_rest:
        weights = logits.softmax(dim=-1)
        return logits.amax(dim=-1), weights.amax(dim=-1), weights.bmm(values)
    place = rests.entries.view(-1)
    assert part.key_scales is not None
    scales = part.key_scales.index_select(0, rests.scales.view(-1))
    of_rest = _key_logits(rows, codes.keys.index_select(0, place), scales, part.bits)
    logits = torch.cat([of_rest.add_(rests.logits), logits], dim=-1)
    weights = logits.softmax(dim=-1)
    packed = codes.values.index_select(0, place)
    answer = _value_answers(weights[..., :n_rest], packed, part.bits, values.shape[-1])
    answer = answer.baddbmm_(weights[..., n_rest:], values)
    return logits.amax(dim=-1), weights.amax(dim=-1), answer


def _blocks(rows: Tensor, part: PackedHeads) -> Partial:
    """The softmax of each whole block by itself."""
    codes, value_dim = part.codes, int(part.like[1].shape[-1])
    n_blocks, group = codes.n_blocks, int(rows.shape[1])
    assert part.key_scales is not None
    most, share = rows.new_empty(2, n_blocks, group)
    answers = rows.new_empty(n_blocks, group, value_dim)
    step = max(SCRATCH_NUMBERS // (BLOCK_TOKENS * int(rows.shape[2])), 1)
    asked = rows.index_select(0, codes.block_segments)
    n_scales = BLOCK_TOKENS // KEY_BLOCK_TOKENS
    for first in range(0, n_blocks, step):
        some = slice(first, min(first + step, n_blocks))
        entries = slice(some.start * BLOCK_TOKENS, some.stop * BLOCK_TOKENS)
        scales = part.key_scales[some.start * n_scales : some.stop * n_scales]
        logits = _key_logits(asked[some], codes.keys[entries], scales, part.bits)
        if codes.bias is not None:
            logits += codes.bias[entries].view(-1, 1, BLOCK_TOKENS)
        weights = logits.softmax(dim=-1)
        torch.amax(logits, dim=-1, out=most[some])
        torch.amax(weights, dim=-1, out=share[some])
        answers[some] = _value_answers(weights, codes.values[entries], part.bits, value_dim)
    return most, share, answers


def _key_logits(rows: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Logits of packed keys.

    Parameters
    ----------
    rows : Tensor, (n_units, group, head_dim)
    packed : Tensor of uint8, (n_units * n_columns, key_bytes)
        As many whole blocks of keys for each unit.
    scales : Tensor of float16, (n_units * n_columns / 64, 2, head_dim)

    Returns
    -------
    Tensor, (n_units, group, n_columns)
    """
    n_units, group, head_dim = rows.shape
    wide = scales.float().view(n_units, -1, 2, head_dim)
    n_blocks = n_units * wide.shape[1]
    least = wide[:, :, 1] @ rows.transpose(1, 2)  # (n_units, n_scales, group)
    asked = (rows[:, None] * wide[:, :, :1]).view(n_blocks, group, head_dim)
    logits = least.view(n_blocks, group, 1)
    for own, codes in zip(_halves(asked, bits), _floats(packed, bits), strict=True):
        codes = codes.view(n_blocks, KEY_BLOCK_TOKENS, -1)
        logits = torch.baddbmm(logits, own, codes.transpose(1, 2))
    if n_blocks == n_units:
        return logits
    shaped = logits.view(n_units, -1, group, KEY_BLOCK_TOKENS)
    return shaped.transpose(1, 2).reshape(n_units, group, -1)


def _value_answers(weights: Tensor, packed: Tensor, bits: int, value_dim: int) -> Tensor:
    """Packed values, weighted and summed.

    Parameters
    ----------
    weights : Tensor, (n_units, group, n_columns)
    packed : Tensor of uint8, (n_units * n_columns, value_bytes)

    Returns
    -------
    Tensor, (n_units, group, value_dim)
    """
    n_units, _, n_columns = weights.shape
    n_bytes, width = -(-value_dim * bits // 8), VALUE_BLOCK_CHANNELS * bits // 8
    if n_bytes % 2:  # float16 cannot begin at an odd byte
        halves = packed[:, n_bytes:].clone(memory_format=torch.contiguous_format)
        halves, place = halves.view(torch.float16), 0
    else:
        halves, place = packed.view(torch.float16), n_bytes // 2
    # whole rows with their scales, which is faster than to leave them out
    codes = [own.view(n_units, n_columns, -1) for own in _floats(packed, bits)]
    answers = []
    for first in range(0, n_bytes, width):
        step, least = (
            halves[:, column].float().view(n_units, 1, n_columns) for column in (place, place + 1)
        )
        own, added = weights * step, weights @ least.transpose(1, 2)
        some = slice(first, min(first + width, n_bytes))
        found = [own.bmm(each[:, :, some]) for each in codes]
        answers.append(_together(found).add_(added))
        place += 2
    joined_answers = answers[0] if len(answers) == 1 else torch.cat(answers, dim=-1)
    return joined_answers[..., :value_dim]


def _floats(packed: Tensor, bits: int) -> list[Tensor]:
    """Codes of packed rows as floats; at 4 bits those of low halves, and 16 times the high ones."""
    if bits == 8:
        return [packed.float()]
    return [(packed & 15).float(), (packed & 240).float()]


def _halves(rows: Tensor, bits: int) -> list[Tensor]:
    """What is multiplied with each of `_floats`: all channels, or the even and the odd ones."""
    if bits == 8:
        return [rows]
    rows = torch.nn.functional.pad(rows, (0, 1)) if rows.shape[-1] % 2 else rows
    return [rows[..., 0::2].contiguous(), rows[..., 1::2] / 16]


def _together(found: list[Tensor]) -> Tensor:
    """Channels in order, where `found` was summed over `_floats`; the last one may be too many."""
    if len(found) == 1:
        return found[0]
    return torch.stack([found[0], found[1].div_(16)], dim=-1).flatten(-2)
