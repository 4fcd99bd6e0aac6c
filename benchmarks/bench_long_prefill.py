"""Memory of profiling a long context: a model of SmolLM2-135M's shape, in chunks.

Each dtype runs in a process of its own, on one random sample; its peak of resident memory is
taken from after the weights were made to the end of the profile.

    python benchmarks/bench_long_prefill.py [--context 32768] [--layers 30] [--chunk N]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from _common import Row, in_fresh_process, memory_bytes, parser_of, print_rows, reset_peak
from transformers import LlamaConfig, LlamaForCausalLM

from kvalloc.engine.contract import LocalEngine
from kvalloc.measure.job import Job
from kvalloc.measure.profiling import measure_job
from kvalloc.measure.sampling import Sample, SampleSet
from kvalloc.models.loading import shape_of
from kvalloc.scorers import get_scorer

MOST_MB = 1_500


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--scorer", default="xkv")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options)))
        return 0
    return print_rows(rows_of(options), options, "torch", "transformers", "kvalloc")


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Return a row for each dtype."""
    for dtype in options.dtypes:
        found = in_fresh_process(__file__, *sys.argv[1:], "--run", dtype)
        yield {
            "name": f"{options.context:,} tokens, {options.layers} layers, {dtype}: peak memory",
            "figure": found["peak_bytes"] / 1e6,
            "unit": "MB",
            "at_most": MOST_MB,
            "note": f"above the weights' process of {found['weights_bytes'] / 1e6:,.0f} MB; scorer "
            f"{options.scorer}, chunk {found['chunk']:,}; {found['cpu_seconds']:,.0f} s of "
            f"processor time, {found['seconds']:,.0f} s; curves on {found['points']:,} ranks, "
            f"error {found['error']:.1e}",
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Profile one sample in this process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=options.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=options.context,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        dtype=getattr(torch, options.run),
    )
    model = LlamaForCausalLM(config).to(getattr(torch, options.run)).eval()
    ids = torch.randint(0, 49_152, (options.context,)).numpy()
    job = Job(
        shape=shape_of(model, model_id="made-up"),
        scorer=get_scorer(options.scorer),
        sinks=4,
        context_tokens=options.context,
        samples=SampleSet(samples=(Sample(token_ids=ids),), description="random tokens"),
        chunk=options.chunk,
    )
    reset_peak()
    before = memory_bytes("VmRSS")
    start, spent = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    found = measure_job(job, LocalEngine(model))
    return {
        "weights_bytes": before,
        "peak_bytes": memory_bytes("VmHWM") - before,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_utime - spent,
        "chunk": job.chunk_of(options.context),
        "points": int(found.ranks.size),
        "error": found.interpolation_error,
    }


if __name__ == "__main__":
    raise SystemExit(main())
