"""Attention of a few new tokens over kept entries on CUDA, in two launches.

Tiles of equal length let several programs share long heads. Each writes a partial softmax, and the
second launch adds them. Lengths are arguments at run time, so longer answers compile nothing, and
the host never waits.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvalloc.accounting.costs import (
    KEY_BLOCK_TOKENS,
    SCALE_BYTES,
    VALUE_BLOCK_CHANNELS,
    WIDTHS,
    code_bytes,
    turns,
)
from kvalloc.runtime.attention.call import AttentionCall, Backend
from kvalloc.runtime.kept import SHORTEST_TILE, Kept, Part

__all__ = ["TritonBackend", "triton_attention"]

_ROWS = (16, 64)
"""Smallest and largest number of query rows of a program; tensor cores set the smallest."""

_WARP_NUMBERS = 512
"""Numbers of keys for each warp: with fewer it reads byte by byte."""


class TritonBackend(Backend):
    """Entries on CUDA, read by Triton kernels."""

    name = "CUDA kernel"

    def unavailable(self) -> str | None:
        """Return a sentence if Triton or CUDA is missing."""
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        return None if _installed() else "Triton is not installed"

    def refusal(self, call: AttentionCall, kept: Kept) -> str | None:
        """Refuse other devices and types, gradients, and codes of odd width."""
        if not call.queries.is_cuda:
            return "the entries are not on CUDA"
        if not _installed():
            return "Triton is not installed"
        dim = int(call.values.shape[-1])
        for bits in (part.bits for part in kept.parts):
            if bits != 16 and code_bytes(WIDTHS[bits].values, dim) % SCALE_BYTES:
                return f"values of {dim} numbers at {bits} bits end in half a word"
        return call.kernel_refusal(kept)

    def attend(self, call: AttentionCall, kept: Kept) -> Tensor:
        """Return the attention output."""
        # Triton launches on the current device, which need not be this layer's
        with torch.cuda.device_of(call.queries):  # type: ignore[no-untyped-call]
            return triton_attention(call, kept, programs=_wanted_programs(call.queries.device))


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _wanted_programs(device: torch.device) -> int:
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def triton_attention(call: AttentionCall, kept: Kept, *, programs: int) -> Tensor:
    """Attend with about ``programs`` programs, more if segments are short."""
    call = call.with_dense_vectors()
    batch, n_query_heads, n_new, head_dim = call.queries.shape
    n_kv_heads, n_following, value_dim = *call.keys.shape[1:3], call.values.shape[-1]
    n_segments, n_rows = batch * n_kv_heads, n_query_heads // n_kv_heads * n_new
    rows = min(max(_power_of_two(n_rows), _ROWS[0]), _ROWS[1])
    row_blocks = -(-n_rows // rows)
    programs = max(programs // row_blocks, 1)
    work = kept.work(_tile_length(sum(len(part.keys) for part in kept.parts), programs))
    columns = min(work.length, KEY_BLOCK_TOKENS)
    tile = max(_tile_length(n_segments * n_following, programs), columns)
    following_tiles = -(-n_following // tile)
    widths = tuple(part.bits for part in kept.parts)
    sizes = _sizes(head_dim, value_dim, rows, widths, columns, call.queries.dtype)
    n_pieces = int(work.pieces.shape[1])
    n_parts = work.room + n_segments * following_tiles
    partial = call.queries.new_empty(n_parts, n_rows, value_dim + 2, dtype=torch.float32)
    output = call.queries.new_empty(batch, n_new, n_query_heads, value_dim)
    sinks = call.sink_logits
    counts = n_rows, n_new, n_kv_heads, n_query_heads // n_kv_heads, n_pieces
    _launch(
        "read_tile",
        (n_parts, row_blocks),
        (call.queries, *call.queries.stride()[:3]),
        (work.pieces, *(_stored(part) for part in kept.parts)),
        (
            *((states, *states.stride()[:3]) for states in (call.keys, call.values)),
            call.starts,
        ),
        partial,
        *(
            work.room,
            following_tiles,
            work.length,
            tile,
            n_following,
            n_segments * n_pieces,
            counts,
        ),
        (call.scaling, call.softcap),
        SIZES=sizes,
        num_warps=max(1, min(4, sizes.columns * sizes.head_block // _WARP_NUMBERS)),
    )
    _launch(
        "add_tiles",
        (n_segments, row_blocks),
        *(partial, work.pieces, None if sinks is None else (sinks, sinks.stride(0)), output),
        *(work.room, following_tiles, work.length, tile, n_following, counts),
        SIZES=sizes,
    )
    return output


def _stored(kept: Part) -> tuple[Any, ...]:
    """Return keys, values and, for codes, key scales and values viewed as their type."""
    scales = kept.key_scales
    both = None if scales is None else (scales, kept.values.view(scales.dtype))
    return kept.keys, kept.values, both


def _tile_length(n_entries: int, programs: int) -> int:
    """Return a tile's entries, parts or multiples of a block, which shares a key scale."""
    each = max(-(-n_entries // programs), SHORTEST_TILE)
    if each > KEY_BLOCK_TOKENS:
        return -(-each // KEY_BLOCK_TOKENS) * KEY_BLOCK_TOKENS
    return _power_of_two(each)


@cache
def _sizes(
    head_dim: int,
    value_dim: int,
    rows: int,
    widths: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
) -> Any:
    from kvalloc.extensions.triton_kernels import Codes, Sizes

    value_block = max(_power_of_two(value_dim), 16)
    return Sizes(
        head_dim=head_dim,
        value_dim=value_dim,
        head_block=max(_power_of_two(head_dim), 16),
        value_block=value_block,
        rows=rows,
        columns=columns,
        key_block=KEY_BLOCK_TOKENS,
        channels=min(VALUE_BLOCK_CHANNELS, value_block),
        codes=tuple(
            Codes(
                key_bits=WIDTHS[bits].keys,
                value_bits=WIDTHS[bits].values,
                key_bytes=code_bytes(WIDTHS[bits].keys, head_dim),
                value_bytes=code_bytes(WIDTHS[bits].values, value_dim),
                turned=turns(bits, value_dim),
            )
            for bits in widths
        ),
        turned=any(turns(bits, value_dim) for bits in widths),
        precision="ieee" if dtype == torch.float32 else "tf32",
    )


def _power_of_two(number: int) -> int:
    """Return a number rounded up to a power of two."""
    return 1 << (number - 1).bit_length()


def _launch(kernel: str, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    from kvalloc.extensions import triton_kernels

    getattr(triton_kernels, kernel)[grid](*arguments, **constants)
