"""Keys and values at fewer bits, as they will be stored: what measuring and running share."""

from __future__ import annotations

from functools import cache
from math import inf

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import (
    KEY_BLOCK_TOKENS,
    VALUE_BLOCK_CHANNELS,
    WIDTHS,
    bits_fault,
    turns,
)
from kvalloc.errors import InputError

_LARGEST_SCALE = 65504.0
"""Largest finite float16."""

_LARGEST = 2.0**12
"""Scales and minima beyond it are stored in bfloat16: float16 has few digits behind the point."""

_LEAST_STEP, _LEAST_CHANNEL_STEP = 2.0**-16, 2.0**-22
"""A head, or a channel of its keys, whose steps are all smaller has scales in bfloat16: below
2**-14 a float16 loses digits."""


def quantised_keys(keys: Tensor, bits: int) -> Tensor:
    """Return keys as they come back from storage: per channel, in blocks of 64 tokens.

    Parameters
    ----------
    keys : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
        In the order in which they are stored.
    bits : int
        Of `WIDTHS`; at 16 they come back as they are.

    Returns
    -------
    Tensor, as ``keys``
    """
    if bits == 16:
        return keys
    return _rounded(keys, KEY_BLOCK_TOKENS, WIDTHS[bits].keys, dim=2)


def quantised_values(values: Tensor, bits: int) -> Tensor:
    """Return values as they come back from storage: per token, in blocks of 64 channels.

    Parameters
    ----------
    values : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
    bits : int
        Of `WIDTHS`; at 16 they come back as they are.

    Returns
    -------
    Tensor, as ``values``
    """
    if bits == 16:
        return values
    turned, width = turns(bits, int(values.shape[-1])), WIDTHS[bits].values
    codes = _rounded(rotated(values) if turned else values, VALUE_BLOCK_CHANNELS, width, dim=-1)
    return rotated(codes).to(values.dtype) if turned else codes


def round_first_keys(keys: Tensor, counts: Tensor, bits: IntArray) -> None:
    """Round the first keys of each row and head as they will come back from storage, in place.

    Parameters
    ----------
    keys : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
    counts : Tensor of int64, (batch, n_kv_heads)
        How many are stored, on the host.
    bits : ndarray of int64, (n_kv_heads,)
        Of `WIDTHS`.
    """
    n_tokens, device = int(keys.shape[2]), keys.device
    missing = -n_tokens % KEY_BLOCK_TOKENS if n_tokens > KEY_BLOCK_TOKENS else 0
    ends = counts.to(device)[..., None]
    places = torch.arange(n_tokens + missing, device=device)
    places = places.minimum((ends - 1).clamp_(0, n_tokens - 1))
    stored = torch.arange(n_tokens, device=device) < ends  # a short block repeats its last key
    for width in sorted(set(bits.tolist()) - {16}):
        heads = torch.from_numpy(np.flatnonzero(bits == width)).to(device)
        index = places[:, heads, :, None].expand(-1, -1, -1, keys.shape[3])
        mine = keys[:, heads]
        rounded = quantised_keys(mine.gather(2, index), width)[:, :, :n_tokens]
        keys[:, heads] = torch.where(stored[:, heads, :, None], rounded, mine)


def rotated(vectors: Tensor) -> Tensor:
    """Return vectors times the orthonormal Hadamard matrix; twice gives them back.

    What stands out in one channel is spread over all, so that fewer bits lose less. The product is
    in float64: once it is float32, it does not depend on how many vectors there are.

    Parameters
    ----------
    vectors : Tensor, (..., dim)

    Returns
    -------
    Tensor of float32, (..., dim)

    Raises
    ------
    InputError
        If dim is no power of two.

    References
    ----------
    QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs (Ashkboos et al., 2024).
    """
    dim = int(vectors.shape[-1])
    if fault := bits_fault(3, dim):
        raise InputError(fault)
    return (vectors.double() @ _hadamard(dim, vectors.device)).float()


@cache
def _hadamard(dim: int, device: torch.device) -> Tensor:
    """Return Hadamard's matrix over the root of its size, float64, (dim, dim)."""
    with torch.inference_mode(False):  # gradients may go through it later
        step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device="cpu").double()
        matrix = step[:1, :1]
        while len(matrix) < dim:
            matrix = torch.kron(matrix, step)
        turn: Tensor = matrix * dim**-0.5
        return turn.to(device)


