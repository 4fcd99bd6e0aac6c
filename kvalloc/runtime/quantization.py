"""Keys and values at fewer bits, as they are stored: what measuring and running share.

The layout of bytes is ours, not that of optimum-quanto or torchao: theirs are tensors of one shape,
with scales of the model's type, while heads and rows here keep different numbers of entries and
each byte, scales included, has to be the one that the budget was decided with
(`kvalloc.accounting.costs`).
"""

from __future__ import annotations

from functools import cache
from math import inf

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import (
    KEY_BLOCK_TOKENS,
    PLANES,
    VALUE_BLOCK_CHANNELS,
    WIDTHS,
    bits_fault,
    code_bytes,
    turns,
)
from kvalloc.errors import InputError

_LARGEST_SCALE = 65504.0
"""Largest finite float16."""

_LARGEST = 2.0**12
"""Scales and minima from it on are stored in bfloat16: float16 has few digits behind the point."""

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
    levels = 0 if bits is None else 2**bits - 1
    least, least_channel = _LEAST_STEP * levels, _LEAST_CHANNEL_STEP * levels
    return within(magnitudes, _LARGEST, least, least_channel)


def within(channels: Tensor, end: float, least: float, least_channel: float) -> Tensor:
    """Return whether magnitudes are below an end, and neither heads nor channels too small.

    Parameters
    ----------
    channels : Tensor, (n_heads, n_channels)
        The largest of each head's channels.
    end : float
    least, least_channel : float
        A head is too small if all of its channels are below the first, a channel if it is below
        the second; those of 0 are not.

    Returns
    -------
    Tensor of bool, ()
    """
    heads = channels.amax(dim=1)
    small = (heads > 0) & (heads < least)
    fits: Tensor = ((heads < end) & ~small).all()  # not if a number is NaN
    return fits & ~((channels > 0) & (channels < least_channel)).any()


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


def encode_keys(
    blocks: Tensor, bits: int, before: Tensor | None = None, kind: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks of keys of one head each as they are stored.

    Parameters
    ----------
    blocks : Tensor, (n_blocks, 64, head_dim)
    bits : int
        Of `WIDTHS`, but not 16.
    before : Tensor of the kind, (n_blocks, 2, head_dim), optional
        Scales to be kept; see `kvalloc.runtime.quantization.coded`.
    kind : torch.dtype
        Of the scales.

    Returns
    -------
    keys : Tensor of uint8, (n_blocks * 64, key_bytes)
    key_scales : Tensor of the kind, (n_blocks, 2, head_dim)
        Of each block and channel the scale and the minimum.
    exact : Tensor of float32, as ``key_scales``
        Before they were rounded.
    """
    width = WIDTHS[bits].keys
    codes, scales, exact = coded(blocks.float(), width, dim=1, before=before, kind=kind)
    return packed_codes(codes.flatten(0, 1), width), scales, exact


def encode_values(values: Tensor, bits: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return values (n, head_dim) as they are stored, of uint8, (n, value_bytes), and exact scales.

    Behind the codes of a token stand the scale and the minimum of each block of its channels.
    """
    width = WIDTHS[bits].values
    plain = rotated(values) if turns(bits, int(values.shape[1])) else values
    codes, scales, exact = coded(in_blocks(plain, VALUE_BLOCK_CHANNELS), width, kind=kind)
    rows = packed_codes(codes.flatten(1)[:, : values.shape[1]], width)
    rows = torch.cat([rows, scales.flatten(1).view(torch.uint8)], dim=1)
    return rows, exact


def key_numbers(rows: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return keys, float32, (n, head_dim).

    Parameters
    ----------
    rows : Tensor of uint8, (n, key_bytes)
    scales : Tensor of float16 or bfloat16, (n, 2, head_dim)
        Scales and minimum of each row's block.
    bits : int
        Of `WIDTHS`, but not 16.
    """
    codes = unpacked_codes(rows, WIDTHS[bits].keys, int(scales.shape[-1]))
    return from_codes(codes, *scales.unbind(1))


def value_numbers(rows: Tensor, bits: int, head_dim: int, kind: torch.dtype) -> Tensor:
    """Return values, float32, (n, head_dim), of packed rows with their scales, (n, value_bytes).

    Turned values are still `kvalloc.runtime.quantization.rotated`.
    """
    width = WIDTHS[bits].values
    n_bytes = code_bytes(width, head_dim)
    # A copy even of one row: float16 cannot begin at an odd byte.
    scales = rows[:, n_bytes:].clone(memory_format=torch.contiguous_format).view(kind)
    scales = scales.view(len(rows), scales.shape[1] // 2, 2)
    codes = unpacked_codes(rows[:, :n_bytes], width, head_dim)
    block = min(VALUE_BLOCK_CHANNELS, head_dim)
    blocks = _padded(codes, block).view(len(rows), scales.shape[1], block)
    return from_codes(blocks, scales[..., :1], scales[..., 1:]).flatten(1)[:, :head_dim]


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes (n, head_dim) as bytes, in `PLANES`, the first channel in the lowest bits."""
    low, *more = PLANES[bits]
    if not more:
        return _packed_plane(codes, low).contiguous()
    planes = codes.bitwise_and(2**low - 1), codes >> low
    return torch.cat([_packed_plane(*one) for one in zip(planes, PLANES[bits], strict=True)], dim=1)


def unpacked_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Return the codes (n, head_dim) of `packed_codes`."""
    low, *more = PLANES[bits]
    end = code_bytes(low, head_dim)
    codes = _unpacked_plane(packed[:, :end], low, head_dim)
    for width in more:
        codes = codes.add(_unpacked_plane(packed[:, end:], width, head_dim), alpha=2**low)
    return codes


_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""By width, the type of one word that holds the unpacked codes of a byte."""


def _packed_plane(codes: Tensor, width: int) -> Tensor:
    """Return codes (n, head_dim) of ``width`` bits as bytes."""
    if width == 8:
        return codes.contiguous()
    # a product puts each number where it belongs in the word's last byte, where none overlap
    each = 8 // width
    words = _padded(codes, each).contiguous().view(_WORDS[width])
    joined: Tensor = words * sum(2 ** ((8 - width) * place) for place in range(1, each + 1))
    return joined.flatten().view(torch.uint8)[each - 1 :: each].view(words.shape)


def _unpacked_plane(packed: Tensor, width: int, head_dim: int) -> Tensor:
    """Return the numbers (n, head_dim) of `_packed_plane`."""
    if width == 8:
        return packed
    codes = (packed[:, :, None] >> _places(width, packed.device)).bitwise_and_(2**width - 1)
    return codes.flatten(1)[:, :head_dim]


@cache
def _places(width: int, device: torch.device) -> Tensor:
    """Return the first bit of each code in a byte, uint8, (8 / width,)."""
    with torch.inference_mode(False):
        return torch.arange(0, 8, width, dtype=torch.uint8, device=device)


def _padded(codes: Tensor, multiple: int) -> Tensor:
    """Return numbers (n, m) with zeros behind, m being a multiple; the same where it is one."""
    missing = -codes.shape[1] % multiple
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes
