"""Decoding on a CUDA device at an 8B model's shape, beside static compiled caches.

    python benchmarks/bench_runtime.py gpu [--context 32768] [--share 20%]
    python benchmarks/bench_runtime.py gpu --shape tiny --device cpu --context 512 --quick

Random weights and made-up budgets, one row. Compared calls run interleaved in one process, as in
``cache`` (see `bench_runtime`):

- prefill with eviction by head over a plain one, and the peak of the device's memory in each.
- decode: tokens a second of a reduced cache, compiled and not, at 16 bits and with heads at 8, 5, 4
  and 3, over a plain cache of as many entries (dense), over a static one of as many that is
  compiled, and over a full static compiled one. Compiled is ``torch.compile`` with CUDA graphs
  where torch takes them.
- of one decoded token: kernels launched, waits of the host, and the peak of memory.
- seconds of a token over those of reading weights and retained bytes at the measured bandwidth.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from _common import Row, guarded, in_turns, print_rows, ratio_of
from bench_runtime import made_up, parse_arguments, prefill_rows, shortened
from runtime_rows import bandwidth_row, decode, prefill
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, StaticCache

import kvalloc

TARGETS = {"dense": 0.95, "full static, compiled": 2.0}
WAITS = ("Synchronize", "Memcpy DtoH")
NEVER_EVICTS = 1 << 20
"""Decoded tokens between two evictions: none falls into what is measured."""


def main() -> int:
    arguments = parse_arguments(shape="8b", device="cuda", tokens=32768, batch=1, repeats=3)
    model, profiles = made_up(arguments)
    rows = rows_of(model, profiles["head"], arguments)
    return print_rows(rows, arguments, "kvalloc", "torch", "triton", "transformers")


def rows_of(model: Any, by_head: Any, arguments: Any) -> Iterator[Row]:
    """Return the rows of all sections."""
    make: dict[str, Callable[[], Any]] = {
        "plain": lambda: DynamicCache(config=model.config),
        "head": lambda: kvalloc.make_cache(model, by_head),
    }
    yield from guarded("prefill", lambda: prefill_rows(model, make, arguments, ["head"]))
    for name, new in make.items():
        yield from guarded("peak", partial(peak_rows, model, name, new, arguments.ids))
    yield from guarded("decode", lambda: decode_rows(model, by_head, arguments))


def peak_rows(model: Any, name: str, new: Callable[[], Any], ids: torch.Tensor) -> Iterator[Row]:
    """Measure the peak of the device's memory while a prompt is read, less the bytes before."""
    before, peak = peak_of(lambda: prefill(model, new(), ids))
    yield {
        "name": f"peak of a prefill, {name}, {ids.shape[1]:,} tokens",
        "figure": (peak - before) / 2**20,
        "unit": "MiB",
        "note": f"{before / 2**20:,.0f} MiB before it",
    }


def peak_of(call: Callable[[], object]) -> tuple[int, int]:
    """Return the device's bytes before a call, and the most in it; 0 without a device."""
    if not torch.cuda.is_available():
        call()
        return 0, 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return before, torch.cuda.max_memory_allocated()


def decode_rows(model: Any, by_head: Any, arguments: Any) -> Iterator[Row]:
    """Compare tokens a second, and count what a token launches."""
    ids, new = arguments.ids[:, : arguments.tokens], arguments.new_tokens
    plain = prefill(model, DynamicCache(config=model.config), ids)
    entries = by_head.budgets.mean(axis=1).round().astype(np.int64)
    room = new * (arguments.decode_rounds + 4) + 64
    several = np.resize([8, 8, 5, 5, 4, 4, 4, 3], by_head.budgets.shape)
    made = {"16 bits": by_head, "8 to 3 bits": by_head.replace(bits=several)}
    caches: dict[str, Any] = {"dense": shortened(model, plain, entries)}
    static = static_of(model, plain, int(entries.mean()), room)
    caches |= {"static, compiled": static}
    caches |= {"full static, compiled": static_of(model, plain, ids.shape[1], room)}
    del plain
    for bits, one in made.items():
        cache = prefill(model, kvalloc.make_cache(model, one, decode_every=NEVER_EVICTS), ids)
        caches |= {bits: cache, f"{bits}, compiled": copy.deepcopy(cache)}
    runs: dict[str, Callable[[], None]] = {}
    for name, cache in caches.items():
        compiled = name.endswith("compiled")
        item = torch.compile(model, mode=mode_of(model)) if compiled else model
        runs[name] = partial(decode, item, cache, 1, new)
    timed = in_turns(runs, repeats=arguments.decode_rounds, warm_up=2)
    for name in (one for bits in made for one in (bits, f"{bits}, compiled")):
        for other in ("dense", "static, compiled", "full static, compiled"):
            speed = new / np.median(timed[name][0])
            row: Row = {
                "name": f"decode, {name} / {other}, a prompt of {ids.shape[1]:,}",
                **ratio_of(timed, other, name),
                "note": f"{speed:.1f} tokens/s; {caches[name].retained_bytes:,} bytes retained",
            }
            if name == "16 bits, compiled" and other in TARGETS:
                row["at_least"] = TARGETS[other]
            yield row
    for name, run in runs.items():
        yield from guarded(name, partial(token_rows, name, run, new))
    if ids.is_cuda:
        retained, seconds = (
            caches["16 bits, compiled"].retained_bytes,
            timed["16 bits, compiled"][0],
        )
        yield bandwidth_row(model, retained, "head, compiled", seconds, new)


def mode_of(model: Any) -> str:
    """Return how torch compiles: with CUDA graphs where there is a device."""
    return "reduce-overhead" if model.device.type == "cuda" else "default"


def static_of(model: Any, plain: DynamicCache, tokens: int, room: int) -> StaticCache:
    """Return a static cache of the first ``tokens`` entries of each layer, with room for more."""
    result = StaticCache(config=model.config, max_cache_len=tokens + room)
    for index, layer in enumerate(plain.layers):
        result.update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
    return result


def token_rows(name: str, run: Callable[[], None], tokens: int) -> Iterator[Row]:
    """Count what a decoded token launches, and how often the host waits in it."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=activities) as seen:
        before, peak = peak_of(run)
    counts = Counter({event.key: event.count for event in seen.key_averages()})
    launches = sum(n for key, n in counts.items() if "Launch" in key)
    waits = sum(n for key, n in counts.items() if any(item in key for item in WAITS))
    ours = sum(n for key, n in counts.items() if key in ("read_tile", "add_tiles"))
    yield {
        "name": f"launches of a decoded token, {name}",
        "figure": launches / tokens,
        "note": f"{ours / tokens:.1f} kernels of ours, {waits / tokens:.2f} waits of the host, "
        f"{(peak - before) / 2**20:.1f} MiB at the peak",
    }
