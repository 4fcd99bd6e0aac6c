"""What is stored at fewer bits, one segment after the other: the oracle of packing.

A path of its own, in NumPy: a block is rounded to equal steps from its minimum, codes are written
bit by bit, the lowest first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import KEY_BLOCK_TOKENS, PLANES, VALUE_BLOCK_CHANNELS, WIDTHS, turns
from kvalloc.runtime.kept import KeptEntries
from kvalloc.runtime.quantization import rotated

LARGEST = np.float32(np.finfo(np.float16).max)


class Stored(NamedTuple):
    """Keys, values and key scales of one segment, as bytes and float16."""

    keys: np.ndarray
    values: np.ndarray
    scales: np.ndarray


def coded(numbers: np.ndarray, block: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of rows of float32, (n, size), and scale and minimum of each block, (n, blocks, 2)."""
    codes, scales = np.empty(numbers.shape, np.uint8), []
    for first in range(0, numbers.shape[1], block):
        own = numbers[:, first : first + block]
        low, high = own.min(axis=1), own.max(axis=1)
        least = low.clip(-LARGEST, LARGEST).astype(np.float16)
        scale = ((high - low) / np.float32(2**bits - 1)).clip(max=LARGEST).astype(np.float16)
        wide = np.where(scale > 0, scale.astype(np.float32), np.float32(np.inf))
        steps = np.rint((own - least.astype(np.float32)[:, None]) / wide[:, None])
        codes[:, first : first + block] = steps.clip(0, 2**bits - 1)
        scales.append(np.stack([scale, least], axis=1))
    return codes, np.stack(scales, axis=1) if scales else np.empty((len(numbers), 0, 2), np.float16)


def in_bytes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Each row of codes as whole bytes, plane by plane."""
    places = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    planes = np.split(places, np.cumsum(PLANES[bits])[:-1], axis=-1)
    rows = [own.reshape(len(codes), own.shape[1] * own.shape[2]) for own in planes]
    return np.concatenate([np.packbits(own, axis=1, bitorder="little") for own in rows], axis=1)


def from_bytes(rows: np.ndarray, bits: int, size: int) -> np.ndarray:
    """The codes again, (n, size)."""
    found, done, start = np.zeros((len(rows), size), np.int64), 0, 0
    for width in PLANES[bits]:
        end = start + -(-size * width // 8)
        own = np.unpackbits(rows[:, start:end], axis=1, count=size * width, bitorder="little")
        found += own.reshape(len(rows), size, width) @ (1 << np.arange(done, done + width))
        done, start = done + width, end
    return found


def pack_segment(keys: Tensor, values: Tensor, bits: int) -> Stored:
    """One head's numbers of a row, (n, head_dim), at fewer bits than 16."""
    width = WIDTHS[bits]
    codes, scales = coded(keys.float().numpy().T, KEY_BLOCK_TOKENS, width.keys)
    rows = rotated(values) if turns(bits, values.shape[1]) else values.float()
    value_codes, value_scales = coded(rows.numpy(), VALUE_BLOCK_CHANNELS, width.values)
    behind = value_scales.reshape(len(values), 2 * value_scales.shape[1]).view(np.uint8)
    return Stored(
        in_bytes(codes.T, width.keys),
        np.concatenate([in_bytes(value_codes, width.values), behind], axis=1),
        scales.transpose(1, 2, 0),
    )


def longer_segment(stored: Stored, keys: Tensor, values: Tensor, bits: int) -> Stored:
    """The same with numbers behind, which fill the last block of keys first."""
    if not len(keys):
        return stored
    full = len(stored.keys) // KEY_BLOCK_TOKENS
    cut = full * KEY_BLOCK_TOKENS
    codes = from_bytes(stored.keys[cut:], WIDTHS[bits].keys, keys.shape[1]).astype(np.float32)
    if len(codes):
        codes = codes * stored.scales[full][0].astype(np.float32)
        codes += stored.scales[full][1].astype(np.float32)
    last = torch.cat([torch.from_numpy(codes).to(keys.dtype), keys])
    added = pack_segment(last, torch.cat([values[:1].expand(len(codes), -1), values]), bits)
    return Stored(
        np.concatenate([stored.keys[:cut], added.keys]),
        np.concatenate([stored.values, added.values[len(codes) :]]),
        np.concatenate([stored.scales[:full], added.scales]),
    )


def stored_of_part(part: KeptEntries, row: int, place: int) -> Stored:
    """What a part stores of one segment."""
    number = row * part.lengths.shape[1] + place
    lengths: IntArray = part.lengths.reshape(-1)
    blocks = -(-lengths // KEY_BLOCK_TOKENS)
    first, first_block = int(lengths[:number].sum()), int(blocks[:number].sum())
    own = slice(first, first + int(lengths[number]))
    assert part.key_scales is not None
    scales = part.key_scales[first_block : first_block + int(blocks[number])]
    return Stored(part.keys[own].numpy(), part.values[own].numpy(), scales.numpy())
