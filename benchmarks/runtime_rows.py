"""Rows of bench_runtime.py: rows that fit, fewer bits, the CPU's kernel, CUDA's bandwidth."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from _common import InTurns, Row, ratio_of, row_met, spread_of

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime.attention import cpu

ANSWER_TOKENS = 64
"""Decoded tokens that each row holds beyond its prompt."""
FEWER = (8, 4)
BANDWIDTH_TARGET = 1.25


def fits_rows(
    caches: Mapping[str, Any],
    *,
    rows: int,
    decode: Callable[[Any, int, int], None],
    target: float,
) -> Iterator[Row]:
    """Rows of each reduced cache that fit into the bytes that a plain cache of some rows takes.

    Parameters
    ----------
    caches : mapping of str to Cache
        One row of the same prompt in each, nothing decoded yet: ``"plain"``, and the reduced ones.
        They stay as they are.
    rows : int
        Rows of the plain cache.
    decode : callable
        ``decode(cache, rows, tokens)`` adds as many tokens to each of its rows.
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
            row = fits_row(caches[level], level, memory, rows, decode) | {"target": target}
            yield row | {"met": row_met(row)}


def fits_row(
    prompt: Any, level: str, memory: int, rows: int, decode: Callable[[Any, int, int], None]
) -> Row:
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
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def at_bits(profile: BudgetProfile, bits: int) -> BudgetProfile:
    """The same budgets, each entry at as many bits."""
    return profile.replace(bits=np.full(profile.budgets.shape, bits, dtype=np.int64))


def bits_rows(
    caches: Mapping[int, Any],
    *,
    prompt: str,
    decode: Callable[[Any], None],
    in_turns: Callable[[Mapping[str, Callable[[], object]]], InTurns],
) -> Iterator[Row]:
    """Tokens a second at fewer bits over those at 16, of caches of a prompt by their bits."""
    stored = {bits: cache.retained_bytes for bits, cache in caches.items()}
    calls = {str(bits): lambda cache=cache: decode(cache) for bits, cache in caches.items()}
    found = in_turns(calls)
    for bits in FEWER:
        share = stored[bits] / stored[16]
        yield {
            "name": f"decode by head at {bits} bits / at 16, {prompt}, tokens a second",
            **ratio_of(found, "16", str(bits)),
            "note": f"the same entries of the prompt in {share:.3f} of the bytes",
        }


def kernel_state() -> str:
    """Whether the kernel is there, in words."""
    reason = cpu.unavailable()
    return "kernel of the CPU compiled" if reason is None else f"no kernel of the CPU: {reason}"


def kernel_rows(
    caches: Mapping[str, Any],
    *,
    prompt: str,
    decode: Callable[[Any], None],
    in_turns: Callable[[Mapping[str, Callable[[], object]]], InTurns],
) -> Iterator[Row]:
    """Tokens a second with the kernel over those of torch's operations, of caches by their name."""

    def without(cache: Any) -> None:
        with mock.patch.object(cpu.CpuBackend, "refusal", return_value="torch is measured"):
            decode(cache)

    if cpu.unavailable() is not None:
        return
    calls: dict[str, Callable[[], object]] = {}
    for name, cache in caches.items():
        calls[name] = lambda cache=cache: decode(cache)
        calls[f"{name} without"] = lambda cache=cache: without(cache)
    found = in_turns(calls)
    for name in caches:
        yield {
            "name": f"decode {name} with the CPU's kernel / without, {prompt}, tokens a second",
            **ratio_of(found, f"{name} without", name),
            "note": "the same cache in turns",
        }


def bandwidth_row(model: Any, retained: int, level: str, seconds: list[float], new: int) -> Row:
    """Seconds of a decoded token on CUDA over those of reading what it has to read."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copies = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        copies.append(time.perf_counter() - start)
    bandwidth = 2 * source.nbytes / statistics.median(copies)
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    weights = sum(weight.nbytes for weight in model.parameters())
    weights -= 0 if tied else table.nbytes  # of the input table a token reads one row
    bound = (weights + retained) / bandwidth
    return {
        "name": f"decode by {level}, seconds / bandwidth bound",
        **spread_of([one / new / bound for one in seconds]),
        "target": BANDWIDTH_TARGET,
        "at_most": True,
        "note": f"bound {bound * 1e3:.2f} ms a token: {weights:,} bytes of weights and "
        f"{retained:,} retained at {bandwidth / 1e9:.0f} GB/s",
    }
