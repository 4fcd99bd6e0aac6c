"""Attention of a few new tokens over kept entries in one pass on the CPU, written in C.

What `kvalloc.runtime.ragged_kernel` is on CUDA: each entry is read once, as it is stored (float32,
half precision, codes of 8 or 4 bits), by threads that share all entries of a layer equally,
however different segments are. `cpu_kernel.c` is compiled on first use where there is a compiler
(`kvalloc.runtime.compiling`); elsewhere torch's operations do the same, slower.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kvalloc.runtime.compiling import compiled
from kvalloc.runtime.kernels import Packing, SpannedEntries

__all__ = ["MOST_ROWS", "cpu_attention", "serves", "unavailable"]

MOST_ROWS = 256
"""Query rows of a segment, those of all new tokens and of all heads that ask: what the kernel has
room for. A question of 50 tokens takes 0.5 to 0.8 of the time that torch's operations take."""

_SOURCE = Path(__file__).with_name("cpu_kernel.c")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PACKED_KINDS = {8: 3, 4: 4}


class _Arguments(ctypes.Structure):
    """The same fields, in the same order, as ``arguments`` in cpu_kernel.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "kept_keys", "kept_values")),
        *((name, ctypes.c_void_p) for name in ("key_scales", "first_scales", "bias", "spans")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "visible", "sinks", "output")),
        *((name, ctypes.c_int64) for name in ("n_segments", "n_kv_heads", "n_rows", "n_new")),
        *((name, ctypes.c_int64) for name in ("n_following", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("kept_kind", "following_kind", "threads")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


def serves(queries: Tensor, n_kv_heads: int) -> bool:
    """Whether the kernel is there, and made for so many query rows.

    Parameters
    ----------
    queries : Tensor, (batch, n_query_heads, n_new_tokens, head_dim)
    n_kv_heads : int
        Of the layer.
    """
    rows = int(queries.shape[1]) // n_kv_heads * int(queries.shape[2])
    return 0 < rows <= MOST_ROWS and compiled(_SOURCE).library is not None


def unavailable() -> str | None:
    """Why there is no kernel on this machine; None where there is one, compiled now if need be."""
    found = compiled(_SOURCE)
    return None if found.library is not None else found.reason


def cpu_attention(
    queries: Tensor,
    entries: SpannedEntries,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    packing: Packing | None = None,
    threads: int | None = None,
) -> Tensor:
    """The same as `kvalloc.runtime.ragged_attention.ragged_attention`, where it `serves`.

    Parameters
    ----------
    queries, entries, keys, values, scaling, visible, softcap, sink_logits
        As there, all of one type.
    packing : Packing, optional
        Where the entries' keys and values are packed rows of uint8.
    threads : int, optional
        By default as many as torch uses.

    Returns
    -------
    Tensor, (batch, n_new_tokens, n_query_heads, value_dim)
        Of the queries' type, contiguous.

    Raises
    ------
    MemoryError
        If there is no memory to work with.
    """
    batch, n_query_heads, n_new, key_dim = queries.shape
    n_kv_heads, n_following, value_dim = keys.shape[1], keys.shape[2], values.shape[-1]
    # said in full: the default type and device are the caller's to change
    output = torch.empty(batch, n_new, n_query_heads, value_dim, dtype=torch.float32, device="cpu")
    # what is pointed to has a name, so that it lives until the call is over
    asked = queries.float().contiguous()
    latest = keys.contiguous(), values.contiguous()
    shown = None
    if visible is not None:
        shown = visible.expand(batch, n_following).to(torch.uint8).contiguous()
    sinks = None if sink_logits is None else sink_logits.float().contiguous()
    given = _Arguments(
        queries=asked.data_ptr(),
        kept_keys=entries.keys.data_ptr(),
        kept_values=entries.values.data_ptr(),
        key_scales=None if packing is None else packing.key_scales.data_ptr(),
        first_scales=None if packing is None else packing.first_scales.data_ptr(),
        bias=None if entries.bias is None else entries.bias.data_ptr(),
        spans=entries.span_table.data_ptr(),
        keys=latest[0].data_ptr(),
        values=latest[1].data_ptr(),
        visible=None if shown is None else shown.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        output=output.data_ptr(),
        n_segments=batch * n_kv_heads,
        n_kv_heads=n_kv_heads,
        n_rows=n_query_heads // n_kv_heads * n_new,
        n_new=n_new,
        n_following=n_following,
        key_dim=key_dim,
        value_dim=value_dim,
        kept_kind=_KINDS[queries.dtype] if packing is None else _PACKED_KINDS[packing.bits],
        following_kind=_KINDS[queries.dtype],
        threads=torch.get_num_threads() if threads is None else threads,
        scaling=scaling,
        softcap=0.0 if softcap is None else softcap,
    )
    library = compiled(_SOURCE).library
    assert library is not None
    if library.attend(ctypes.byref(given)):
        raise MemoryError("no memory for attention over kept entries")
    return output.to(queries.dtype)
