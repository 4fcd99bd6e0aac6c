"""Attention by torch's operations: right on every device and in every type, with gradients.

Segments (a row's KV head) that keep equally many entries are computed together, others one after
the other. Logits are at least float32, and so are the numbers that entries at fewer bits stand for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, turns
from kvalloc.models.attention import without_autocast
from kvalloc.runtime.attention.call import AttentionCall, Backend
from kvalloc.runtime.kept import Kept, Part, index_of
from kvalloc.runtime.quantization import key_numbers, rotated, value_numbers

SCRATCH_NUMBERS = 1 << 18
"""Numbers that the logits of one step may take, or entries that are converted; one segment's
entries, and one new token's logits, are always done at once."""


class TorchBackend(Backend):
    """Serves every call."""

    name = "torch"

    def attend(self, call: AttentionCall, kept: Kept) -> Tensor:
        """Return the attention output; memory beside it is bounded by `SCRATCH_NUMBERS`."""
        n_new, key_dim = call.queries.shape[2:]
        n_segments, value_dim = kept.rows * kept.heads, int(call.values.shape[-1])
        output = call.queries.new_empty(*call.queries.shape[:3], value_dim)
        answers = output.view(n_segments, -1, n_new, value_dim)
        queries = call.queries.reshape(n_segments, -1, n_new, key_dim)
        following = call.keys.flatten(0, 1), call.values.flatten(0, 1)
        with without_autocast(output):
            for part in kept.parts:
                turned = turns(part.bits, value_dim)
                for places in _equal_segments(call, part):
                    segments = index_of(part.segments[places], output.device)
                    latest = following[0][segments], following[1][segments]
                    n_keys = int(part.lengths[places.start]) + int(latest[0].shape[1])
                    step = SCRATCH_NUMBERS // (len(latest[0]) * queries.shape[1] * n_keys)
                    entries = _unpacked(call, part, places)
                    for first in range(0, n_new, max(step, 1)):
                        tokens = slice(first, min(first + max(step, 1), n_new))
                        asking = queries[segments][:, :, tokens]
                        result = _answers(
                            call, asking, entries, latest, segments, tokens, turned=turned
                        )
                        answers[segments, :, tokens] = result.to(answers.dtype)
        return output.transpose(1, 2).contiguous()


def _equal_segments(call: AttentionCall, part: Part) -> Iterator[slice]:
    """Yield segments that are computed together: equally long, as many as fit the scratch."""
    for first, last in part.spans.runs:
        length = int(part.lengths[first])
        size = length * (call.queries.shape[-1] + call.values.shape[-1])
        step = last - first
        if part.keys.dtype != call.work_type:
            step = max(SCRATCH_NUMBERS // max(size, 1), 1)
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))


def _unpacked(call: AttentionCall, part: Part, places: slice) -> tuple[Tensor, Tensor]:
    """Return keys and values of equally long segments, (n, length, ...), in the work type."""
    spans, count = part.spans, places.stop - places.start
    entries = slice(int(spans.starts[places.start]), int(spans.ends[places.stop - 1]))
    keys, values = part.keys[entries], part.values[entries]
    if part.key_scales is not None:
        blocks = slice(*spans.first_scales[[places.start, places.stop]])
        scales = part.key_scales[blocks].view(count, -1, 1, 2, call.keys.shape[-1])
        scales = scales.expand(-1, -1, KEY_BLOCK_TOKENS, -1, -1).flatten(1, 2)
        scales = scales[:, : len(keys) // count].flatten(0, 1)
        keys = key_numbers(keys, scales, part.bits)
        values = value_numbers(values, part.bits, int(call.values.shape[-1]), scales.dtype)
    length, work = len(keys) // count, call.work_type
    keys, values = (one.view(count, length, one.shape[-1]).to(work) for one in (keys, values))
    return keys, values


def _answers(
    call: AttentionCall,
    queries: Tensor,
    kept: tuple[Tensor, Tensor],
    following: tuple[Tensor, Tensor],
    segments: slice | Tensor,
    tokens: slice,
    *,
    turned: bool,
) -> Tensor:
    """Return what segments answer new tokens, as the queries: (n, group, n_tokens, dim).

    Where kept values are ``turned``, their weighted sum is turned back, and nothing else is.
    """
    (n_segments, group, n_tokens, _), work = queries.shape, kept[0].dtype
    n_kept, n_following = kept[0].shape[1], call.keys.shape[2]
    keys, values = (states.to(work) for states in following)
    rows = queries.flatten(1, 2).to(work) * call.scaling
    logits = call.capped(torch.cat([rows @ kept[0].mT, rows @ keys.mT], dim=-1))
    if (hidden := _hidden(call, segments, tokens)) is not None:
        near = logits[..., n_kept:].view(n_segments, group, n_tokens, -1)
        near.masked_fill_(hidden, float("-inf"))
    if call.sink_logits is not None:
        sinks = call.sink_logits.to(work).view(1, -1, group, 1)
        sinks = sinks.expand(len(call.keys), -1, -1, n_tokens).reshape(-1, group * n_tokens, 1)
        logits = torch.cat([logits, sinks[segments]], dim=-1)
    weights = logits.softmax(dim=-1)
    near_weights = weights[..., n_kept : n_kept + n_following]
    result = weights[..., :n_kept] @ kept[1]
    result = rotated(result).to(result.dtype) if turned else result
    result = torch.baddbmm(result, near_weights, values)
    return result.view(n_segments, group, n_tokens, -1)


def _hidden(call: AttentionCall, segments: slice | Tensor, tokens: slice) -> Tensor | None:
    """Return what new tokens do not see of the following, (n or 1, 1, n_tokens, n_following)."""
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
