"""Merging the shards of a long measurement: seconds, and the memory of the process that does it.

The samples are made up: curves of 30 layers with 3 KV heads each, as of SmolLM2-135M.

    python benchmarks/bench_merge.py [--samples 10000] [--context 128] [--shards 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvalloc.formats.score_profile import ScoreHeader, ScoreProfile
from kvalloc.formats.tensors import Blocks, write_tensors
from kvalloc.shape import ModelShape

MOST_SECONDS, MOST_BYTES = 10.0, 1_000_000_000

LAYERS, HEADS = 30, 3

MERGE = """
import json, sys, time
from _common import peak_bytes
from kvalloc.formats.merging import merge
start = time.perf_counter()
merged = merge(sys.argv[2:], sys.argv[1])
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes(), "digest": merged.digest}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        header, arrays = made_up(options.samples, options.context)
        whole = write(folder / "whole", header, arrays)
        size = (folder / "whole").stat().st_size
        (folder / "whole").unlink()
        numbers = range(options.shards)
        parts = [part(folder, header, arrays, shard, options.shards) for shard in numbers]
        del arrays
        rounds = []
        for _ in range(options.rounds):
            command = [sys.executable, "-c", MERGE, str(folder / "merged"), *map(str, parts)]
            done = subprocess.run(
                command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True
            )
            rounds.append(json.loads(done.stdout))
            assert rounds[-1]["digest"] == whole
        start = time.perf_counter()
        copied = (folder / "merged").read_bytes()
        (folder / "copy").write_bytes(copied)
        copy_seconds = time.perf_counter() - start
    seconds = statistics.median(one["seconds"] for one in rounds)
    peak = max(one["peak_bytes"] for one in rounds)
    met = seconds <= MOST_SECONDS and peak <= MOST_BYTES
    points = options.context - 12 + 1
    print(
        f"{options.samples:,} samples of {LAYERS} x {HEADS} heads, {points} points a curve "
        f"(context {options.context}), {size / 1e6:,.0f} MB, in {options.shards} shards\n"
        f"merged in {seconds:.1f} s, {min(one['seconds'] for one in rounds):.1f} to "
        f"{max(one['seconds'] for one in rounds):.1f} over {options.rounds} rounds "
        f"(at most {MOST_SECONDS:g}); reading and writing the file alone {copy_seconds:.1f} s\n"
        f"peak memory of the process {peak / 1e6:,.0f} MB (at most {MOST_BYTES / 1e6:,.0f})\n"
        f"{'reached' if met else 'MISSED'}; the merged file's digest is that of the unbroken one"
    )
    return 0 if met else 1


def made_up(n_samples: int, context: int) -> tuple[ScoreHeader, dict[str, np.ndarray]]:
    """A measurement's header and arrays."""
    shape = ModelShape(
        model_id="made-up",
        n_layers=LAYERS,
        n_query_heads=9,
        n_kv_heads=HEADS,
        head_dim=64,
        dtype_bytes=4,
        layer_types=("full",) * LAYERS,
    )
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
    return ScoreHeader(shape=shape, context_tokens=context, **values), arrays


def part(
    folder: Path, header: ScoreHeader, arrays: dict[str, np.ndarray], shard: int, of: int
) -> Path:
    """One shard's file."""
    own = {
        name: array[shard::of] if name in ScoreProfile.PER_SAMPLE else array
        for name, array in arrays.items()
    }
    own["shards"] = (np.arange(of) == shard).astype(np.int64)
    own["sample_places"] = np.arange(shard, arrays["sample_tokens"].size, of)
    write(folder / f"part{shard + 1}", header, own)
    return folder / f"part{shard + 1}"


def write(path: Path, header: ScoreHeader, arrays: dict[str, np.ndarray]) -> str:
    """A file of these arrays, and its digest; not checked, which takes longer than the merge."""
    blocks = {name: Blocks.whole(array) for name, array in arrays.items()}
    return write_tensors(path, header.header(), blocks, entry=ScoreHeader.METADATA)


if __name__ == "__main__":
    raise SystemExit(main())
