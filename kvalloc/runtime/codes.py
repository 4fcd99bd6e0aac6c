"""Keys and values as bytes: codes of few bits with their scales, and numbers at 16 bits.

The layout is ours, not that of optimum-quanto or torchao: theirs are tensors of one shape, with
scales of the model's type, while heads and rows here keep different numbers of entries and each
byte, scales included, has to be the one that the budget was decided with
(`kvalloc.accounting.costs`). The rounding itself is the measured one
(`kvalloc.runtime.quantization`).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvalloc.accounting.costs import PLANES, VALUE_BLOCK_CHANNELS, WIDTHS, code_bytes, turns
from kvalloc.runtime.quantization import coded, from_codes, in_blocks, rotated


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
