"""What measuring costs: profiles in time and memory, long contexts.

    python benchmarks/bench_measuring.py profile [--model demo] [--lengths 1024 2048 4096]
    python benchmarks/bench_measuring.py long-prefill [--context 32768] [--layers 3] [--chunk N]

- profile: profiling against the plain forward of the same prompts. Time: both run in one process,
  interleaved (A B, B A, A B, ...), on the same token ids; the figure is the median of the ratios of
  each round. The plain forward is the decoder without head and without cache (sdpa); profiling is
  the whole call of `kvalloc.profile`, tokenising included. Memory: each side in a fresh process.
  The weights are touched and a short prompt is run, then the kernel's high-water mark of the
  resident set (VmHWM) is reset and read again after the call. The figure is the peak above the
  resident set just before. glibc is told to give freed tensors back at once
  (MALLOC_MMAP_THRESHOLD_), on both sides: otherwise the figure shows which holes the heap had, and
  one and the same call varies by a factor of two. Linux only.
- long-prefill: memory of profiling a long context in chunks, of a model of SmolLM2-135M's shape.
  Each dtype runs in a process of its own, on one random sample; its peak of resident memory is
  taken from after the weights were made to the end of the profile.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _common import (
    Row,
    in_fresh_process,
    in_turns,
    median_of,
    memory_bytes,
    parser_of,
    print_rows,
    ratio_of,
    reset_peak,
)
from transformers import LlamaConfig, LlamaForCausalLM

from kvalloc.engine.contract import LocalEngine
from kvalloc.measure import Prompt, default_texts, profile
from kvalloc.measure.job import Job
from kvalloc.measure.profiling import measure_job
from kvalloc.measure.sampling import Sample, SampleSet, choose_samples
from kvalloc.models.loading import LoadedModel, load_model, shape_of
from kvalloc.scorers import get_scorer

TIME_TARGET, MEMORY_TARGET = 1.10, 1.15
MOST_MB = 1_500
MIB = 2**20


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=("profile", "long-prefill"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--scorer", default="xkv")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--fresh", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fresh:
        measure = {"profile": measure_memory, "long-prefill": measure_long}[options.part]
        print(json.dumps(measure(options)))
        return 0
    parts = {"profile": profile_rows, "long-prefill": long_rows}
    return print_rows(parts[options.part](options), options, "torch", "transformers", "kvalloc")


# A profile against the plain forward


def profile_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Return the rows of each prompt's length: time and memory."""
    loaded = load_model(options.model, attention="sdpa")
    for length in options.lengths:
        timed = in_turns(sides(options, loaded, length), repeats=options.repeats)
        forward, profiling = (median_of(timed, side) for side in ("forward", "profile"))
        yield {
            "name": f"{length} tokens, time: profile / forward",
            **ratio_of(timed, "profile", "forward"),
            "at_most": TIME_TARGET,
            "note": f"{profiling:.2f} and {forward:.2f} s",
        }
        words = ("profile", "--lengths", str(length), "--model", options.model)
        words += ("--scorer", options.scorer)
        forward, profiling = (
            in_fresh_process(__file__, *words, "--fresh", side, MALLOC_MMAP_THRESHOLD_="65536")
            for side in ("forward", "profile")
        )
        yield {
            "name": f"{length} tokens, peak memory: profile / forward",
            "figure": profiling / forward,
            "at_most": MEMORY_TARGET,
            "note": f"{profiling / MIB:.0f} and {forward / MIB:.0f} MiB",
        }


def sides(
    options: argparse.Namespace, loaded: LoadedModel, length: int
) -> dict[str, Callable[[], object]]:
    """Return both calls, on the same tokens of the shipped text."""
    text = "\n\n".join(document.text for document in default_texts())[: length * 6]
    prompt = [Prompt(text=text)]
    chosen = choose_samples(prompt, loaded.tokenizer, context_tokens=length, least_tokens=length)
    ids = torch.from_numpy(chosen.samples[0].token_ids)[None]
    decoder = loaded.model.get_decoder()

    def forward() -> object:
        with torch.inference_mode():
            return decoder(input_ids=ids, use_cache=False)

    def profiling() -> object:
        return profile(
            loaded.model, loaded.tokenizer, prompt, context=length, scorer=options.scorer
        )

    return {"forward": forward, "profile": profiling}


def measure_memory(options: argparse.Namespace) -> int:
    """Return the bytes that one side takes at its peak, above those before."""
    loaded = load_model(options.model, attention="sdpa")
    for weight in loaded.model.parameters():
        weight.sum()
    (length,) = options.lengths
    for call in sides(options, loaded, 128).values():
        call()
    call = sides(options, loaded, length)[options.fresh]
    before = memory_bytes("VmRSS")
    reset_peak()
    call()
    return memory_bytes("VmHWM") - before


# A long context


def long_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Return a row for each dtype."""
    for dtype in ("float32", "bfloat16"):
        result = in_fresh_process(__file__, *sys.argv[1:], "--fresh", dtype)
        yield {
            "name": f"{options.context:,} tokens, {options.layers} layers, {dtype}: peak memory",
            "figure": result["peak_bytes"] / 1e6,
            "unit": "MB",
            "at_most": MOST_MB,
            "note": f"above the weights' process of {result['weights_bytes'] / 1e6:,.0f} MB; "
            f"scorer {options.scorer}, chunk {result['chunk']:,}; {result['cpu_seconds']:,.0f} s "
            f"of processor time, {result['seconds']:,.0f} s; curves on {result['points']:,} ranks, "
            f"error {result['error']:.1e}",
        }


def measure_long(options: argparse.Namespace) -> dict[str, Any]:
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
        dtype=getattr(torch, options.fresh),
    )
    model = LlamaForCausalLM(config).to(getattr(torch, options.fresh)).eval()
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
    result = measure_job(job, LocalEngine(model))
    return {
        "weights_bytes": before,
        "peak_bytes": memory_bytes("VmHWM") - before,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_utime - spent,
        "chunk": job.chunk_of(options.context),
        "points": int(result.ranks.size),
        "error": result.interpolation_error,
    }


if __name__ == "__main__":
    sys.exit(main())
