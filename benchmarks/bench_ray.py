"""Two Ray workers of one thread against this process with one: samples a second, and overhead.

    python benchmarks/bench_ray.py [--model demo] [--samples 8] [--context 1024] [--rounds 5]

Both have the model loaded. A round is `kvalloc.profile` on the same samples, without a file, in
turns; the figure is the ratio of samples a second, with its spread over the rounds. Then single
samples go to one of the workers, which says how long it measured: the overhead is all other time
from one result to the next, pickling and dispatch included, over that. Files of both must be the
same, byte for byte.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import in_turns, quartiles

import kvalloc
from kvalloc.engine.ray import RayEngine
from kvalloc.measure import default_texts
from kvalloc.measure.job import Job
from kvalloc.measure.profiling import _measure_group
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.loading import ModelSource
from kvalloc.scorers import get_scorer

SPEED_TARGET, OVERHEAD_TARGET = 1.6, 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = ModelSource(source=options.model)
    loaded = source.load()
    with RayEngine(source=source, workers=2, threads=1) as workers:
        ratio = compare(options, loaded, workers)
        overhead = overhead_of(options, loaded, workers)
    met = ratio >= SPEED_TARGET and overhead < OVERHEAD_TARGET
    print(f"wanted: at least {SPEED_TARGET} and under {OVERHEAD_TARGET:.0%}")
    return 0 if met else 1


def compare(options: argparse.Namespace, loaded: Any, workers: RayEngine) -> float:
    """Samples a second of two workers by those of one process, the median of the rounds."""

    def profile(model: Any, output: Path | None = None) -> None:
        kvalloc.profile(
            model,
            loaded.tokenizer,
            default_texts(),
            output=output,
            samples=options.samples,
            context=options.context,
            model_id=loaded.model_id,
        )

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("local", "ray")]
        for model, file in zip((loaded.model, workers), files, strict=True):
            profile(model, file)
        same = files[0].read_bytes() == files[1].read_bytes()
    print(f"{options.samples} samples of {options.context} tokens of {loaded.model_id}")
    print(f"both files are the same: {same}")
    assert same
    calls = {"local": partial(profile, loaded.model), "ray": partial(profile, workers)}
    seconds = in_turns(calls, repeats=options.rounds, warm_up=0)
    pairs = [one / two for one, two in zip(seconds["local"][0], seconds["ray"][0], strict=True)]
    for name, (own, _) in seconds.items():
        print(f"{name:>5}: {options.samples / statistics.median(own):.3f} samples a second")
    low, ratio, high = quartiles(pairs)
    print(
        f"ratio: {ratio:.2f}, quartiles {low:.2f}..{high:.2f}, extremes "
        f"{min(pairs):.2f}..{max(pairs):.2f}, {options.rounds} rounds"
    )
    return ratio


def timed(work: Any, model: Any, item: Any, advance: Any) -> tuple[float, Any]:
    """A result with the seconds that it took where it was measured."""
    start = time.perf_counter()
    found = work(model, item, advance)
    return time.perf_counter() - start, found


def overhead_of(options: argparse.Namespace, loaded: Any, workers: RayEngine) -> float:
    """Time outside the measurement by time inside it, of one worker, the median of the samples."""
    scorer = get_scorer("xkv")
    samples = choose_samples(
        default_texts(),
        loaded.tokenizer,
        context_tokens=options.context,
        least_tokens=options.context,
        samples=options.samples,
    )
    job = Job(
        shape=workers.facts().shape,
        scorer=scorer,
        sinks=4,
        context_tokens=options.context,
        samples=samples,
    )
    work = partial(timed, partial(_measure_group, job))
    shares = []
    for _ in range(options.rounds):
        for number in range(options.samples):  # one at a time, so that one worker is at it
            start = time.perf_counter()
            ((_, (inside, _)),) = workers.run(work, {number: [number]}, lambda steps: None)
            shares.append((time.perf_counter() - start - inside) / inside)
    low, middle, high = quartiles(shares)
    print(f"overhead of a sample: {middle:.2%}, quartiles {low:.2%}..{high:.2%}")
    return middle


if __name__ == "__main__":
    raise SystemExit(main())
