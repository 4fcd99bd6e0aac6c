"""Round trips of keys and values through other engines' storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvalloc.accounting.engine_formats import FORMATS, EngineFormat
from kvalloc.models.gguf import reorders_keys
from kvalloc.runtime.quantization import rotated

if TYPE_CHECKING:
    from kvalloc.models.rope import Rotation

_TURN = 64
"""Numbers that ggml turns as one block; a block of keys is the largest power of two that divides
the head."""

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3 = torch.float8_e4m3fn


def round_trip(entries: Tensor, name: str, *, keys: bool, order: list[int] | None = None) -> Tensor:
    """Return keys or values as an engine's attention sees them, turned back, shaped as `entries`.

    Scales are rounded as ggml and exllamav3 store them; scales of the model's type (mlx, KVTuner)
    and of float32 (OpenVINO) are not.

    Parameters
    ----------
    entries : Tensor, (batch, n_kv_heads, n_tokens, dim)
    name : str
        Format in `FORMATS` that fits ``dim``.
    order : list of int, (dim,), optional
        Result of `gguf_order`.

    References
    ----------
    ggml (quantize_row_*_ref), mlx (affine quantize), vLLM (fp8_e4m3), NVFP4, OpenVINO (u8, u4),
    KVTuner (VanillaQuantizer) and exllamav3 (quant_cache, without its option to compand).
    """
    format, dim = FORMATS[name], int(entries.shape[-1])
    if format.grid == "whole" or not entries.numel():
        return entries
    stored, turn = entries.float(), 0
    if format.ggml:
        stored = stored if order is None else stored[..., order]
        turn = 0 if dim % _TURN else dim & -dim if keys else _TURN
    elif format.grid == "exl3":
        turn = format.block
    stored = _turned(stored, turn)
    if format.by_channel:
        stored = _in_blocks_of_tokens(stored, format)
    else:
        stored = _GRIDS[format.grid](_blocks(stored, format.block or dim), format)
        stored = stored.flatten(-2)
    stored = _turned(stored, turn)
    if format.ggml and order is not None:
        places = torch.tensor(order, device=stored.device)
        stored = torch.empty_like(stored).index_copy_(-1, places, stored)
    return stored.to(entries.dtype)


def gguf_order(model: Any, rotation: Rotation, dim: int) -> list[int] | None:
    """Return a key's channels in a GGUF file's order; None for the same."""
    if not (rotation.known and reorders_keys(model.config)):
        return None
    dims = range(dim)
    pairs = zip(dims[rotation.first], dims[rotation.second], strict=True)
    order = [channel for pair in pairs for channel in pair]
    return [*order, *(channel for channel in dims if channel not in order)]


def _blocks(entries: Tensor, block: int) -> Tensor:
    return entries.reshape(*entries.shape[:-1], -1, block)


def _turned(entries: Tensor, block: int) -> Tensor:
    """Multiply blocks by a Hadamard matrix, its own inverse."""
    return rotated(_blocks(entries, block)).flatten(-2) if block else entries


def _in_blocks_of_tokens(entries: Tensor, format: EngineFormat) -> Tensor:
    """Round a channel's blocks of tokens; the last token pads."""
    n_tokens = int(entries.shape[-2])
    last = entries[..., -1:, :].expand(*entries.shape[:-2], -n_tokens % format.block, -1)
    rows = _blocks(torch.cat([entries, last], dim=-2).mT, format.block)
    return _GRIDS[format.grid](rows, format).flatten(-2).mT[..., :n_tokens, :]


def _half(scales: Tensor) -> Tensor:
    return scales.half().float()


def _inverse(scales: Tensor) -> Tensor:
    return (1 / scales).masked_fill(scales == 0, 0.0)


def _amax(blocks: Tensor, format: EngineFormat) -> Tensor:
    levels = (1 << format.code_bits - 1) - 1
    scale = blocks.abs().amax(dim=-1, keepdim=True) / levels
    return (blocks * _inverse(scale)).round() * _half(scale)


