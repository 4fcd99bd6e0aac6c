"""Profiling against the plain forward of the same prompts: time and peak memory.

    python benchmarks/bench_profile.py [--model demo] [--lengths 1024 2048 4096]

Time: both run in one process, in turns (A B, B A, A B, ...), on the same token ids; the figure is
the median of the ratios of each round. The plain forward is the decoder without head and without
cache (sdpa); profiling is the whole call of `kvalloc.profile`, tokenising included.

Memory: each side in a fresh process. The weights are touched and a short prompt is run, then the
kernel's high-water mark of the resident set (VmHWM) is reset and read again after the call. The
figure is the peak above the resident set just before. glibc is told to give freed tensors back at
once (MALLOC_MMAP_THRESHOLD_), on both sides: otherwise the figure shows which holes the heap had,
and one and the same call varies by a factor of two. Linux only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator

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

from kvalloc.measure import Prompt, default_texts, profile
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.loading import LoadedModel, load_model

TIME_TARGET, MEMORY_TARGET = 1.10, 1.15
MIB = 2**20


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--scorer", default="xkv")
    parser.add_argument("--memory-of", choices=("forward", "profile"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    loaded = load_model(options.model, attention="sdpa")
    if options.memory_of:
        print(json.dumps(measure_memory(options, loaded)))
        return 0
    rows = (row for length in options.lengths for row in rows_of(options, loaded, length))
    return print_rows(rows, options, "torch", "transformers", "kvalloc")


def rows_of(options: argparse.Namespace, loaded: LoadedModel, length: int) -> Iterator[Row]:
    """Return the rows of a prompt's length: time and memory."""
    timed = in_turns(sides(options, loaded, length), repeats=options.repeats)
    forward, profiling = (median_of(timed, side) for side in ("forward", "profile"))
    yield {
        "name": f"{length} tokens, time: profile / forward",
        **ratio_of(timed, "profile", "forward"),
        "at_most": TIME_TARGET,
        "note": f"{profiling:.2f} and {forward:.2f} s",
    }
    words = ("--lengths", str(length), "--model", options.model, "--scorer", options.scorer)
    forward, profiling = (
        in_fresh_process(__file__, "--memory-of", side, *words, MALLOC_MMAP_THRESHOLD_="65536")
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


def measure_memory(options: argparse.Namespace, loaded: LoadedModel) -> int:
    """Return the bytes that one side takes at its peak, above what was there before."""
    for weight in loaded.model.parameters():
        weight.sum()
    (length,) = options.lengths
    for call in sides(options, loaded, 128).values():
        call()
    call = sides(options, loaded, length)[options.memory_of]
    before = memory_bytes("VmRSS")
    reset_peak()
    call()
    return memory_bytes("VmHWM") - before


if __name__ == "__main__":
    sys.exit(main())
