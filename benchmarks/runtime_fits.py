"""Rows of bench_runtime.py on memory: how many rows fit where a plain cache holds some.

An answer's entries are stored by both caches in full, so that the figure falls with the answer's
length. It is fixed here, and does not hang on how much was decoded for other figures.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["ANSWER_TOKENS", "fits_rows", "stored_bytes"]

ANSWER_TOKENS = 64
"""Decoded tokens that each row holds beyond its prompt."""


def fits_rows(
    caches: Mapping[str, Any],
    *,
    rows: int,
    decode: Callable[[Any, int, int], None],
    target: float,
) -> Iterator[dict[str, Any]]:
    """Rows of each reduced cache that fit into the bytes that a plain cache of some rows takes.

    Parameters
    ----------
    caches : mapping of str to Cache
        One row of the same prompt in each, nothing decoded yet: ``"plain"``, and the reduced ones.
        They stay as they are.
    rows : int
        Rows of the plain cache.
    decode : callable
        ``decode(cache, rows, tokens)`` adds so many tokens to each of its rows.
    target : float
        Rows that fit over those of the plain cache, at least.

    Notes
    -----
    Each cache decodes its answer in one row and is brought to many rows then, which copies all of
    it into storages of its own: neither older and larger ones nor parts of them are alive.
    """
    memory = stored_bytes(answered(caches["plain"], rows, decode))
    for level in caches:
        if level != "plain":
            yield fits_row(caches[level], level, memory, rows, decode) | {"target": target}


def fits_row(
    prompt: Any, level: str, memory: int, rows: int, decode: Callable[[Any, int, int], None]
) -> dict[str, Any]:
    """As many rows of the reduced cache as fit, their storages measured, and one more token."""
    cache = answered(prompt, 1, decode)
    fitting = memory // stored_bytes(cache)
    cache.batch_repeat_interleave(fitting)
    taken = stored_bytes(cache)
    start = time.perf_counter()
    decode(cache, fitting, 1)
    seconds = time.perf_counter() - start
    return {
        "name": f"rows that fit by {level} / plain, {memory:,} bytes of K and V",
        "ratio": fitting / rows if taken <= memory else 0.0,
        "at_most": False,
        "decoded_tokens": ANSWER_TOKENS,
        "note": f"{fitting} rows take {taken:,} bytes, each with {ANSWER_TOKENS} decoded tokens; "
        f"the next token {fitting / seconds:.1f} tokens/s",
    }


def answered(prompt: Any, rows: int, decode: Callable[[Any, int, int], None]) -> Any:
    """A copy of a cache of one row after `ANSWER_TOKENS` decoded tokens, that row repeated."""
    cache = copy.deepcopy(prompt)
    decode(cache, 1, ANSWER_TOKENS)
    cache.batch_repeat_interleave(rows)
    return cache


def stored_bytes(cache: Any) -> int:
    """Bytes of all K and V storages of a plain or a reduced cache, each once and in full."""
    retained: int | None = getattr(cache, "retained_bytes", None)
    if retained is not None:
        return retained
    tensors: list[torch.Tensor] = [
        tensor for layer in cache.layers for tensor in (layer.keys, layer.values)
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
