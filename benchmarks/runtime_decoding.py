"""Decoding on the CPU, by head, beside its bounds.

    python benchmarks/bench_runtime.py decoding [--quick]

- one row of 2,048 tokens over a plain cache;
- ``--batch`` rows of ``--tokens`` over the model with a cache of a few tokens, whose time no cache
  can save: with the model's products as torch makes them, and by oneDNN (`packed_products`), both
  with entries as the model makes them (float32) and at 16 bits, as `kvalloc.apply` stores them;
- the same compiled over uncompiled.

Compared calls run interleaved, each with its own cache. Threads are torch's
(``OMP_NUM_THREADS``): with a busy machine one is steadier.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from _common import InTurns, Row, guarded, median_of, print_rows, ratio_of
from bench_runtime import FEW_TOKENS, parse_arguments, real, shortened
from packed_products import packed_products
from runtime_rows import Decoding, at_bits, decode, kernel_state, prefill
from transformers import DynamicCache

SHORT_TOKENS = 2048


def main() -> int:
    arguments = parse_arguments()
    model, profiles = real(arguments)
    rows = guarded("decoding", lambda: rows_of(model, profiles["head"], arguments))
    return print_rows(rows, arguments, "kvalloc", "torch", "transformers")


def rows_of(model: Any, by_head: Any, arguments: Any) -> Iterator[Row]:
    """Return the rows of all sections."""
    sizes = {"new_tokens": arguments.new_tokens, "rounds": arguments.decode_rounds}
    short = Decoding(model=model, ids=arguments.ids[:, :SHORT_TOKENS], rows=1, **sizes)
    long = Decoding(
        model=model, ids=arguments.ids[:, : arguments.tokens], rows=arguments.batch, **sizes
    )
    plain = prefill(model, DynamicCache(config=model.config), short.ids)
    bare = shortened(model, plain, np.full(len(plain.layers), FEW_TOKENS))
    bare.batch_repeat_interleave(long.rows)
    runs = {"ours": partial(short.run, short.cache(by_head)), "plain": partial(short.run, plain)}
    yield compared(short, short.in_turns(runs), "plain", "ours", "a plain cache", 1.3)
    head = long.cache(by_head)
    runs = {"ours": partial(long.run, copy.deepcopy(head))}
    runs["ours at 16 bits"] = partial(long.run, long.cache(at_bits(by_head, 16)))
    runs["alone"] = partial(long.run, bare)
    name = "the model with an empty cache"
    yield from compared_all(long, runs, name, 0.88)
    with packed_products(model, long.rows):
        yield from compared_all(long, runs, f"{name}, products by oneDNN", 0.8)
    compiled = torch.compile(model)
    runs = {"ours": partial(long.run, copy.deepcopy(head))}
    runs["compiled"] = partial(decode, compiled, head, long.rows, long.new_tokens)
    timed = long.in_turns(runs)
    yield compared(long, timed, "ours", "compiled", "ours that is not compiled", 1.1)


def compared_all(
    decoding: Decoding, runs: Mapping[str, Callable[[], None]], name: str, target: float
) -> Iterator[Row]:
    """Return the rows of all caches over the model alone; they decode interleaved."""
    timed = decoding.in_turns(runs)
    for item in runs:
        if item != "alone":
            yield compared(decoding, timed, "alone", item, name, target)


def compared(
    decoding: Decoding, timed: InTurns, other: str, item: str, name: str, target: float
) -> Row:
    """Return the row of two caches that decoded interleaved."""
    milliseconds = [1e3 * median_of(timed, one) / decoding.new_tokens for one in (item, other)]
    return {
        "name": f"decode by head, {item} / {name}, {decoding}, tokens a second",
        **ratio_of(timed, other, item),
        "at_least": target,
        "note": "{:.0f} and {:.0f} ms a token".format(*milliseconds)
        + f"; {torch.get_num_threads()} threads, {kernel_state()}",
    }
