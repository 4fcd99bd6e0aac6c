"""Predictions of `kvalloc plan` beside measurements of its settings: a part of `bench_runtime`.

    python benchmarks/bench_runtime.py plan [--memory 256MiB] [--prompt 4096] [--answer 256]

The best settings of the plan and the plain cache in the same memory each read the prompt in one
row, which is then repeated, and answer: in turns, a few tokens at a time, until every answer is
complete and back within its budget. The order of the settings, their tokens a second, and those of
the first one over the plain cache's are compared with what was predicted before. Some eight
minutes on one core.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from _common import Row, in_turns, parser_of, print_rows, spread_of
from bench_runtime import count, prompt_ids
from runtime_rows import decode, prefill, stored_bytes
from transformers import DynamicCache

import kvalloc
from kvalloc.models.loading import load_model
from kvalloc.online.planning import BatchPlan, PlannedBatch, plan_batch
from kvalloc.online.solved import grid_length, solve_share
from kvalloc.units import size

THROUGHPUT_TARGET, WITHIN = 4.0, 1.25
PIECE = 8
"""Tokens that a setting answers in its turn."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--prompt", type=count, default=4096)
    parser.add_argument("--answer", type=count, default=256)
    parser.add_argument("--target-loss", type=float, default=0.01)
    if parser.parse_args().quick:
        parser.set_defaults(memory="32MiB", prompt=400, answer=64)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model)
    return print_rows(compared(loaded, arguments), arguments, "kvalloc", "torch", "transformers")


def compared(loaded: Any, arguments: Any) -> Iterator[Row]:
    """Give the rows of a plan and of its settings."""
    model, request = loaded.model, ("memory", "prompt", "answer", "target_loss")
    plan = plan_batch(model, **{name: getattr(arguments, name) for name in request})
    assert plan.plain is not None, "give a memory that takes a plain row"
    settings = [*plan.best, plan.plain]
    ids = prompt_ids(loaded, arguments.prompt)
    caches = {name_of(one): cache_of(model, plan, one, ids) for one in settings}
    rows = {name_of(one): one.rows for one in settings}
    peaks = dict.fromkeys(caches, 0)

    def answer(name: str) -> None:
        decode(model, caches[name], rows[name], PIECE)
        peaks[name] = max(peaks[name], stored_bytes(caches[name]))

    timed = in_turns(
        {name: partial(answer, name) for name in caches},
        repeats=arguments.answer // PIECE,
        warm_up=0,
    )
    reduced = {name: item for name, item in caches.items() if name != name_of(plan.plain)}
    ended = in_turns({name: item.end_turn for name, item in reduced.items()}, repeats=1, warm_up=0)
    speed, tokens = {}, arguments.answer // PIECE * PIECE
    for one in settings:
        name = name_of(one)
        seconds = sum(timed[name][0]) + sum(ended[name][0] if name in ended else [])
        speed[name] = one.rows * tokens / seconds
        yield {
            "name": f"{name}, predicted and measured tokens a second, larger / smaller",
            "figure": max(one.tokens_per_second, speed[name])
            / min(one.tokens_per_second, speed[name]),
            "at_most": WITHIN,
            "note": f"{one.tokens_per_second:.1f} and {speed[name]:.1f} tokens/s; predicted loss "
            f"{one.predicted_loss:.2g}; {size(peaks[name])} seen of {size(one.peak_bytes)}",
        }
    first, plain = name_of(plan.best[0]), name_of(plan.plain)
    per_token = {name: [s / rows[name] for s in timed[name][0]] for name in (first, plain)}
    steps = spread_of([a / b for a, b in zip(per_token[plain], per_token[first], strict=True)])
    yield {
        "name": "the plan's first setting / plain in the same memory, tokens a second",
        "figure": speed[first] / speed[plain],
        "at_least": THROUGHPUT_TARGET,
        "note": f"{arguments.memory}, {arguments.prompt:,} and {arguments.answer:,} tokens, "
        f"predicted {plan.best[0].tokens_per_second / plan.plain.tokens_per_second:.2f}; steps "
        f"alone {steps['figure']:.2f}",
    }
    pairs = [*itertools.combinations(plan.best, 2)]
    yield {
        "name": "pairs of the plan's settings that were measured in another order",
        "figure": sum(speed[name_of(one)] < speed[name_of(other)] for one, other in pairs),
        "at_most": 0,
        "note": f"of {len(pairs)}",
    }


def name_of(one: PlannedBatch) -> str:
    """Return the name of a setting in the rows."""
    several = f"{one.rows} row{'s' * (one.rows > 1)}"
    return f"{several} at {one.share:.1%}" if one.share < 1 else f"{several} of a plain cache"


def cache_of(model: Any, plan: BatchPlan, one: PlannedBatch, ids: Any) -> Any:
    """Return a cache of a setting that has read the prompt in all its rows."""
    cache: Any = DynamicCache(config=model.config)
    if one is not plan.plain:
        solved = solve_share(plan.fitted, one.share, grid_length(ids.shape[1]))
        assert solved is not None
        cache = kvalloc.make_cache(model, solved)
    prefill(model, cache, ids).batch_repeat_interleave(one.rows)
    return cache


if __name__ == "__main__":
    raise SystemExit(main())
