"""Attention of a decoded token that reads again, in the slow tier, what it attends to most."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import turns
from kvalloc.runtime.attention import cpu
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.kept import KeptEntries, KeptLayer, on_device
from kvalloc.runtime.packed import segment_keys, value_numbers
from kvalloc.runtime.quantization import rotated
from kvalloc.runtime.tier import LayerTier

_KERNEL = cpu.CpuBackend()


@torch.no_grad()
def attend_again(call: AttentionCall, kept: KeptLayer, tier: LayerTier) -> Tensor:
    """Attend to kept entries, of which each KV head reads again those that it attends to most.

    Parameters
    ----------
    call : AttentionCall
    kept : KeptLayer
        Pages and kept entries, all of one width below 16 bits.
    tier : LayerTier
        Holds the same entries at 8 bits.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, value_dim)
        Of the queries' type, contiguous. Each token reads for itself.
    """
    one = _token if _KERNEL.refusal(call, kept) else _token_in_c
    n_new, n_following = int(call.queries.shape[2]), int(call.keys.shape[2])
    if n_new == 1:
        return one(call, kept, tier)
    found = []
    for place in range(n_new):
        end, visible = n_following - n_new + place + 1, call.visible
        if visible is not None:
            visible = visible[:, :end].clone()
            visible[:, -1] = True  # a token always sees itself
        own = replace(
            call,
            queries=call.queries[:, :, place : place + 1],
            keys=call.keys[:, :, :end],
            values=call.values[:, :, :end],
            visible=visible,
            tail=None,
        )
        found.append(one(own, kept, tier))
    return torch.cat(found, dim=1)


class _Reading(ctypes.Structure):
    """The same fields, in the same order, as ``reading`` in cpu.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("records", "numbers", "positions", "members")),
        *((name, ctypes.c_void_p) for name in ("bias", "pages", "first_bias", "again", "whole")),
        *((name, ctypes.c_void_p) for name in ("key_middle", "key_half")),
        *((name, ctypes.c_void_p) for name in ("value_middle", "value_half")),
        *((name, ctypes.c_int64) for name in ("batch", "n_pages", "page_size")),
        ("before", ctypes.c_void_p),
        ("n_before", ctypes.c_int64),
    )


_READINGS: WeakKeyDictionary[KeptLayer, tuple[_Reading, Any]] = WeakKeyDictionary()
"""What was described once for each eviction, and what it points to."""


def _token_in_c(call: AttentionCall, kept: KeptLayer, tier: LayerTier) -> Tensor:
    """Return the same as `_token`, from the CPU's kernel."""
    if kept not in _READINGS:
        [part], pages, ranges = kept.parts, tier.pages, tier.ranges.contiguous().flatten(0, 1)
        assert pages is not None
        reads, numbers = tier.reads(part.lengths), tier.numbers.contiguous()
        pointed = [numbers, part.positions, pages.members, pages.bias]
        counts = pages.counts.ravel()
        arrays = [counts, np.cumsum(counts) - counts, reads.again, reads.pages]
        arrays = [np.ascontiguousarray(own) for own in arrays]
        places = [own.data_ptr() for own in pointed] + [own.ctypes.data for own in arrays]
        places += [own.data_ptr() for own in ranges]
        sizes = numbers.shape[1], *pages.members.shape[1:]
        _READINGS[kept] = _Reading(0, *places, *sizes), (pointed, arrays, ranges)
    reading, (before, added) = _READINGS[kept][0], tier.records.parts
    reading.before, reading.n_before = cpu.place(before), tier.records.n_before
    reading.records = cpu.place(added)  # moves as it grows
    return cpu.cpu_attention(call, kept, threads=torch.get_num_threads(), reading=reading)


def _token(call: AttentionCall, layer: KeptLayer, tier: LayerTier) -> Tensor:
    """Return what one token of each row is answered, (batch, 1, n_query_heads, value_dim)."""
    (kept,) = layer.parts
    (batch, n_heads), dim = call.keys.shape[:2], int(call.queries.shape[-1])
    work = call.work_type
    queries = call.queries.reshape(batch * n_heads, -1, dim).to(work) * call.scaling
    lengths, value_dim = kept.spans.lengths, int(call.values.shape[-1])
    kept_keys = _padded(segment_keys(kept).to(work), lengths)
    kept_values = _padded(value_numbers(kept.values, kept.bits, value_dim).to(work), lengths)
    logits = call.capped(queries @ kept_keys.mT)
    logits.masked_fill_(_beyond(lengths, logits), -torch.inf)
    pages = tier.pages
    assert pages is not None
    bias = _padded(pages.bias, pages.counts.ravel())
    logits[..., : bias.shape[1]] += bias[:, None]
    beside = _following_logits(call, queries)
    mass = torch.cat([logits, beside], dim=-1).softmax(dim=-1)[..., : logits.shape[-1]].sum(dim=1)
    places, columns = _chosen(mass, kept, tier)
    segments = torch.arange(len(lengths), device=mass.device).repeat_interleave(columns.shape[1])
    keys, values = (
        own.view(*columns.shape, -1).to(work)
        for own in tier.entries(columns.clamp(min=0).flatten(), segments)
    )
    read = call.capped(queries @ keys.mT).masked_fill((columns < 0)[:, None], -torch.inf)
    logits = torch.nn.functional.pad(logits, (0, 1))  # a place for what is not chosen
    logits.scatter_(2, places[:, None].expand(-1, queries.shape[1], -1), -torch.inf)
    parts = [logits[..., :-1], read, beside]
    sizes = [int(part.shape[-1]) for part in parts]
    weights = torch.cat(parts, dim=-1).softmax(dim=-1)
    coarse, again, beside = torch.split(weights, sizes, dim=-1)
    found = coarse @ kept_values
    found = rotated(found).to(work) if turns(kept.bits, value_dim) else found
    found += again @ values
    following = call.values.flatten(0, 1).to(work)
    found += beside[..., : following.shape[1]] @ following
    return found.view(batch, 1, -1, found.shape[-1]).to(call.queries.dtype)


