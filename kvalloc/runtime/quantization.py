"""Keys and values at fewer bits, as measuring and the runtime store them.

Heads and rows keep different numbers of entries, in the bytes of `kvalloc.accounting.costs`.
"""

from __future__ import annotations

from functools import cache
from math import inf

import torch
from torch import Tensor

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
"""Scales and minima from here on are in bfloat16: such a float16 has few fractional digits."""

ROUNDING = 2
"""Version of the rounding, raised whenever decoded numbers change."""

_CENTRED_STEPS = {4: 0.3352, 3: 0.586, 2: 0.9957, 1: 1.5958}
"""By bits, the step between codes around 0 with the smallest squared error of normally distributed
numbers, over their standard deviation."""

_STEP_FACTORS = (0.85, 1.0, 1.2)
"""Multiples of that step that a block around 0 tries; the smallest squared error is taken."""

_MIN_STEP, _MIN_CHANNEL_STEP = 2.0**-16, 2.0**-22
"""Smallest largest step of a head, and of a channel of its keys, for scales in float16, which
loses digits below 2**-14."""


def quantised_keys(keys: Tensor, bits: int) -> Tensor:
    """Return keys as decoded from storage: rounded per channel, in blocks of 64 tokens.

    Parameters
    ----------
    keys : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
        In storage order.
    bits : int
        Of `WIDTHS`; 16 returns them unchanged.
    """
    if bits == 16:
        return keys
    return _rounded(keys, KEY_BLOCK_TOKENS, WIDTHS[bits].keys, dim=2)


def quantised_values(values: Tensor, bits: int) -> Tensor:
    """Return values, as `quantised_keys`: rounded per token, in blocks of 64 channels."""
    if bits == 16:
        return values
    turned, width = turns(bits, int(values.shape[-1])), WIDTHS[bits].values
    plain = rotated(values) if turned else values
    codes = _rounded(plain, VALUE_BLOCK_CHANNELS, width, dim=-1, centred=turned)
    return rotated(codes).to(values.dtype) if turned else codes


def rotated(vectors: Tensor) -> Tensor:
    """Return vectors, (..., dim), times the orthonormal Hadamard matrix, float32.

    Twice gives them back. Outliers spread over channels. The float64 product does not depend on the
    number of vectors.

    Raises
    ------
    InputError
        If dim is no power of two.

    References
    ----------
    QuaRot (Ashkboos et al., 2024).
    """
    dim = int(vectors.shape[-1])
    if fault := bits_fault(3, dim):
        raise InputError(fault)
    return (vectors.double() @ _hadamard(dim, vectors.device)).float()


@cache
def _hadamard(dim: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # gradients may go through it later
        step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device="cpu").double()
        matrix = step[:1, :1]
        while len(matrix) < dim:
            matrix = torch.kron(matrix, step)
        turn: Tensor = matrix * dim**-0.5
        return turn.to(device)


