"""Profiling against the plain forward of the same prompts: time and peak memory.

    python benchmarks/bench_profile.py [--model demo] [--lengths 1024 2048 4096]

Time: both run in one process, in turns (A B, B A, A B, ...), on the same token ids; the figure is
the ratio of the medians, with the smallest and largest ratio of a pair. The plain forward is the
decoder without head and without cache (sdpa); profiling is the whole call of `kvalloc.profile`,
tokenising included.

Memory: each side in a fresh process. The weights are touched and a short prompt is run, then the
kernel's high-water mark of the resident set (VmHWM) is reset and read again after the call. The
figure is the peak above the resident set just before. glibc is told to give freed tensors back at
once (MALLOC_MMAP_THRESHOLD_), on both sides: otherwise the figure shows which holes the heap had,
and one and the same call varies by a factor of two. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from _common import in_turns, median_of, ratio_of

TIME_TARGET = 1.10
MEMORY_TARGET = 1.15
MIB = 2**20


def main() -> int:
    arguments = parse_arguments()
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments)))
        return 0
    rows = []
    loaded = load(arguments)
    for length in arguments.lengths:
        row = measure_time(arguments, loaded, length)
        row |= {
            f"{side}_peak_bytes": memory_in_fresh_process(arguments, side, length)
            for side in ("forward", "profile")
        }
        row["memory_ratio"] = row["profile_peak_bytes"] / row["forward_peak_bytes"]
        row["met"] = row["time_ratio"] <= TIME_TARGET and row["memory_ratio"] <= MEMORY_TARGET
        rows.append(row)
        print(describe(row), flush=True)
    return 0 if all(row["met"] for row in rows) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="profiling against the plain forward")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--scorer", default="xkv")
    parser.add_argument("--threads", type=int, help="torch threads; 1 on a machine that is shared")
    parser.add_argument("--memory-of", choices=("forward", "profile"), help=argparse.SUPPRESS)
    return parser.parse_args()


def load(arguments: argparse.Namespace) -> Any:
    import torch

    from kvalloc.models.loading import load_model

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return load_model(
        arguments.model, dtype=arguments.dtype, device=arguments.device, attention="sdpa"
    )


def sides(
    arguments: argparse.Namespace, loaded: Any, length: int
) -> dict[str, Callable[[], object]]:
    """Both calls, on the same tokens of the shipped text."""
    import torch

    from kvalloc.measure import Prompt, default_texts, profile
    from kvalloc.measure.sampling import choose_samples

    text = "\n\n".join(document.text for document in default_texts())[: length * 6]
    prompt = [Prompt(text=text)]
    chosen = choose_samples(prompt, loaded.tokenizer, context_tokens=length, least_tokens=length)
    ids = torch.from_numpy(chosen.samples[0].token_ids)[None].to(arguments.device)
    decoder = loaded.model.get_decoder()

    def forward() -> object:
        with torch.inference_mode():
            return decoder(input_ids=ids, use_cache=False)

    def profiling() -> object:
        return profile(
            loaded.model, loaded.tokenizer, prompt, context=length, scorer=arguments.scorer
        )

    return {"forward": forward, "profile": profiling}


def measure_time(arguments: argparse.Namespace, loaded: Any, length: int) -> dict[str, Any]:
    import torch

    def waited(call: Callable[[], object]) -> None:
        call()
        if arguments.device != "cpu":
            torch.accelerator.synchronize()

    calls = sides(arguments, loaded, length)
    found = in_turns(
        {name: lambda call=call: waited(call) for name, call in calls.items()},
        repeats=arguments.repeats,
    )
    pairs = [b / a for a, b in zip(found["forward"][0], found["profile"][0], strict=True)]
    return {
        "tokens": length,
        "forward_seconds": median_of(found, "forward"),
        "profile_seconds": median_of(found, "profile"),
        "time_ratio": median_of(found, "profile") / median_of(found, "forward"),
        "time_ratio_min": min(pairs),
        "time_ratio_max": max(pairs),
        "cpu_ratio": ratio_of(found, "profile", "forward")["processor_ratio"],
    }


def memory_in_fresh_process(arguments: argparse.Namespace, side: str, length: int) -> int:
    command = [sys.executable, __file__, "--memory-of", side, "--lengths", str(length)]
    for name in ("model", "device", "dtype", "scorer"):
        command += [f"--{name}", getattr(arguments, name)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(json.loads(run.stdout)["peak_bytes"])


def measure_memory(arguments: argparse.Namespace) -> dict[str, int]:
    import torch

    loaded = load(arguments)
    for weight in loaded.model.parameters():
        weight.sum()
    (length,) = arguments.lengths
    for call in sides(arguments, loaded, 128).values():
        call()
    call = sides(arguments, loaded, length)[arguments.memory_of]
    if arguments.device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        call()
        return {"peak_bytes": torch.accelerator.max_memory_allocated() - before}
    before = resident_bytes("VmRSS")
    with open("/proc/self/clear_refs", "w") as handle:
        handle.write("5")
    call()
    return {"peak_bytes": resident_bytes("VmHWM") - before}


def resident_bytes(field: str) -> int:
    with open("/proc/self/status") as handle:
        for line in handle:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def describe(row: dict[str, Any]) -> str:
    return (
        f"{row['tokens']:5d} tokens: "
        f"forward {row['forward_seconds']:.2f} s, profile {row['profile_seconds']:.2f} s, "
        f"ratio {row['time_ratio']:.3f} "
        f"({row['time_ratio_min']:.3f}..{row['time_ratio_max']:.3f}, target {TIME_TARGET}), "
        f"processor time {row['cpu_ratio']:.3f}; "
        f"peak {row['forward_peak_bytes'] / MIB:.0f} and {row['profile_peak_bytes'] / MIB:.0f} "
        f"MiB, ratio {row['memory_ratio']:.3f} (target {MEMORY_TARGET}); "
        f"{'met' if row['met'] else 'MISSED'}"
    )


if __name__ == "__main__":
    sys.exit(main())
