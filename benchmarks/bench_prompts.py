"""Budgets for each prompt: what deciding takes beside a plain prefill.

    python benchmarks/bench_prompts.py [--lengths 1024 2048 4096] [--repeats 5]

Prefill of one prompt with a plain cache, with a stored profile, with that profile moved by the
prompt (``adapt``), and with budgets decided from the prompt alone, with the whole prompt measured,
with a part of it, and from the held prompt itself; in turns, in one process. Some five minutes on
two cores; a length of 4,096 takes ten more.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from _common import describe_where, ratios, summary, timed_in_turns, where_it_ran
from bench_runtime import prompt_ids, text
from transformers import DynamicCache

import kvalloc
from kvalloc.models.loading import load_model
from kvalloc.online.per_prompt import PromptTarget, make_adapting_cache, make_prompt_cache

ADAPT = 0.25


def main() -> int:
    arguments = parse_arguments()
    loaded = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
    ids = prompt_ids(loaded, max(arguments.lengths))
    scores = kvalloc.profile(loaded.model, loaded.tokenizer, [text()], samples=1, context=512)
    profile = kvalloc.solve(scores, budget=arguments.share, level=arguments.level)
    where = where_it_ran("kvalloc", "torch", "transformers")
    rows = [
        measure(loaded.model, profile, ids[:, :length], arguments) for length in arguments.lengths
    ]
    if arguments.json:
        print(json.dumps({"rows": rows, "where": where}, indent=1))
        return 0
    print(describe_where(where))
    print(f"{arguments.share} kept, {arguments.level} level, {arguments.dtype}")
    for row in rows:
        print(describe(row))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="budgets for each prompt, against plain prefill")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--measured-tokens", type=int, default=512)
    parser.add_argument("--share", default="20%")
    parser.add_argument("--level", default="layer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


@torch.inference_mode()
def measure(
    model: Any, profile: Any, ids: torch.Tensor, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Prefill of one prompt in each way, in turns; and what deciding alone took."""
    options = {"budget": arguments.share, "level": arguments.level}
    part = arguments.measured_tokens
    target = PromptTarget.parse(**options)
    sampled = PromptTarget.parse(**options, measured_tokens=part)
    held = PromptTarget.parse(**options, hold=True)
    make = {
        "plain": lambda: DynamicCache(config=model.config),
        "stored": lambda: kvalloc.make_cache(model, profile),
        "adapted": lambda: make_adapting_cache(model, profile, adapt=ADAPT),
        "adapted, part": lambda: make_adapting_cache(
            model, profile, adapt=ADAPT, measured_tokens=part
        ),
        "adapted, held": lambda: make_adapting_cache(model, profile, adapt=ADAPT, hold=True),
        "decided": lambda: make_prompt_cache(model, target),
        "decided, part": lambda: make_prompt_cache(model, sampled),
        "decided, held": lambda: make_prompt_cache(model, held),
    }

    def prefill(cache: Any) -> Any:
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        if ids.is_cuda:
            torch.cuda.synchronize()
        return cache

    seconds = timed_in_turns(
        {name: lambda new=new: prefill(new()) for name, new in make.items()},
        repeats=arguments.repeats,
    )
    deciding = {name: prefill(make[name]()).decision_seconds for name in make if name != "plain"}
    return {
        "tokens": ids.shape[1],
        "measured_tokens": part,
        "prefill": {name: summary(times) for name, times in seconds.items()},
        "ratio": {name: ratios(seconds, name, "plain") for name in make if name != "plain"},
        "decision_seconds": deciding,
    }


def describe(row: dict[str, Any]) -> str:
    plain = row["prefill"]["plain"]["median_seconds"]
    lines = [f"{row['tokens']:>5} tokens: plain prefill {plain:.2f} s"]
    for name, found in row["ratio"].items():
        name = name.replace(", part", f", {row['measured_tokens']} tokens measured")
        lines.append(
            f"      {name}: {found['ratio']:.3f}x plain "
            f"[{found['ratio_quartile_1']:.3f}, {found['ratio_quartile_3']:.3f}]"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
