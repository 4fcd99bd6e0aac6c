"""What measuring losses costs: the fast estimate, every figure measured, and the whole profile.

    OMP_NUM_THREADS=1 python benchmarks/bench_loss.py [--model demo] [--prompts 2] [--context 1024]

On a few prompts, in one process: the plain profile (retention curves alone), the same with
`loss="fast"`, and a measured figure (one forward for one unit and level) in layers spread over the
depth, `BATCH` together. The targets are

- the profile with `loss="fast"` within 5 times the plain one, and
- all figures (KV heads x levels x 32 prompts) within 60 minutes on 2 cores.

The second is arithmetic from what was timed:

    seconds = prompts * (prefill + units * (levels - 1) * mean over layers of seconds a figure)

The last level keeps everything and is not run. All of it is processor time of one thread, which a
shared machine changes little, divided by the cores: figures of different prompts are independent.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from _common import Row, in_turns, parser_of, print_rows, spread_of

from kvalloc.measure import default_texts, profile
from kvalloc.measure.loss_plan import DEFAULT_SHARES
from kvalloc.measure.loss_probe import LossProbe
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.loading import LoadedModel, load_model, shape_of
from kvalloc.scorers import get_scorer
from kvalloc.shape import ModelShape

FAST_TARGET, MINUTES_TARGET = 5.0, 60.0
PROMPTS, CORES = 32, 2
BATCH = 8
DEPTHS = 6


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = rows_of(options, load_model(options.model))
    return print_rows(rows, options, "torch", "transformers", "kvalloc")


def rows_of(options: argparse.Namespace, loaded: LoadedModel) -> Iterator[Row]:
    """Return the row of the fast estimate, then that of every figure measured."""
    profiles = {
        name: partial(
            profile,
            loaded.model,
            loaded.tokenizer,
            default_texts(),
            samples=options.prompts,
            context=options.context,
            scorer="snapkv:window=32:pool=7",
            **loss,
        )
        for name, loss in {"plain": {}, "fast": {"loss": "fast", "loss_level": "head"}}.items()
    }
    timed = in_turns(profiles, repeats=options.repeats, warm_up=0)
    plain, fast = (timed[name][1] for name in ("plain", "fast"))
    yield {
        "name": "profile --loss fast / plain profile",
        **spread_of([one / other for one, other in zip(fast, plain, strict=True)]),
        "at_most": FAST_TARGET,
        "note": f"{options.prompts} prompts of {options.context:,} tokens, heads, {min(fast):.1f} "
        f"and {min(plain):.1f} s of processor time",
    }
    shape = shape_of(loaded.model, model_id=loaded.model_id)
    prefill, figure = figures(options, loaded, shape)
    heads, levels = len(shape.full_layers) * shape.n_kv_heads, len(DEFAULT_SHARES) + 1
    seconds = prefill + heads * (levels - 1) * figure
    yield {
        "name": f"all figures of {PROMPTS} prompts on {CORES} cores",
        "figure": PROMPTS * seconds / CORES / 60,
        "unit": "minutes",
        "at_most": MINUTES_TARGET,
        "note": f"{heads} heads x {levels} levels: {prefill:.1f} s to read a prompt + {heads} x "
        f"{levels - 1} x {1000 * figure:.0f} ms = {seconds:.0f} s of processor time a prompt",
    }


def figures(
    options: argparse.Namespace, loaded: LoadedModel, shape: ModelShape
) -> tuple[float, float]:
    """Return processor seconds of reading one prompt, and of one figure, mean over the depth."""
    chosen = choose_samples(
        default_texts(),
        loaded.tokenizer,
        context_tokens=options.context,
        least_tokens=options.context,
        samples=options.prompts,
    )
    scorer = get_scorer("snapkv", window=32, pool=7)
    reading, each = [], []
    layers = np.unique(np.linspace(0, len(shape.full_layers) - 1, DEPTHS).round().astype(int))
    for sample in chosen.samples:
        prompt, start = torch.from_numpy(sample.token_ids), time.process_time()
        probe: Any = LossProbe(loaded.model, prompt, scorer, sinks=4, shape=shape)
        reading.append(time.process_time() - start)
        size = (BATCH, shape.n_kv_heads, probe.n_tokens)
        keep = torch.rand(size, generator=torch.Generator().manual_seed(0)) < 0.3
        calls = {
            str(index): partial(probe.losses, shape.full_layers[index], keep) for index in layers
        }
        timed = in_turns(calls, repeats=options.repeats, warm_up=0)
        by_layer = [min(processor) / BATCH for _, processor in timed.values()]
        each.append(np.trapezoid(by_layer, layers) / (layers[-1] - layers[0]))
    return float(np.mean(reading)), float(np.mean(each))


if __name__ == "__main__":
    sys.exit(main())
