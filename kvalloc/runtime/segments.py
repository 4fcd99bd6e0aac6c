"""One head's entries of one row, at 16, 8 or 4 bits: rounded, packed into bytes, cut and joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvalloc.accounting.stored_bytes import KEY_BLOCK_TOKENS
from kvalloc.runtime.quantization import key_codes, value_codes
from kvalloc.runtime.ragged import Piece

__all__ = ["Segment", "packed_codes", "unpacked_codes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One head's entries of one row, as they are stored.

    Attributes
    ----------
    keys : Tensor, (n, key_bytes) of uint8, or (n, head_dim) at 16 bits
        Packed codes, a row to a whole byte.
    values : Tensor, (n, value_bytes) of uint8, or (n, head_dim) at 16 bits
        Packed codes, and after them the row's own scales and minima.
    key_scales : Tensor of float16, (ceil(n / 64), 2, head_dim)
        None at 16 bits.
    positions : Tensor of int32, (n,)
    bias : Tensor of float32, (n,), or None
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    positions: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, piece: Piece, bits: int) -> Segment:
        """Round and pack what is kept of a piece."""
        keys, values, positions, bias, kept = piece
        keys, values = keys.index_select(0, kept), values.index_select(0, kept)
        positions = positions.index_select(0, kept)
        bias = None if bias is None else bias.index_select(0, kept)
        if bits == 16:
            return cls(keys=keys, values=values, key_scales=None, positions=positions, bias=bias)
        codes, key_scales = key_codes(keys, bits)
        own_codes, scales = value_codes(values, bits)
        rows = [packed_codes(own_codes, bits), scales.flatten(1).contiguous().view(torch.uint8)]
        return cls(
            keys=packed_codes(codes, bits),
            values=torch.cat(rows, dim=1),
            key_scales=key_scales,
            positions=positions,
            bias=bias,
        )

    def first(self, count: int) -> Segment:
        """The first entries; a block that loses some keeps its scales."""
        scales = self.key_scales
        return Segment(
            keys=self.keys[:count],
            values=self.values[:count],
            key_scales=None if scales is None else scales[: -(-count // KEY_BLOCK_TOKENS)],
            positions=self.positions[:count],
            bias=None if self.bias is None else self.bias[:count],
        )

    def and_then(self, other: Segment) -> Segment:
        """Another segment behind this one, whose last block is full."""
        scales = None
        if self.key_scales is not None and other.key_scales is not None:
            scales = torch.cat([self.key_scales, other.key_scales])
        bias = None
        if self.bias is not None:
            more = torch.zeros_like(other.positions, dtype=torch.float32)
            bias = torch.cat([self.bias, more if other.bias is None else other.bias])
        return Segment(
            keys=torch.cat([self.keys, other.keys]),
            values=torch.cat([self.values, other.values]),
            key_scales=scales,
            positions=torch.cat([self.positions, other.positions]),
            bias=bias,
        )


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (n, head_dim) as bytes; at 4 bits two to a byte, the even channel in the low half."""
    if bits == 8:
        return codes.contiguous()
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def unpacked_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Codes (n, head_dim) of `packed_codes`."""
    if bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :head_dim]
