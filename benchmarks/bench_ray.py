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
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import Row, in_turns, median_of, parser_of, print_rows, spread_of

import kvalloc
from kvalloc.engine.ray import RayEngine
from kvalloc.measure import default_texts
from kvalloc.measure.job import Job
from kvalloc.measure.profiling import _measure_group
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.loading import ModelSource
from kvalloc.scorers import get_scorer

SPEED_TARGET, OVERHEAD_TARGET = 1.6, 3.0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    return print_rows(rows_of(options), options, "ray", "torch", "transformers", "kvalloc")


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """Return the rows of both comparisons."""
    torch.set_num_threads(1)
    source = ModelSource(source=options.model)
    loaded = source.load()
    with RayEngine(source=source, workers=2, threads=1) as workers:
        yield compare(options, loaded, workers)
        yield overhead_of(options, loaded, workers)


def compare(options: argparse.Namespace, loaded: Any, workers: RayEngine) -> Row:
    """Compare samples a second of two workers with those of one process."""

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
        if files[0].read_bytes() != files[1].read_bytes():
            raise ValueError("the workers' file is not that of one process")
    calls = {"local": partial(profile, loaded.model), "ray": partial(profile, workers)}
    seconds = in_turns(calls, repeats=options.rounds, warm_up=0)
    alone, together = (options.samples / median_of(seconds, name) for name in calls)
    pairs = [one / two for one, two in zip(seconds["local"][0], seconds["ray"][0], strict=True)]
    return {
        "name": "two workers / one process, samples a second",
        **spread_of(pairs),
        "at_least": SPEED_TARGET,
        "note": f"{together:.3f} and {alone:.3f} samples of {options.context:,} tokens a second; "
        "both files are the same",
    }


def timed(work: Any, model: Any, item: Any, advance: Any) -> tuple[float, Any]:
    """Return a result with the seconds that it took where it was measured."""
    start = time.perf_counter()
    found = work(model, item, advance)
    return time.perf_counter() - start, found


def overhead_of(options: argparse.Namespace, loaded: Any, workers: RayEngine) -> Row:
    """Compare the time outside the measurement with that inside it, sample by sample."""
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
            shares.append(100 * (time.perf_counter() - start - inside) / inside)
    return {
        "name": "overhead of a sample",
        **spread_of(shares),
        "unit": "%",
        "at_most": OVERHEAD_TARGET,
        "note": "pickling and dispatch over the measurement",
    }


if __name__ == "__main__":
    raise SystemExit(main())