def from_codes(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Return the numbers that codes stand for, float32; scale and minimum are broadcast.

    These may be float16: they become float32 where they are used, without a copy on a GPU.
    """
    return codes.float().mul_(scale).add_(minimum)


@torch.no_grad()
def coded(
    blocks: Tensor,
    bits: int,
    dim: int = -1,
    before: Tensor | None = None,
    kind: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks of float32, which lie along one axis, as codes and their scales.

    Parameters
    ----------
    blocks : Tensor
    bits : int
    dim : int
        The axis.
    before : Tensor of the kind, optional
        Scales by which numbers of a block were rounded before, as they are returned; NaN for none.
        They are kept where they cover all of the block to half a step, and those numbers come back
        as they are.
    kind : torch.dtype
        Of the scales, float16 or bfloat16; see `fits_float16`.

    Returns
    -------
    codes : Tensor of uint8, as ``blocks``
    scales : Tensor of the kind
        As ``blocks``, but with a block's scale and its minimum along the axis.
    exact : Tensor of float32, as ``scales``
        The same before they were rounded.
    """
    levels, sizes = float(2**bits - 1), list(blocks.shape)
    sizes[dim] = 2
    scales = blocks.new_empty(sizes)
    scale, minimum = torch.split(scales, 1, dim=dim)
    torch.amin(blocks, dim, keepdim=True, out=minimum)
    wide = kind == torch.bfloat16
    if wide:  # scale and minimum cover the block although they have 8 bits
        minimum.copy_(_upper_half(minimum, (minimum < 0).int()))
    torch.amax(blocks, dim, keepdim=True, out=scale).sub_(minimum).div_(levels)
    if before is not None:
        step, first = torch.split(before.float(), 1, dim=dim)
        excess = minimum - first + levels * (scale - step)  # of the last code
        covers = torch.maximum(first - minimum, excess) <= step / 2
        scales = torch.where(covers, before.float(), scales)
    exact, limit = scales, _LARGEST_SCALE
    scales = (_upper_half(exact, 1) if wide else exact.clamp(-limit, limit)).to(kind)
    scale, minimum = torch.split(scales, 1, dim=dim)
    divisor = torch.threshold(scale, 0.0, inf)  # at 0 all of a block are alike: no steps
    steps = (blocks - minimum).div_(divisor)  # in float32
    return steps.round_().clamp_(0, levels).to(torch.uint8), scales, exact


def magnitudes(exact: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Return the largest magnitude in each block, of its exact scale and minimum along an axis."""
    scale, minimum = exact.unbind(dim)
    return torch.maximum(minimum.abs(), scale * (2**bits - 1))


def fits_float16(magnitudes: Tensor, bits: int | None = None) -> Tensor:
    """Return whether float16 holds the scales of heads; if not, bfloat16 does.

    Parameters
    ----------
    magnitudes : Tensor of float32, (n_heads, n_channels)
        The largest of each head's channels; one channel where they share scales.
    bits : int, optional
        Of a code: heads and channels must not be too small either.

    Returns
    -------
    Tensor of bool, ()
    """
    fits: Tensor = magnitudes.max() <= _LARGEST  # not if a number is NaN
    if bits is None:
        return fits
    steps = magnitudes / (2**bits - 1)
    heads = steps.amax(dim=1)
    small = ((steps > 0) & (steps < _LEAST_CHANNEL_STEP)).any()
    fits &= ~small & ~((heads > 0) & (heads < _LEAST_STEP)).any()
    return fits


def _upper_half(values: Tensor, away: Tensor | int) -> Tensor:
    """Return float32 numbers that bfloat16 has: the next away from 0 where so said, or towards."""
    bits = values.view(torch.int32) + 0xFFFF * away
    return bits.bitwise_and_(-0x10000).view(torch.float32)


def in_blocks(values: Tensor, block: int, dim: int = -1) -> Tensor:
    """Return numbers in blocks along an axis, float32: that axis becomes (n_blocks, block).

    An axis shorter than a block is one block of its own length.
    """
    dim = dim % values.ndim
    size = int(values.shape[dim])
    block = min(block, max(size, 1))
    missing = -size % block
    padded = values.float()
    if missing:  # by the last number of its block, which changes neither minimum nor maximum
        last = padded.narrow(dim, size - 1, 1)
        padded = torch.cat([padded, last.repeat_interleave(missing, dim=dim)], dim=dim)
    sizes = (*values.shape[:dim], (size + missing) // block, block, *values.shape[dim + 1 :])
    return padded.contiguous().view(sizes)


def _rounded(values: Tensor, block: int, bits: int, dim: int) -> Tensor:
    """Return numbers that were rounded to codes in blocks along an axis."""
    if not values.numel():
        return values
    dim = dim % values.ndim
    blocks = in_blocks(values, block, dim)
    codes, scales, exact = coded(blocks, bits, dim=dim + 1)
    largest = magnitudes(exact, bits, dim + 1).transpose(0, 1).flatten(1, 2)  # of each head
    if not fits_float16(largest.amax(dim=1), bits):
        codes, scales, _ = coded(blocks, bits, dim=dim + 1, kind=torch.bfloat16)
    back = from_codes(codes, *torch.split(scales, 1, dim=dim + 1)).flatten(dim, dim + 1)
    same: Tensor = back.narrow(dim, 0, values.shape[dim]).to(values.dtype)
    return same
