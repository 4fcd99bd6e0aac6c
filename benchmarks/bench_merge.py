"""Merging the shards of a long measurement: seconds, and the memory of the process that does it.

The samples are made up: curves of 30 layers with 3 KV heads each, as of SmolLM2-135M.

    python benchmarks/bench_merge.py [--samples 10000] [--context 128] [--shards 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import Row, in_fresh_process, made_up_shape, parser_of, print_rows

from kvalloc.formats.score_profile import ScoreHeader, ScoreProfile
from kvalloc.formats.tensors import Blocks, write_tensors

MOST_SECONDS, MOST_MB = 10.0, 1_000
SEARCHED = os.pathsep.join([str(Path(__file__).parent), *sys.path])
"""Where the process that merges looks for modules."""

LAYERS, HEADS = 30, 3

MERGE = """
import json, sys, time
from _common import memory_bytes
from kvalloc.formats.merging import merge
start = time.perf_counter()
merged = merge(sys.argv[2:], sys.argv[1])
seconds = time.perf_counter() - start
found = {"seconds": seconds, "peak_bytes": memory_bytes("VmHWM"), "digest": merged.digest}
print(json.dumps(found))
"""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    return print_rows(rows_of(options), options, "numpy", "kvalloc")


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Return the rows of seconds and memory; the merged file must be the unbroken one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        header, arrays = made_up(options.samples, options.context)
        whole = write(folder / "whole", header, arrays)
        size = (folder / "whole").stat().st_size
        (folder / "whole").unlink()
        numbers = range(options.shards)
        parts = [part(folder, header, arrays, shard, options.shards) for shard in numbers]
        points = arrays["ranks"].size
        del arrays
        rounds = []
        for _ in range(options.rounds):
            words = ("-c", MERGE, str(folder / "merged"), *map(str, parts))
            rounds.append(in_fresh_process(*words, PYTHONPATH=SEARCHED))
            if rounds[-1]["digest"] != whole:
                raise ValueError("the merged file's digest is not that of the unbroken one")
        start = time.perf_counter()
        copied = (folder / "merged").read_bytes()
        (folder / "copy").write_bytes(copied)
        copy_seconds = time.perf_counter() - start
    seconds = [one["seconds"] for one in rounds]
    yield {
        "name": f"time to merge {options.shards} shards",
        "figure": statistics.median(seconds),
        "unit": "s",
        "low": min(seconds),
        "high": max(seconds),
        "at_most": MOST_SECONDS,
        "note": f"{options.samples:,} samples of {LAYERS} x {HEADS} heads, {points} points each, "
        f"{size / 1e6:,.0f} MB; reading and writing the file alone {copy_seconds:.1f} s",
    }
    yield {
        "name": "peak memory of the process",
        "figure": max(one["peak_bytes"] for one in rounds) / 1e6,
        "unit": "MB",
        "at_most": MOST_MB,
        "note": "the merged file's digest is that of the unbroken one",
    }


def made_up(n_samples: int, context: int) -> tuple[ScoreHeader, dict[str, np.ndarray]]:
    """Return a measurement's header and arrays."""
    random = np.random.default_rng(0)
    n_points = context - 12 + 1
    ranks = np.arange(n_points, dtype=np.int64)
    sharpness = random.uniform(2.0, 40.0, (64, LAYERS, HEADS, 1))
    few = 1 - (1 - ranks / ranks[-1]) ** sharpness  # rising and concave
    arrays = {
        "ranks": ranks,
        "curves": np.resize(few, (n_samples, LAYERS, HEADS, n_points)),
        "masses": random.random((n_samples, LAYERS, HEADS)),
        "sample_tokens": np.full(n_samples, context),
    }
    values = {"scorer": "xkv", "scorer_parameters": {"window": 8}, "sinks": 4, "window": 8}
    return ScoreHeader(
        shape=made_up_shape(LAYERS, HEADS, 4), context_tokens=context, **values
    ), arrays


def part(
    folder: Path, header: ScoreHeader, arrays: dict[str, np.ndarray], shard: int, of: int
) -> Path:
    """Write and return one shard's file."""
    own = {
        name: array[shard::of] if name in ScoreProfile.PER_SAMPLE else array
        for name, array in arrays.items()
    }
    own["shards"] = (np.arange(of) == shard).astype(np.int64)
    own["sample_places"] = np.arange(shard, arrays["sample_tokens"].size, of)
    write(folder / f"part{shard + 1}", header, own)
    return folder / f"part{shard + 1}"


def write(path: Path, header: ScoreHeader, arrays: dict[str, np.ndarray]) -> str:
    """Write a file of these arrays, unchecked, which would take longer than the merge."""
    blocks = {name: Blocks.whole(array) for name, array in arrays.items()}
    return write_tensors(path, header.header(), blocks, entry=ScoreHeader.METADATA)


if __name__ == "__main__":
    raise SystemExit(main())
