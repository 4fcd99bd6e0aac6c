"""Memory of profiling a long context: a model of SmolLM2-135M's shape, in chunks.

Each dtype runs in a process of its own, on one random sample; its peak of resident memory is
taken from after the weights were made to the end of the profile.

    python benchmarks/bench_long_prefill.py [--context 32768] [--layers 30] [--chunk N]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from _common import peak_bytes

MOST_BYTES = 1_500_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--scorer", default="xkv")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options)))
        return 0
    met = True
    print(
        f"one sample of {options.context:,} tokens, {options.layers} layers of SmolLM2-135M's "
        f"shape with random weights, scorer {options.scorer}"
    )
    for dtype in options.dtypes.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--run", dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        reached = found["peak_bytes"] <= MOST_BYTES
        met = met and reached
        print(
            f"{dtype}: peak {found['peak_bytes'] / 1e6:,.0f} MB above the weights' process of "
            f"{found['weights_bytes'] / 1e6:,.0f} MB (at most {MOST_BYTES / 1e6:,.0f}: "
            f"{'reached' if reached else 'MISSED'}); {found['cpu_seconds']:,.0f} s of processor "
            f"time, {found['seconds']:,.0f} s; chunk {found['chunk']:,}; curves on "
            f"{found['points']:,} of {options.context:,} ranks, error {found['error']:.1e}",
            flush=True,
        )
    return 0 if met else 1


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Profile one sample in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvalloc.engine.contract import LocalEngine
    from kvalloc.measure.job import Job
    from kvalloc.measure.profiling import measure_job
    from kvalloc.measure.sampling import Sample, SampleSet
    from kvalloc.models.loading import shape_of
    from kvalloc.scorers import get_scorer

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
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = resident_bytes()
    start, spent = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    found = measure_job(job, LocalEngine(model))
    return {
        "weights_bytes": before,
        "peak_bytes": peak_bytes() - before,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_utime - spent,
        "chunk": job.chunk_of(options.context),
        "points": int(found.ranks.size),
        "error": found.interpolation_error,
    }


def resident_bytes() -> int:
    """Memory of this process that is resident now."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    raise SystemExit(main())
