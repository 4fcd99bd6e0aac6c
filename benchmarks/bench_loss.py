"""What measuring losses costs: the fast estimate, every figure measured, and the whole profile.

    python benchmarks/bench_loss.py [--model demo] [--prompts 2] [--context 1024]

On a few prompts, in one process: the plain profile (retention curves alone), the same with
`loss="fast"`, and a measured figure (one forward for one unit and level) in layers spread over the
depth, `BATCH` together. The targets are

- the profile with `loss="fast"` within 5 times the plain one, and
- all figures (KV heads x levels x 32 prompts) within 60 minutes on 2 cores.

The second is arithmetic from what was timed:

    seconds = prompts * (prefill + units * (levels - 1) * mean over layers of seconds a figure)

The last level keeps everything and is not run. With `--threads 1`, processor time is divided by
the cores: figures of different prompts are independent, so two processes share the work.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from _common import describe_where, where_it_ran

FAST_TARGET = 5.0
MINUTES_TARGET = 60.0
PROMPTS = 32
BATCH = 8
DEPTHS = 6


def main() -> int:
    arguments = parse_arguments()
    rows = measure(arguments)
    print(describe_where(where_it_ran("torch", "transformers", "kvalloc")))
    for row in rows:
        print(row["text"])
    return 0 if all(row["met"] for row in rows) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="cost of measuring losses")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2, help="cores that the target is for")
    parser.add_argument("--threads", type=int, help="torch threads; 1 on a machine that is shared")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from kvalloc.models.loading import load_model, shape_of

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    loaded = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
    shape = shape_of(loaded.model, model_id=loaded.model_id)
    plain, fast = profiles(arguments, loaded)
    rows = [fast_row(arguments, plain, fast)]
    prefill, figure = figures(arguments, loaded, shape)
    rows.append(measured_row(arguments, len(shape.full_layers) * shape.n_kv_heads, prefill, figure))
    return rows


def profiles(arguments: argparse.Namespace, loaded: Any) -> tuple[list[float], list[float]]:
    """Processor seconds of the plain profile and of that with the fast estimate, in turns."""
    from kvalloc.measure import default_texts, profile

    texts = default_texts()

    def run(loss: str | None) -> None:
        options: dict[str, Any] = {} if loss is None else {"loss": loss, "loss_level": "head"}
        profile(
            loaded.model,
            loaded.tokenizer,
            texts,
            samples=arguments.prompts,
            context=arguments.context,
            scorer="snapkv",
            window=32,
            pool=7,
            **options,
        )

    plain, fast = [], []
    for _ in range(arguments.repeats):
        plain.append(processor_seconds(lambda: run(None), arguments.device))
        fast.append(processor_seconds(lambda: run("fast"), arguments.device))
    return plain, fast


def figures(arguments: argparse.Namespace, loaded: Any, shape: Any) -> tuple[float, float]:
    """Processor seconds of reading one prompt, and of one figure on the mean over the depth."""
    import numpy as np
    import torch

    from kvalloc.measure import default_texts
    from kvalloc.measure.loss_probe import LossProbe
    from kvalloc.measure.sampling import choose_samples
    from kvalloc.scorers import get_scorer

    chosen = choose_samples(
        default_texts(),
        loaded.tokenizer,
        context_tokens=arguments.context,
        least_tokens=arguments.context,
        samples=arguments.prompts,
    )
    scorer = get_scorer("snapkv", window=32, pool=7)
    reading, each = [], []
    layers = np.unique(np.linspace(0, len(shape.full_layers) - 1, DEPTHS).round().astype(int))
    for ids in (sample.token_ids for sample in chosen.samples):
        held: dict[str, LossProbe] = {}

        def read(ids: Any = ids, held: dict[str, LossProbe] = held) -> None:
            prompt = torch.from_numpy(ids).to(arguments.device)
            held["probe"] = LossProbe(loaded.model, prompt, scorer, sinks=4, shape=shape)

        reading.append(processor_seconds(read, arguments.device))
        probe, generator = held["probe"], torch.Generator().manual_seed(0)
        size = (BATCH, shape.n_kv_heads, probe.n_tokens)
        keep = (torch.rand(size, generator=generator) < 0.3).to(arguments.device)
        by_layer = []
        for layer in (shape.full_layers[index] for index in layers):

            def one(layer: int = layer, probe: LossProbe = probe, keep: Any = keep) -> None:
                probe.losses(layer, keep)

            timed = [processor_seconds(one, arguments.device) for _ in range(arguments.repeats)]
            by_layer.append(min(timed) / BATCH)
        each.append(np.trapezoid(by_layer, layers) / (layers[-1] - layers[0]))
    return sum(reading) / len(reading), float(sum(each) / len(each))


def processor_seconds(call: Callable[[], object], device: str) -> float:
    """Processor time on the CPU, which a shared machine changes little; wall time elsewhere."""
    import torch

    if device != "cpu":
        torch.accelerator.synchronize()
        start = time.perf_counter()
        call()
        torch.accelerator.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    call()
    return time.process_time() - start


def fast_row(
    arguments: argparse.Namespace, plain: list[float], fast: list[float]
) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(plain, fast, strict=True)]
    ratio = min(fast) / min(plain)
    text = (
        f"fast: {arguments.prompts} prompts of {arguments.context:,} tokens, plain profile "
        f"{min(plain):.1f} s, with --loss fast (heads) {min(fast):.1f} s of processor time: "
        f"{ratio:.2f} times (single runs {min(ratios):.2f} to {max(ratios):.2f}, "
        f"target {FAST_TARGET:g}) {'met' if ratio <= FAST_TARGET else 'NOT MET'}"
    )
    return {"name": "fast", "ratio": ratio, "met": ratio <= FAST_TARGET, "text": text}


def measured_row(
    arguments: argparse.Namespace, heads: int, prefill: float, figure: float
) -> dict[str, Any]:
    from kvalloc.measure.loss_plan import DEFAULT_SHARES

    levels = len(DEFAULT_SHARES) + 1
    a_prompt = prefill + heads * (levels - 1) * figure
    share = arguments.cores if arguments.device == "cpu" else 1
    minutes = PROMPTS * a_prompt / share / 60
    text = (
        f"measured: {heads} heads x {levels} levels: {prefill:.1f} s to read a prompt + "
        f"{heads} x {levels - 1} x {1000 * figure:.0f} ms = {a_prompt:.0f} s of processor "
        f"time a prompt; {PROMPTS} prompts on {share} cores: {minutes:.0f} minutes (target "
        f"{MINUTES_TARGET:g}) {'met' if minutes <= MINUTES_TARGET else 'NOT MET'}"
    )
    return {"met": minutes <= MINUTES_TARGET, "text": text}


if __name__ == "__main__":
    sys.exit(main())