def _signed(blocks: Tensor, format: EngineFormat) -> Tensor:
    half = 1 << format.code_bits - 1
    scale = _largest(blocks) / -half
    codes = (blocks * _inverse(scale) + (half + 0.5)).floor().clamp(max=2 * half - 1)
    return (codes - half) * _half(scale)


def _minmax(blocks: Tensor, format: EngineFormat) -> Tensor:
    levels = (1 << format.code_bits) - 1
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / levels
    codes = ((blocks - low) * _inverse(scale) + 0.5).floor().clamp(max=levels)
    if format.ggml:
        scale, low = _half(scale), _half(low)
    return codes * scale + low


def _iq4_nl(blocks: Tensor, format: EngineFormat) -> Tensor:
    inverse = _inverse(_largest(blocks) / _IQ4_NL[0])
    levels = _nearest(blocks * inverse, blocks.new_tensor(_IQ4_NL))
    weights = blocks.square()  # the scale is fitted where numbers are large
    fit = (weights * levels * blocks).sum(dim=-1, keepdim=True)
    size = (weights * levels * levels).sum(dim=-1, keepdim=True)
    return levels * _half(fit * _inverse(size))


def _affine(blocks: Tensor, format: EngineFormat) -> Tensor:
    levels = (1 << format.code_bits) - 1
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    from_low = low.abs() > high.abs()
    scale = ((high - low) / levels).clamp(min=1e-7)
    scale, edge = torch.where(from_low, scale, -scale), torch.where(from_low, low, high)
    steps = (edge / scale).round()  # 0 is a level
    scale = torch.where(steps == 0, scale, edge * _inverse(steps))
    bias = torch.where(steps == 0, 0.0, edge)
    codes = ((blocks - bias) / scale).round().clamp(0, levels)
    return codes * scale + bias


def _zero(blocks: Tensor, format: EngineFormat) -> Tensor:
    levels = (1 << format.code_bits) - 1
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    scale = (high - low).clamp(min=1e-5) / levels
    zero = (low / scale).round()
    return ((blocks / scale - zero).round().clamp(0, levels) + zero) * scale


def _exl3(blocks: Tensor, format: EngineFormat) -> Tensor:
    half = 1 << format.code_bits - 1
    scale = blocks.abs().amax(dim=-1, keepdim=True) + 1e-10
    codes = (blocks / scale * half + half).floor().clamp(0, 2 * half - 1)
    return (codes - (half - 0.5)) / half * _half(scale)


def _e2m1(blocks: Tensor, format: EngineFormat) -> Tensor:
    whole = blocks.abs().max().clamp(min=1e-30) / (_E2M1[-1] * torch.finfo(_E4M3).max)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / (_E2M1[-1] * whole)
    scale = _as_float8(scale, _E4M3) * whole
    sizes = _nearest((blocks * _inverse(scale)).abs(), blocks.new_tensor(_E2M1))
    return sizes.copysign(blocks) * scale


def _e4m3(blocks: Tensor, format: EngineFormat) -> Tensor:
    return _as_float8(blocks, _E4M3)


def _e5m2(blocks: Tensor, format: EngineFormat) -> Tensor:
    return _as_float8(blocks, torch.float8_e5m2)


def _as_float8(entries: Tensor, kind: torch.dtype) -> Tensor:
    largest = torch.finfo(kind).max
    return entries.clamp(-largest, largest).to(kind).float()


def _largest(blocks: Tensor) -> Tensor:
    return blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))


def _nearest(entries: Tensor, levels: Tensor) -> Tensor:
    return levels[torch.bucketize(entries.contiguous(), (levels[1:] + levels[:-1]) / 2)]


_BY_BLOCK = (_amax, _signed, _minmax, _iq4_nl, _affine, _zero, _exl3, _e2m1, _e4m3, _e5m2)
_GRIDS = {one.__name__[1:]: one for one in _BY_BLOCK}
"""Rounding of blocks, ``(..., block)``, by the grid of a format."""