def from_codes(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Return decoded numbers, float32."""
    return codes.float().mul_(scale).add_(minimum)


def scales_of(scales: Tensor, bits: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of blocks; around 0 only the scale is stored."""
    if scales.shape[dim] == 1:
        return scales, scales.float() * (-(2**bits - 1) / 2)
    scale, minimum = torch.split(scales, 1, dim=dim)
    return scale, minimum


@torch.no_grad()
def coded(
    blocks: Tensor,
    bits: int,
    dim: int = -1,
    before: Tensor | None = None,
    kind: torch.dtype = torch.float16,
    *,
    centred: bool = False,
    recoded: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks of float32 along an axis as codes, scales and exact scales.

    Scales are scale and minimum along the axis; exact ones are unrounded float32.

    Parameters
    ----------
    before : Tensor, optional
        Earlier scales, NaN for none. They stay if they cover the block to half a step; numbers
        rounded with them stay. Not for blocks around 0.
    kind : torch.dtype
        Of the scales, float16 or bfloat16.
    centred : bool
        Whether codes are around 0, along the last axis, without minimum.
    recoded : Tensor of bool, (n,), optional
        Blocks around 0 that may be rounded already; these do not change.
    """
    levels, wide = float(2**bits - 1), kind == torch.bfloat16
    if centred:
        exact = _best_steps(blocks, bits, recoded)
    else:
        exact = _ranges(blocks, levels, dim, before, wide=wide)
    limit, up = _LARGEST_SCALE, int(not centred)
    scales = (_upper_half(exact, up) if wide else exact.clamp(-limit, limit)).to(kind)
    scale, minimum = scales_of(scales, bits, dim)
    divisor = torch.threshold(scale, 0.0, inf)  # 0 if all numbers of a block are equal
    steps = (blocks - minimum).div_(divisor)  # in float32
    return steps.round_().clamp_(0, levels).to(torch.uint8), scales, exact


def _ranges(
    blocks: Tensor, levels: float, dim: int, before: Tensor | None, *, wide: bool
) -> Tensor:
    sizes = list(blocks.shape)
    sizes[dim] = 2
    exact = blocks.new_empty(sizes)
    scale, minimum = torch.split(exact, 1, dim=dim)
    torch.amin(blocks, dim, keepdim=True, out=minimum)
    if wide:  # scale and minimum cover the block although they have 8 bits
        minimum.copy_(_upper_half(minimum, (minimum < 0).int()))
    torch.amax(blocks, dim, keepdim=True, out=scale).sub_(minimum).div_(levels)
    if before is None:
        return exact
    step, first = torch.split(before.float(), 1, dim=dim)
    excess = minimum - first + levels * (scale - step)  # of the last code
    covers = torch.maximum(first - minimum, excess) <= step / 2
    return torch.where(covers, before.float(), exact)


def _best_steps(blocks: Tensor, bits: int, recoded: Tensor | None) -> Tensor:
    codes, end = torch.empty_like(blocks), 2 ** (bits - 1) - 1

    def norm(of: Tensor) -> Tensor:
        result: Tensor = torch.linalg.vector_norm(of, dim=-1, keepdim=True)
        return result

    def lost_by(off: Tensor) -> Tensor:  # distances from the first code, in steps
        return norm(off.sub_(torch.round(off, out=codes).clamp_(max=end)))

    deviation = norm(blocks).mul_(blocks.shape[-1] ** -0.5)
    sizes = (blocks / torch.threshold(deviation, 0.0, inf)).abs_()
    half, trial = sizes.new_full((), 0.5), torch.empty_like(blocks)
    best, smallest = torch.ones_like(deviation), torch.full_like(deviation, inf)
    for step in (factor * _CENTRED_STEPS[bits] for factor in _STEP_FACTORS):
        lost = lost_by(torch.add(-half, sizes, alpha=1 / step, out=trial)).mul_(step)
        best, smallest = best.masked_fill(lost < smallest, step), torch.fmin(lost, smallest)
    if recoded is not None:  # the smallest number of a rounded block is half a step
        step_of = sizes.amin(-1, keepdim=True).mul_(2)
        lost_by(torch.div(sizes, step_of, out=trial).sub_(half))
        codes += half
        step_of = (torch.linalg.vecdot(sizes, codes) / codes.square().sum(-1))[..., None]
        lost = norm(torch.mul(codes, step_of, out=trial).sub_(sizes))
        same = (lost < smallest) & recoded.view(-1, *[1] * (step_of.ndim - 1))
        best = torch.where(same, step_of, best)
    return best.mul_(deviation)


def magnitudes(exact: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Return each block's largest magnitude, or a bound."""
    span = exact.select(dim, 0) * (2**bits - 1)
    return span if exact.shape[dim] == 1 else torch.maximum(exact.select(dim, 1).abs(), span)


def fits_float16(magnitudes: Tensor, bits: int | None = None) -> Tensor:
    """Return whether float16 holds the scales of heads; if not, bfloat16 does.

    ``magnitudes``, (n_heads, n_channels), are the largest, in one channel if they share scales.
    With ``bits`` they must not be too small.
    """
    levels = 0 if bits is None else 2**bits - 1
    return within(magnitudes, _LARGEST, _MIN_STEP * levels, _MIN_CHANNEL_STEP * levels)


def within(channels: Tensor, end: float, minimum: float, channel_minimum: float) -> Tensor:
    """Return whether magnitudes are below an end, and no head or channel too small.

    A head is too small if all of its ``channels``, (n_heads, n_channels), are below ``minimum``, a
    channel below ``channel_minimum``; zeros are not.
    """
    heads = channels.amax(dim=1)
    small = (heads > 0) & (heads < minimum)
    fits: Tensor = ((heads < end) & ~small).all()  # not if a number is NaN
    return fits & ~((channels > 0) & (channels < channel_minimum)).any()


def _upper_half(values: Tensor, away: Tensor | int) -> Tensor:
    """Return float32 numbers rounded to bfloat16, away from 0 or towards it."""
    bits = values.view(torch.int32) + 0xFFFF * away
    return bits.bitwise_and_(-0x10000).view(torch.float32)


def in_blocks(values: Tensor, block: int, dim: int = -1) -> Tensor:
    """Return numbers in blocks, float32: the axis becomes (n_blocks, block).

    A shorter axis is one block.
    """
    dim = dim % values.ndim
    size = int(values.shape[dim])
    block = min(block, max(size, 1))
    missing = -size % block
    padded = values.float()
    if missing:  # the last number again, so that minimum and maximum stay
        last = padded.narrow(dim, size - 1, 1)
        padded = torch.cat([padded, last.repeat_interleave(missing, dim=dim)], dim=dim)
    sizes = (*values.shape[:dim], (size + missing) // block, block, *values.shape[dim + 1 :])
    return padded.contiguous().view(sizes)


def _rounded(values: Tensor, block: int, bits: int, dim: int, *, centred: bool = False) -> Tensor:
    if not values.numel():
        return values
    dim = dim % values.ndim
    blocks = in_blocks(values, block, dim)
    flat, axis, sizes = blocks.flatten(0, 2), dim - 1, blocks.shape[:3]  # as they are stored
    codes, scales, exact = coded(flat, bits, axis, centred=centred)
    largest = magnitudes(exact, bits, axis).view(*sizes, -1).transpose(0, 1).flatten(1, 2)
    if not fits_float16(largest.amax(dim=1), bits):  # of each head
        codes, scales, _ = coded(flat, bits, axis, kind=torch.bfloat16, centred=centred)
    back = from_codes(codes, *scales_of(scales, bits, axis)).view(blocks.shape)
    same: Tensor = back.flatten(dim, dim + 1).narrow(dim, 0, values.shape[dim]).to(values.dtype)
    return same


def encode_keys(
    blocks: Tensor, bits: int, before: Tensor | None = None, kind: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks of keys, (n_blocks, 64, head_dim), as they are stored; see `coded`.

    Keys are uint8, (n_blocks * 64, key_bytes), scales (n_blocks, 2, head_dim).
    """
    width = WIDTHS[bits].keys
    codes, scales, exact = coded(blocks.float(), width, dim=1, before=before, kind=kind)
    return packed_codes(codes.flatten(0, 1), width), scales, exact


def encode_values(
    values: Tensor, bits: int, kind: torch.dtype, recoded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return values (n, head_dim) as stored, uint8, (n, value_bytes), and exact scales.

    Scale and, unless turned, minimum of each block of channels follow the codes.
    """
    dim, width = int(values.shape[1]), WIDTHS[bits].values
    turned = turns(bits, dim)
    blocks = in_blocks(rotated(values) if turned else values, VALUE_BLOCK_CHANNELS)
    codes, scales, exact = coded(blocks, width, kind=kind, centred=turned, recoded=recoded)
    rows = packed_codes(codes.flatten(1)[:, :dim], width)
    rows = torch.cat([rows, scales.flatten(1).view(torch.uint8)], dim=1)
    return rows, exact


def key_numbers(rows: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return decoded keys, float32, (n, head_dim).

    ``scales``, (n, 2, head_dim), are of each row's block.
    """
    codes = unpacked_codes(rows, WIDTHS[bits].keys, int(scales.shape[-1]))
    return from_codes(codes, *scales.unbind(1))


def value_numbers(rows: Tensor, bits: int, head_dim: int, kind: torch.dtype) -> Tensor:
    """Return decoded values, float32, (n, head_dim); turned ones stay `rotated`."""
    width = WIDTHS[bits].values
    n_bytes = code_bytes(width, head_dim)
    # A copy even of one row: float16 cannot begin at an odd byte.
    scales = rows[:, n_bytes:].clone(memory_format=torch.contiguous_format).view(kind)
    n_scales = 1 if turns(bits, head_dim) else 2
    scales = scales.view(len(rows), scales.shape[1] // n_scales, n_scales)
    codes = unpacked_codes(rows[:, :n_bytes], width, head_dim)
    block = min(VALUE_BLOCK_CHANNELS, head_dim)
    blocks = _padded(codes, block).view(len(rows), scales.shape[1], block)
    return from_codes(blocks, *scales_of(scales, width)).flatten(1)[:, :head_dim]


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes (n, head_dim) as bytes, in `PLANES`, first channels in the lowest bits."""
    low, *more = PLANES[bits]
    if not more:
        return _packed_plane(codes, low).contiguous()
    planes = codes.bitwise_and(2**low - 1), codes >> low
    return torch.cat([_packed_plane(*one) for one in zip(planes, PLANES[bits], strict=True)], dim=1)


def unpacked_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Undo `packed_codes`."""
    low, *more = PLANES[bits]
    end = code_bytes(low, head_dim)
    codes = _unpacked_plane(packed[:, :end], low, head_dim)
    for width in more:
        codes = codes.add(_unpacked_plane(packed[:, end:], width, head_dim), alpha=2**low)
    return codes


_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}
"""By width, the type of one word that holds the unpacked codes of a byte."""


def _packed_plane(codes: Tensor, width: int) -> Tensor:
    if width == 8:
        return codes.contiguous()
    # the product shifts each number to its bits in the word's last byte, without overlap
    each = 8 // width
    words = _padded(codes, each).contiguous().view(_WORDS[width])
    joined: Tensor = words * sum(2 ** ((8 - width) * place) for place in range(1, each + 1))
    return joined.flatten().view(torch.uint8)[each - 1 :: each].view(words.shape)


def _unpacked_plane(packed: Tensor, width: int, head_dim: int) -> Tensor:
    if width == 8:
        return packed
    codes = (packed[:, :, None] >> _places(width, packed.device)).bitwise_and_(2**width - 1)
    return codes.flatten(1)[:, :head_dim]


@cache
def _places(width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(0, 8, width, dtype=torch.uint8, device=device)


def _padded(codes: Tensor, multiple: int) -> Tensor:
    missing = -codes.shape[1] % multiple
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes
