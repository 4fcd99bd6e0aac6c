"""Attention of a few new tokens on the CPU, in C.

Each entry is read once, as stored: float32, half precision, or codes of at most 8 bits.
"""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting.costs import WIDTHS, packed_row_bytes, turns
from kvalloc.errors import UnsupportedModelError
from kvalloc.runtime.attention.call import AttentionCall, Backend
from kvalloc.runtime.attention.library import kernel_library
from kvalloc.runtime.kept import Kept, Part

MOST_ROWS = 256
"""Query rows of a segment (new tokens x query heads of its KV head) that the kernel allocates for.
A question of 50 tokens takes 0.5 to 0.8 of the time of torch's operations."""

_KINDS = {torch.float32: 32, torch.bfloat16: 17, torch.float16: 16}
"""Codes of cpu.c for types, and for numbers of bits."""


class _Part(ctypes.Structure):
    """Fields in the order of ``part`` in cpu.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales")),
        *((name, ctypes.c_int64) for name in ("key_kind", "value_kind", "scale_kind", "turned")),
    )

    @classmethod
    def of(cls, kept: Part, value_dim: int) -> _Part:
        width, scales = WIDTHS[kept.bits], kept.key_scales
        return cls(
            keys=kept.keys.data_ptr(),
            values=kept.values.data_ptr(),
            key_scales=None if scales is None else scales.data_ptr(),
            key_kind=_KINDS.get(kept.keys.dtype, width.keys),
            value_kind=_KINDS.get(kept.values.dtype, width.values),
            scale_kind=0 if scales is None else _KINDS[scales.dtype],
            turned=turns(kept.bits, value_dim),
        )


class _Arguments(ctypes.Structure):
    """Fields in the order of ``arguments`` in cpu.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "parts", "pieces")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "starts", "sinks", "output")),
        *((name, ctypes.c_int64) for name in ("n_segments", "n_pieces", "n_kv_heads", "n_rows")),
        *((name, ctypes.c_int64) for name in ("n_new", "n_following", "room")),
        *((name, ctypes.c_int64) for name in ("key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("following_kind", "threads")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


_ENTRIES: WeakKeyDictionary[Kept, tuple[_Arguments, tuple[int, ...], Any]] = WeakKeyDictionary()
"""Addresses of a layer's entries, checked sizes, and parts; made once for each eviction."""


class CpuBackend(Backend):
    """Compiled code for entries on the CPU."""

    name = "CPU kernel"

    def unavailable(self) -> str | None:
        """Return why there is no compiled code, or None."""
        library = kernel_library()
        return library if isinstance(library, str) else None

    def refusal(self, call: AttentionCall, kept: Kept) -> str | None:
        """Refuse other types, gradients, too long a question, no compiled code."""
        if not call.queries.is_cpu:
            return "the entries are not on the CPU"
        rows = call.queries.shape[1] // call.keys.shape[1] * call.queries.shape[2]
        if not 0 < rows <= MOST_ROWS:
            return f"it has room for {MOST_ROWS} query rows of a KV head"
        return call.kernel_refusal(kept) or self.unavailable()

    def attend(self, call: AttentionCall, kept: Kept) -> Tensor:
        """Return the attention output.

        Raises
        ------
        MemoryError
        UnsupportedModelError
            If call and kept entries do not match.
        """
        return cpu_attention(call, kept, threads=torch.get_num_threads())


def cpu_attention(call: AttentionCall, kept: Kept, *, threads: int) -> Tensor:
    """Attend with a number of threads; see `CpuBackend.attend`."""
    _check_call(call)
    batch, n_query_heads, n_new, key_dim = call.queries.shape
    _, n_kv_heads, n_following, value_dim = call.values.shape
    arguments = _entries(kept, batch, n_kv_heads, key_dim, value_dim)
    output = call.queries.new_empty(batch, n_new, n_query_heads, value_dim, dtype=torch.float32)
    # tensors behind pointers have names, so that they live until the call is over
    queries, keys, values = call.queries.float().contiguous(), call.keys, call.values
    room = keys.stride(1) // key_dim  # tokens between two heads' first ones
    for states, dim in ((keys, key_dim), (values, value_dim)):
        if states.stride() != (n_kv_heads * room * dim, room * dim, dim, 1):
            keys, values, room = keys.contiguous(), values.contiguous(), n_following
            break
    arguments.queries, arguments.output = queries.data_ptr(), output.data_ptr()
    arguments.keys, arguments.values, arguments.room = keys.data_ptr(), values.data_ptr(), room
    arguments.following_kind, arguments.threads = _KINDS[keys.dtype], threads
    arguments.n_rows = n_query_heads // n_kv_heads * n_new
    arguments.n_new, arguments.n_following = n_new, n_following
    arguments.scaling, arguments.softcap = call.scaling, call.softcap or 0.0
    if call.starts is not None:
        starts = call.starts.long().contiguous()
        arguments.starts = starts.data_ptr()
    if call.sink_logits is not None:
        sinks = call.sink_logits.float().contiguous()
        arguments.sinks = sinks.data_ptr()
    library = kernel_library()
    assert isinstance(library, ctypes.CDLL)
    if library.attend(ctypes.byref(arguments)):
        raise MemoryError("no memory for attention over kept entries")
    dtype = call.queries.dtype
    return output if dtype == torch.float32 else output.to(dtype)


def _entries(kept: Kept, *sizes: int) -> _Arguments:
    """Return the addresses of entries, checked once."""
    known = _ENTRIES.get(kept)
    if known is None or known[1] != sizes:
        batch, n_kv_heads, key_dim, value_dim = sizes
        _check_kept(kept, *sizes)
        parts = (_Part * len(kept.parts))(*(_Part.of(part, value_dim) for part in kept.parts))
        arguments = _Arguments(
            parts=ctypes.addressof(parts),
            pieces=kept.pieces.ctypes.data,
            n_segments=batch * n_kv_heads,
            n_pieces=kept.pieces.shape[1],
            n_kv_heads=n_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
        )
        known = _ENTRIES[kept] = arguments, sizes, parts
    return _Arguments.from_buffer_copy(known[0])


def _check_call(call: AttentionCall) -> None:
    """Raise unless tensors match: C reads storage unchecked."""
    queries, keys, values = states = call.queries, call.keys, call.values
    batch, n_query_heads, n_new, key_dim = queries.shape
    _, n_kv_heads, n_following, value_dim = values.shape
    if (
        keys.shape != (batch, n_kv_heads, n_following, key_dim)
        or values.shape != (batch, n_kv_heads, n_following, value_dim)
        or not n_kv_heads
        or n_query_heads % n_kv_heads
        or not 0 < n_query_heads // n_kv_heads * n_new <= MOST_ROWS
        or 0 < n_following < n_new
        or queries.dtype not in _KINDS
        or not queries.dtype == keys.dtype == values.dtype
        or not (queries.is_cpu and keys.is_cpu and values.is_cpu)
        or (call.sink_logits is not None and call.sink_logits.numel() != n_query_heads)
        or (call.starts is not None and call.starts.shape != (batch,))
    ):
        sizes = (f"{tuple(one.shape)} of {one.dtype}".replace("torch.", "") for one in states)
        raise UnsupportedModelError(
            "a layer attends with queries, keys and values of (rows, heads, tokens, numbers) "
            f"{', '.join(sizes)}, which do not fit together; use this model with its full cache"
        )


def _check_kept(kept: Kept, batch: int, n_kv_heads: int, key_dim: int, value_dim: int) -> None:
    segments = {segment for part in kept.parts for segment in part.segments.tolist()}
    fits = segments == {*range(batch * n_kv_heads)} and len(segments) == kept.rows * kept.heads
    for part in kept.parts:
        fits &= part.lengths.shape == part.segments.shape and bool((part.lengths >= 0).all())
        fits &= bool((np.diff(part.segments) > 0).all())
        n, packed = int(part.lengths.sum()), part.bits < 16
        widths = packed_row_bytes(part.bits, key_dim, value_dim) if packed else (key_dim, value_dim)
        rows = [(n, width) for width in widths]
        types = {torch.uint8} if packed else {*_KINDS}
        scales = (int(part.spans.first_scales[-1]), 2, key_dim) if packed else None
        fits &= (part.key_scales is None) != packed
        for one, shape, known in (
            (part.keys, rows[0], types),
            (part.values, rows[1], types),
            (part.key_scales, scales, {torch.float16, torch.bfloat16}),
        ):
            stored = one is None or (one.is_cpu and one.is_contiguous() and one.dtype in known)
            fits &= stored and (one is None or one.shape == shape)
    if not fits:
        raise UnsupportedModelError(
            f"a layer has {n_kv_heads} KV heads with keys of {key_dim} and values of {value_dim} "
            f"numbers in {batch} rows, its cache keeps others; use this model with its full cache"
        )
