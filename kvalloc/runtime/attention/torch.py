"""Attention by torch's operations: right on every device and in every type, with gradients.

Segments (a row's KV head) that keep equally many entries are computed together, others one after
the other. Logits are at least float32, and so are the numbers that entries at fewer bits stand for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, turns
from kvalloc.runtime.attention.call import AttentionCall, Backend
from kvalloc.runtime.kept import KeptEntries, KeptLayer
from kvalloc.runtime.packed import key_numbers, value_numbers
from kvalloc.runtime.quantization import rotated

SCRATCH_NUMBERS = 1 << 18
"""Numbers that the logits of one step may take, or entries that are converted; one segment's
entries, and one new token's logits, are always done at once."""


class TorchBackend(Backend):
    """Serves every call."""

    name = "torch"

    def attend(self, call: AttentionCall, kept: KeptLayer) -> Tensor:
        """Return the attention output; memory beside it is bounded by `SCRATCH_NUMBERS`."""
        n_heads, device = int(call.keys.shape[1]), call.queries.device
        group = call.queries.shape[1] // n_heads
        output = call.queries.new_empty(*call.queries.shape[:3], call.values.shape[-1])
        for part in kept.parts:
            if len(kept.parts) == 1:
                _attend(call, part, output)
                continue
            assert part.heads is not None, "parts of a layer say which heads they are"
            heads, asking = _places(part.heads, group, device)
            own = call.of_heads(heads, asking)
            found = own.queries.new_empty(*own.queries.shape[:3], call.values.shape[-1])
            _attend(own, part, found)
            output[:, asking] = found
        return output.transpose(1, 2).contiguous()


@cache
def _places(heads: tuple[int, ...], group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return KV heads and the query heads that belong to them, on the device."""
    with torch.inference_mode(False):  # gradients may go through it later
        own = torch.tensor(heads, device=device)
        return own, (own[:, None] * group + torch.arange(group, device=device)).view(-1)


def _attend(call: AttentionCall, kept: KeptEntries, output: Tensor) -> None:
    """Write what one part answers, (batch, n_query_heads, n_new, value_dim)."""
    n_new, key_dim = call.queries.shape[2:]
    n_segments, value_dim = call.keys.shape[0] * call.keys.shape[1], int(call.values.shape[-1])
    grouped = call.queries.reshape(n_segments, -1, n_new, key_dim)
    output = output.view(n_segments, -1, n_new, value_dim)
    turned = turns(kept.bits, value_dim)
    # under autocast products would have another type
    with torch.autocast(output.device.type, enabled=False):
        for segments in _together(call, kept):
            n_keys = int(kept.spans.lengths[segments.start]) + call.keys.shape[2]
            step = max(SCRATCH_NUMBERS // (len(grouped[segments]) * grouped.shape[1] * n_keys), 1)
            entries = _numbers(call, kept, segments)
            for first in range(0, n_new, step):
                tokens = slice(first, min(first + step, n_new))
                rows = grouped[segments, :, tokens]
                output[segments, :, tokens] = _answers(
                    call, rows, *entries, segments, tokens, turned=turned
                )


def _together(call: AttentionCall, kept: KeptEntries) -> Iterator[slice]:
    """Yield segments that are computed together: equally long, as many as fit the scratch."""
    for first, last in kept.spans.runs:
        length = int(kept.spans.lengths[first])
        numbers = length * (call.queries.shape[-1] + call.values.shape[-1])
        step = last - first
        if kept.keys.dtype != call.work_type:
            step = max(SCRATCH_NUMBERS // max(numbers, 1), 1)
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))


def _numbers(call: AttentionCall, kept: KeptEntries, segments: slice) -> tuple[Tensor, Tensor]:
    """Return keys and values of equally long segments, (n, length, ...), in the work type."""
    spans, count = kept.spans, segments.stop - segments.start
    own = slice(int(spans.starts[segments.start]), int(spans.ends[segments.stop - 1]))
    keys, values = kept.keys[own], kept.values[own]
    if kept.bits != 16:
        assert kept.key_scales is not None
        blocks = slice(*spans.first_scales[[segments.start, segments.stop]])
        scales = kept.key_scales[blocks].view(count, -1, 1, 2, call.keys.shape[-1])
        scales = scales.expand(-1, -1, KEY_BLOCK_TOKENS, -1, -1).flatten(1, 2)
        scales = scales[:, : len(keys) // count].flatten(0, 1)
        keys = key_numbers(keys, scales, kept.bits)
        values = value_numbers(values, kept.bits, int(call.values.shape[-1]), scales.dtype)
    length, work = len(keys) // count, call.work_type
    keys, values = (one.view(count, length, one.shape[-1]).to(work) for one in (keys, values))
    return keys, values


def _answers(
    call: AttentionCall,
    queries: Tensor,
    kept_keys: Tensor,
    kept_values: Tensor,
    segments: slice,
    tokens: slice,
    *,
    turned: bool,
) -> Tensor:
    """Return what segments answer new tokens, as the queries: (n, group, n_tokens, dim).

    Where kept values are ``turned``, their weighted sum is turned back, and nothing else is.
    """
    n_segments, group, n_tokens, _ = queries.shape
    n_kept, n_following = kept_keys.shape[1], call.keys.shape[2]
    keys, values = (
        states.flatten(0, 1)[segments].to(kept_keys.dtype) for states in (call.keys, call.values)
    )
    rows = queries.flatten(1, 2).to(kept_keys.dtype) * call.scaling
    logits = call.capped(torch.cat([rows @ kept_keys.mT, rows @ keys.mT], dim=-1))
    if (hidden := _hidden(call, segments, tokens)) is not None:
        near = logits[..., n_kept:].view(n_segments, group, n_tokens, -1)
        near.masked_fill_(hidden, float("-inf"))
    if call.sink_logits is not None:
        sinks = (
            call.sink_logits.to(logits.dtype)
            .view(1, -1, group, 1)
            .expand(len(call.keys), -1, -1, n_tokens)
        )
        sinks = sinks.reshape(-1, group * n_tokens, 1)[segments]
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(dim=-1)
    near_weights = weights[..., n_kept : n_kept + n_following]
    found = weights[..., :n_kept] @ kept_values
    found = rotated(found).to(found.dtype) if turned else found
    found = torch.baddbmm(found, near_weights, values)
    return found.view(n_segments, group, n_tokens, -1)


def _hidden(call: AttentionCall, segments: slice, tokens: slice) -> Tensor | None:
    """Return what new tokens do not see of the following, (n or 1, 1, n_tokens, n_following)."""
    n_new, n_following, visible = call.queries.shape[2], call.keys.shape[2], call.visible
    if n_new == 1 and visible is None:
        return None
    column = torch.arange(n_following, device=call.keys.device)
    place = column[n_following - n_new :][tokens, None]
    hidden = (column > place)[None]
    if visible is not None:
        hidden = hidden | (~visible[:, None] & (column != place))
        each = hidden.expand(len(call.keys), -1, -1).repeat_interleave(call.keys.shape[1], dim=0)
        hidden = each[segments]
    return hidden[:, None]
