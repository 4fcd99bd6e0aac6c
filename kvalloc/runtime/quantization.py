"""Keys and values at fewer bits, as they will be stored: what measuring and running share."""

from __future__ import annotations

from collections.abc import Sequence
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
"""Largest finite float16: scales and minima beyond it are held there."""


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
    by_channel = keys.transpose(2, 3)
    return _rounded(by_channel, KEY_BLOCK_TOKENS, WIDTHS[bits].keys).transpose(2, 3)


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
    found = _rounded(rotated(values) if turned else values, VALUE_BLOCK_CHANNELS, width)
    return rotated(found).to(values.dtype) if turned else found


def stored_keys(keys: Tensor, places: Sequence[Tensor], bits: IntArray) -> Tensor:
    """Return keys of which those that are kept are as they come back from storage.

    Parameters
    ----------
    keys : Tensor, (batch, n_kv_heads, n_tokens, head_dim)
    places : sequence of Tensor of int64, each (n_kept,)
        Which entries are kept, increasing; row by row, of one head after the other.
    bits : ndarray of int64, (n_kv_heads,) or (batch, n_kv_heads)
        Of `WIDTHS`.

    Returns
    -------
    Tensor, as ``keys``
    """
    found = keys.clone(memory_format=torch.contiguous_format)
    widths = np.broadcast_to(bits, keys.shape[:2])
    for number, own in enumerate(places):
        row, head = divmod(number, widths.shape[1])
        rounded = quantised_keys(keys[row, head, own][None, None], int(widths[row, head]))[0, 0]
        found[row, head].index_copy_(0, own, rounded)
    return found


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
        matrix, step = torch.ones(1, 1).double(), torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
        while len(matrix) < dim:
            matrix = torch.kron(matrix, step)
        turn: Tensor = matrix * dim**-0.5
        return turn.to(device)


def from_codes(codes: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Return the numbers that codes stand for, float32; scale and minimum are broadcast."""
    return codes.float().mul_(scale.float()).add_(least.float())


def coded(blocks: Tensor, bits: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return blocks of float32, which lie along one axis, as codes and their scales.

    Returns
    -------
    codes : Tensor of uint8, as ``blocks``
    scales : Tensor of float16
        As ``blocks``, but with a block's scale and its minimum along the axis.
    """
    low, high = blocks.amin(dim, keepdim=True), blocks.amax(dim, keepdim=True)
    levels = float(2**bits - 1)
    scales = torch.cat([(high - low) / levels, low], dim=dim)
    scales = scales.clamp_(-_LARGEST_SCALE, _LARGEST_SCALE).half()
    scale, least = torch.split(scales.float(), 1, dim=dim)
    wide = scale.masked_fill(scale == 0, inf)  # all of a block are alike: no steps
    steps = (blocks - least).div_(wide)
    return steps.round_().clamp_(0, levels).to(torch.uint8), scales


def in_blocks(numbers: Tensor, block: int) -> Tensor:
    """Return numbers in blocks along the last axis, float32, (..., n_blocks, block).

    An axis shorter than a block is one block of its own length.
    """
    size = numbers.shape[-1]
    block = min(block, max(size, 1))
    missing = -size % block
    padded = numbers.to(torch.float32, memory_format=torch.contiguous_format)
    if missing:  # by the last number of its block, which changes neither minimum nor maximum
        padded = torch.cat([padded, padded[..., -1:].expand(*padded.shape[:-1], missing)], dim=-1)
    return padded.contiguous().view(*padded.shape[:-1], (size + missing) // block, block)


def _rounded(numbers: Tensor, block: int, bits: int) -> Tensor:
    """Return numbers that were rounded to codes in blocks along the last axis."""
    codes, scales = coded(in_blocks(numbers, block), bits)
    back = from_codes(codes, *torch.split(scales, 1, dim=-1)).flatten(-2)[..., : numbers.shape[-1]]
    same: Tensor = back.to(numbers.dtype)
    return same
