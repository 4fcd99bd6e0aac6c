"""Rounding of kept keys with little effect on an answer's queries."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import inf

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import BoolArray, IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, WIDTHS
from kvalloc.runtime.attention.library import kernel_library
from kvalloc.runtime.quantization import quantised_keys

_DAMPING = 1.0
"""Diagonal that is added to moments of mean 1, as later queries differ from the known ones."""


def round_kept_keys(
    keys: Tensor,
    counts: Mapping[int, IntArray],
    width_of: Tensor | None = None,
    moments: Tensor | None = None,
) -> None:
    """Round kept keys of each row and head to the keys that storage will return, in place.

    Later channels make up for a channel's rounding, as far as queries do not tell them apart. The
    ends of a block's range stay, so that storage rounds no more.

    Parameters
    ----------
    keys : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
        The kept keys come first.
    counts : mapping of int to ndarray of int64, (batch, n_kv_heads)
        Number of keys at each width.
    width_of : Tensor of int, (batch, n_kv_heads, n_tokens), optional
        If a head has several widths.
    moments : Tensor of float64, (batch, n_kv_heads, head_dim, head_dim), optional
        Mean outer product of the queries. None rounds each number independently.

    References
    ----------
    GPTQ (Frantar et al., 2022), there for weights and their inputs.
    """
    if moments is not None:
        _round_for_queries(keys, counts, width_of, moments.flatten(0, 1))
        return
    total, device = np.sum([*counts.values()], axis=0), keys.device
    row = torch.arange(len(keys), device=device)[:, None, None]
    for width, count in counts.items():
        of_width = np.flatnonzero(count.any(axis=0))
        if width == 16 or not len(of_width):
            continue
        counts_of, head = count[:, of_width], torch.from_numpy(of_width).to(device)
        if width_of is None or (counts_of == total[:, of_width]).all():
            keys[:, head] = _first_rounded(keys[:, head], counts_of, width)
            continue
        first = (width_of[:, head] == width).byte().argsort(dim=-1, descending=True, stable=True)
        place = row, head[:, None], first[..., : int(counts_of.max())]
        keys[place] = _first_rounded(keys[place], counts_of, width)


def _first_rounded(keys: Tensor, counts: IntArray, width: int) -> Tensor:
    n_tokens, device = int(keys.shape[2]), keys.device
    ends = torch.from_numpy(counts).to(device)[..., None]
    places = torch.arange(n_tokens + -n_tokens % KEY_BLOCK_TOKENS, device=device)
    stored = places[:n_tokens] < ends
    last = ends // KEY_BLOCK_TOKENS * KEY_BLOCK_TOKENS  # a short block repeats its keys
    repeated = last + (places - last).remainder((ends - last).clamp(min=1))
    places = torch.where(places < ends, places, repeated).clamp(max=n_tokens - 1)
    index = places[..., None].expand(-1, -1, -1, keys.shape[3])
    rounded = quantised_keys(keys.gather(2, index), width)[:, :, :n_tokens]
    return torch.where(stored[..., None], rounded, keys)


def _round_for_queries(
    keys: Tensor, counts: Mapping[int, IntArray], width_of: Tensor | None, moments: Tensor
) -> None:
    n_tokens, head_dim = keys.shape[2:]
    flat, device = keys.view(-1, head_dim), keys.device
    segments, places, levels = list[Tensor](), list[Tensor](), list[Tensor]()
    stored, among = list[BoolArray](), np.arange(KEY_BLOCK_TOKENS)
    for width, count in counts.items():
        if width == 16 or not count.any():
            continue
        lengths = count.ravel()
        n_blocks = -(-lengths // KEY_BLOCK_TOKENS)
        segment = np.repeat(np.arange(len(lengths)), n_blocks)
        start = np.arange(len(segment)) - np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
        size = lengths[segment] - start * KEY_BLOCK_TOKENS
        repeated = among % np.minimum(size[:, None], KEY_BLOCK_TOKENS)  # of a short block
        index = start[:, None] * KEY_BLOCK_TOKENS + repeated
        chosen, block_of = (torch.from_numpy(one).to(device) for one in (index, segment))
        if width_of is not None:
            its = (width_of == width).byte().flatten(0, 1)
            chosen = its.argsort(dim=-1, descending=True, stable=True)[block_of[:, None], chosen]
        places.append(chosen + block_of[:, None] * n_tokens)
        segments.append(block_of)
        stored.append((among < size[:, None]).ravel())
        levels.append(
            keys.new_full((len(segment),), 2.0 ** WIDTHS[width].keys - 1, dtype=torch.float32)
        )
    if not places:
        return
    place, kept = torch.cat(places), torch.from_numpy(np.flatnonzero(np.concatenate(stored)))
    rounded = _with_feedback(flat[place].float(), torch.cat(levels), torch.cat(segments), moments)
    kept = kept.to(device)
    flat[place.flatten()[kept]] = rounded.flatten(0, 1)[kept].to(keys.dtype)


def _with_feedback(blocks: Tensor, levels: Tensor, segments: Tensor, moments: Tensor) -> Tensor:
    """Return rounded ``blocks``, (n_blocks, 64, head_dim), contiguous and perhaps changed."""
    order, passed = _passed_on(moments)
    library = kernel_library() if blocks.is_cpu else "C is for the CPU"
    if isinstance(library, str):
        return _rounded_by_torch(blocks, levels, order[segments], passed[segments])
    tensors = blocks, levels, segments, order.contiguous(), passed.contiguous()
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    sizes = len(blocks), blocks.shape[2]
    if library.round_keys(*pointers, *map(ctypes.c_int64, sizes)):
        raise MemoryError("no memory for the rounding of keys")
    return blocks


def _passed_on(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return each segment's order of channels, and shares that each passes on to later ones."""
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    order = diagonal.argsort(dim=-1, descending=True)
    mean = diagonal.mean(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    known = moments / mean[:, None, None]
    known.diagonal(dim1=-2, dim2=-1).add_(_DAMPING)
    columns = order[:, None].expand(known.shape)
    inverse, failed = torch.linalg.inv_ex(known.gather(-1, columns).gather(-2, columns.mT))
    upper, failed_too = torch.linalg.cholesky_ex(inverse, upper=True)
    passed = (upper / upper.diagonal(dim1=-2, dim2=-1)[..., None]).float()
    fails = (failed | failed_too) != 0  # queries overflow: numbers are rounded independently
    return order, passed.masked_fill(fails[:, None, None], 0.0)


def _rounded_by_torch(blocks: Tensor, levels: Tensor, order: Tensor, passed: Tensor) -> Tensor:
    rest = blocks.gather(-1, order[:, None].expand(blocks.shape)).movedim(-1, 0).contiguous()
    plain, shares = rest.clone(), passed.permute(1, 2, 0)[..., None].contiguous()
    minimum, maximum = plain.amin(-1, keepdim=True), plain.amax(-1, keepdim=True)
    stays = (plain == minimum) | (plain == maximum)
    scale = (maximum - minimum).div_(levels[:, None])
    steps, largest = torch.threshold(scale, 0.0, inf), levels[:, None]
    for number, channel in enumerate(rest):
        code = (channel - minimum[number]).div_(steps[number]).round_().clamp_(min=0)
        back = torch.minimum(code, largest).mul_(scale[number]).add_(minimum[number])
        back = torch.where(stays[number], plain[number], back)
        rest[number + 1 :].addcmul_(shares[number, number + 1 :], channel - back, value=-1)
        channel.copy_(back)
    places = order[:, None].expand(blocks.shape)
    return torch.empty_like(blocks).scatter_(-1, places, rest.movedim(0, -1))
