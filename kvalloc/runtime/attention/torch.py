"""Attention by torch's operations, on every device and in every type, with gradients.

Logits and unpacked entries are at least float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, turns
from kvalloc.models.attention import without_autocast
from kvalloc.runtime.attention.call import AttentionCall, Backend
from kvalloc.runtime.kept import Kept, Part, Run, index_of
from kvalloc.runtime.quantization import key_numbers, rotated, value_numbers

SCRATCH_NUMBERS = 1 << 18
"""Numbers that the logits of one step, or its converted entries, may take. One segment's entries,
and one new token's logits, are never split."""


class TorchBackend(Backend):
    """Serves every call."""

    name = "torch"

    def attend(self, call: AttentionCall, kept: Kept) -> Tensor:
        """Return the attention output; `SCRATCH_NUMBERS` bounds its scratch."""
        n_new, key_dim = call.queries.shape[2:]
        n_segments, value_dim = kept.rows * kept.heads, int(call.values.shape[-1])
        output = call.queries.new_empty(*call.queries.shape[:3], value_dim)
        answers = output.view(n_segments, -1, n_new, value_dim)
        queries = call.queries.reshape(n_segments, -1, n_new, key_dim)
        following = call.keys.flatten(0, 1), call.values.flatten(0, 1)
        with without_autocast(output):
            for run, places in _equal_segments(call, kept):
                segments = index_of(run.segments[places], output.device)
                latest = following[0][segments], following[1][segments]
                entries = [_unpacked(call, *piece, places) for piece in run.pieces]
                n_keys = sum(one.keys.shape[1] for one in entries) + int(latest[0].shape[1])
                step = max(SCRATCH_NUMBERS // (len(latest[0]) * queries.shape[1] * n_keys), 1)
                for first in range(0, n_new, step):
                    tokens = slice(first, min(first + step, n_new))
                    asking = queries[segments][:, :, tokens]
                    result = _answers(call, asking, entries, latest, segments, tokens)
                    answers[segments, :, tokens] = result.to(answers.dtype)
        return output.transpose(1, 2).contiguous()


class _Entries(NamedTuple):
    """Kept entries of equally long segments, (n_segments, length, ...), in the work type.

    The weighted sum of ``turned`` values is turned back.
    """

    keys: Tensor
    values: Tensor
    turned: bool


def _equal_segments(call: AttentionCall, kept: Kept) -> Iterator[tuple[Run, slice]]:
    n_numbers = call.queries.shape[-1] + call.values.shape[-1]
    for run in kept.runs:
        converted = [part for part, _ in run.pieces if part.keys.dtype != call.work_type]
        step = len(run.segments)
        if converted:
            size = sum(int(part.lengths[place]) for part, place in run.pieces) * n_numbers
            step = max(SCRATCH_NUMBERS // size, 1)
        for start in range(0, len(run.segments), step):
            yield run, slice(start, min(start + step, len(run.segments)))


def _unpacked(call: AttentionCall, part: Part, first: int, places: slice) -> _Entries:
    spans, count, start = part.spans, places.stop - places.start, first + places.start
    length = int(part.lengths[first])
    entries = slice(int(spans.starts[start]), int(spans.starts[start]) + count * length)
    keys, values = part.keys[entries], part.values[entries]
    if part.key_scales is not None:
        block = int(spans.first_scales[start])
        scales = part.key_scales[block : block + count * int(spans.blocks[first])]
        scales = scales.view(count, -1, 1, 2, call.keys.shape[-1])
        scales = scales.expand(-1, -1, KEY_BLOCK_TOKENS, -1, -1).flatten(1, 2)
        scales = scales[:, :length].flatten(0, 1)
        keys = key_numbers(keys, scales, part.bits)
        values = value_numbers(values, part.bits, int(call.values.shape[-1]), scales.dtype)
    keys, values = (
        one.view(count, length, one.shape[-1]).to(call.work_type) for one in (keys, values)
    )
    return _Entries(keys, values, turns(part.bits, int(call.values.shape[-1])))


def _answers(
    call: AttentionCall,
    queries: Tensor,
    kept: list[_Entries],
    following: tuple[Tensor, Tensor],
    segments: slice | Tensor,
    tokens: slice,
) -> Tensor:
    (n_segments, group, n_tokens, _), work = queries.shape, call.work_type
    n_kept = sum(one.keys.shape[1] for one in kept)
    keys, values = (states.to(work) for states in following)
    rows = queries.flatten(1, 2).to(work) * call.scaling
    products = [rows @ one.mT for one in (*(entries.keys for entries in kept), keys)]
    logits = call.capped(torch.cat(products, dim=-1))
    if (hidden := _hidden(call, segments, tokens)) is not None:
        near = logits[..., n_kept:].view(n_segments, group, n_tokens, -1)
        near.masked_fill_(hidden, float("-inf"))
    if call.sink_logits is not None:
        sinks = call.sink_logits.to(work).view(1, -1, group, 1)
        sinks = sinks.expand(len(call.keys), -1, -1, n_tokens).reshape(-1, group * n_tokens, 1)
        logits = torch.cat([logits, sinks[segments]], dim=-1)
    weights = logits.softmax(dim=-1)
    sources = [*kept, _Entries(keys, values, turned=False)]
    result, end, turned = weights.new_zeros(*rows.shape[:2], values.shape[-1]), 0, False
    for one in sources:
        if turned and not one.turned:
            result = rotated(result).to(work)
        start, end, turned = end, end + one.keys.shape[1], one.turned
        result = torch.baddbmm(result, weights[..., start:end], one.values)
    return result.view(n_segments, group, n_tokens, -1)


def _hidden(call: AttentionCall, segments: slice | Tensor, tokens: slice) -> Tensor | None:
    """Return the later tokens hidden from new ones, (n or 1, 1, n_tokens, n_following)."""
    n_new, n_following = call.queries.shape[2], call.keys.shape[2]
    if n_new == 1 and call.starts is None:
        return None
    column = torch.arange(n_following, device=call.keys.device)
    place = column[n_following - n_new :][tokens, None]
    hidden = (column > place)[None]
    if call.sees is not None:
        hidden = torch.nn.functional.pad(~call.sees[:, tokens], (n_following - n_new, 0))
    if call.starts is not None:
        hidden = hidden | ((column < call.starts[:, None, None]) & (column != place))
    if len(hidden) > 1:
        hidden = hidden.repeat_interleave(call.keys.shape[1], dim=0)[segments]
    return hidden[:, None]
