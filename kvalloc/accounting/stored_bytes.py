"""Bytes that entries take at 16, 8 or 4 bits: one formula for problem, profile and runtime."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import IntArray
from kvalloc.shape import ModelShape

BIT_WIDTHS = (16, 8, 4)
"""Bits of a stored number: 16 stands for the model's own dtype, whatever its size."""

KEY_BLOCK_TOKENS = 64
"""Tokens of one key channel that share a scale and a minimum."""

VALUE_BLOCK_CHANNELS = 64
"""Channels of one value vector that share a scale and a minimum."""

SCALE_BYTES = 2
"""A scale or a minimum, float16."""


def stored_bytes(tokens: npt.ArrayLike, bits: npt.ArrayLike, shape: ModelShape) -> IntArray:
    """Bytes of K and V that one KV head stores of one row.

    At 16 bits an entry takes ``shape.bytes_per_entry``. At b = 8 or 4 bits, with the head's kept
    entries in the order of their positions:

    - keys are quantised per channel in blocks of 64 tokens: of each channel and block a float16
      scale and a float16 minimum. The last block may hold fewer tokens and has scales all the
      same: ``ceil(n / 64) * head_dim * 4`` bytes;
    - values are quantised per token in blocks of 64 channels: of each token and block a scale and
      a minimum, ``n * ceil(head_dim / 64) * 4`` bytes;
    - the numbers themselves are packed row by row, a row of one token's key (value) vector ends on
      a whole byte: ``ceil(head_dim * b / 8)`` bytes each for K and V.

    Per channel for keys and per token for values is what KIVI found to hold at few bits.

    Parameters
    ----------
    tokens : array_like of int
        Entries of the head.
    bits : array_like of int
        16, 8 or 4; broadcast against ``tokens``.
    shape : ModelShape

    Returns
    -------
    ndarray of int64

    Examples
    --------
    >>> shape = ModelShape(model_id="m", n_layers=1, n_query_heads=1, n_kv_heads=1, head_dim=64,
    ...                    dtype_bytes=2, layer_types=("full",))
    >>> stored_bytes([64, 65], [[16], [8], [4]], shape).tolist()
    [[16384, 16640], [8704, 9092], [4608, 4932]]

    References
    ----------
    KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache.
    """
    count, width = np.broadcast_arrays(
        np.asarray(tokens, dtype=np.int64), np.asarray(bits, dtype=np.int64)
    )
    vector = -(-shape.head_dim * width // 8)
    key_scales = -(-count // KEY_BLOCK_TOKENS) * shape.head_dim * 2 * SCALE_BYTES
    value_scales = count * (-(-shape.head_dim // VALUE_BLOCK_CHANNELS) * 2 * SCALE_BYTES)
    packed = count * 2 * vector + key_scales + value_scales
    found: IntArray = np.where(width == 16, count * shape.bytes_per_entry, packed).astype(np.int64)
    return found