def _chosen(mass: Tensor, kept: KeptEntries, tier: LayerTier) -> tuple[Tensor, Tensor]:
    """Return what each segment reads, by the attention that stored entries get.

    Parameters
    ----------
    mass : Tensor, (n_segments, n)
        Of all query heads of a KV head; pages are the first.
    kept : KeptEntries
    tier : LayerTier

    Returns
    -------
    places : Tensor of int64, (n_segments, n_chosen)
        Which stored entries are not answered by as they are; n where there is none.
    columns : Tensor of int64, (n_segments, n_read)
        Which entries are read instead; -1 where there is none.
    """
    pages, reads, device = tier.pages, tier.reads(kept.lengths), mass.device
    assert pages is not None
    counts, n_places = pages.counts.ravel(), int(mass.shape[1])
    lengths, batch = kept.spans.lengths, len(pages.counts)
    is_page = ~_beyond(counts, mass)[:, 0]
    whole, no_page = _largest(mass.masked_fill(~is_page, -1), reads.pages, batch)
    beyond = is_page | _beyond(lengths, mass)[:, 0]
    single, none = _largest(mass.masked_fill(beyond, -1), reads.again, batch)
    host = whole.masked_fill(no_page, 0).cpu()
    members = pages.members[torch.arange(len(host), device="cpu")[:, None], host].to(device).long()
    members = members.masked_fill(no_page[..., None], -1).flatten(1)
    starts = on_device(kept.spans.starts, device)[:, None]
    columns = kept.positions[starts + single.masked_fill(none, 0)].long().masked_fill(none, -1)
    places = [whole.masked_fill(no_page, n_places), single.masked_fill(none, n_places)]
    return torch.cat(places, dim=1), torch.cat([members, columns], dim=1)


def _largest(numbers: Tensor, counts: IntArray, batch: int) -> tuple[Tensor, Tensor]:
    """Return the largest of each row's numbers, which its segments share.

    Parameters
    ----------
    numbers : Tensor, (n_segments, n)
    counts : ndarray of int64, (batch,)
        How many of a row.
    batch : int
        Rows.

    Returns
    -------
    places : Tensor of int64, (n_segments, most)
        Where they stand in each segment, in order.
    none : Tensor of bool, (n_segments, most)
        Which places are more than there are.
    """
    of_rows = numbers.view(batch, -1)
    best = of_rows.topk(int(counts.max()), dim=1).indices
    few = ~_beyond(counts, best[:, None])[:, 0]
    chosen = torch.zeros_like(of_rows, dtype=torch.bool).scatter_(1, best, few)
    chosen = chosen.view(numbers.shape)
    found = chosen.sum(dim=1)
    most = int(found.max())
    places = chosen.byte().topk(most, dim=1).indices
    return places, torch.arange(most, device=places.device) >= found[:, None]


def _beyond(lengths: IntArray, like: Tensor) -> Tensor:
    """Return which places are beyond the end of a segment, (n_segments, 1, n)."""
    ends = on_device(lengths, like.device)
    return (torch.arange(like.shape[-1], device=like.device) >= ends[:, None])[:, None]


def _padded(own: Tensor, lengths: IntArray) -> Tensor:
    """Return segments one below the other, (n_segments, longest, ...), with zeros behind."""
    return pad_sequence([*torch.split(own, lengths.tolist())], batch_first=True)


def _following_logits(call: AttentionCall, queries: Tensor) -> Tensor:
    """Return the logits of what followed, (n_segments, group, n), and that of a sink behind."""
    logits = call.capped(queries @ call.keys.flatten(0, 1).to(queries.dtype).mT)
    if call.visible is not None:
        hidden = ~call.visible.repeat_interleave(call.keys.shape[1], dim=0)
        logits = logits.masked_fill(hidden[:, None], -torch.inf)
    if call.sink_logits is None:
        return logits
    sinks = (
        call.sink_logits.to(queries.dtype)
        .view(call.keys.shape[1], -1, 1)
        .repeat(len(call.keys), 1, 1)
    )
    return torch.cat([logits, sinks], dim=-1)
