"""A reduced cache against a plain one: prefill with eviction, decoding, bytes.

    python benchmarks/bench_runtime.py [--lengths 1024 4096] [--device cuda --dtype bfloat16]

Budgets of layers and of heads, for one prompt or a batch of them (``--batch 4``). The target is
that of layer-level budgets: prefill with eviction at most 1.08x the plain prefill.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import resources
from typing import Any

import torch
from _common import describe_where, ratios, summary, timed_in_turns, where_it_ran
from transformers import DynamicCache

import kvalloc
from kvalloc.models import load_model

PREFILL_LIMIT = 1.08


def main() -> int:
    arguments = parse_arguments()
    loaded = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
    ids = prompt_ids(loaded, max(arguments.lengths))
    scores = kvalloc.profile(loaded.model, loaded.tokenizer, [text()], samples=1, context=512)
    profiles = {
        level: kvalloc.solve(scores, budget=arguments.share, level=level)
        for level in ("layer", "head")
    }
    where = where_it_ran("kvalloc", "torch", "transformers")
    rows = [
        measure(loaded.model, profiles, ids[:, :length], arguments) for length in arguments.lengths
    ]
    if arguments.json:
        print(json.dumps({"rows": rows, "where": where}, indent=1))
    else:
        print(describe_where(where))
        device = arguments.device or "cpu"
        batch = f"batch {arguments.batch}, {arguments.dtype} on {device}"
        print(f"{arguments.share} kept, {profiles['layer'].decided_by}, {batch}")
        for row in rows:
            for level in profiles:
                print(describe(row, level))
    return 0 if all(row["met"] for row in rows) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a reduced cache against a plain one")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--share", default="20%")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def text() -> str:
    folder = resources.files("kvalloc.data.texts")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("profile_"))
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def prompt_ids(loaded: Any, length: int) -> torch.Tensor:
    ids = loaded.tokenizer(text(), return_tensors="pt")["input_ids"][:, :length]
    return ids.to(loaded.model.device)


@torch.inference_mode()
def measure(
    model: Any, profiles: dict[str, Any], ids: torch.Tensor, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Prefill and decoding of one prompt with a plain and the reduced caches, in turns."""
    ids = ids.repeat(arguments.batch, 1)

    def prefill(cache: Any) -> Any:
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        synchronize()
        return cache

    def decode(cache: Any) -> None:
        token = ids[:, -1:]
        for _ in range(arguments.new_tokens):
            model(input_ids=token, past_key_values=cache)
        synchronize()

    def synchronize() -> None:
        if ids.is_cuda:
            torch.cuda.synchronize()

    make = {
        "plain": lambda: DynamicCache(config=model.config),
        **{level: lambda one=one: one.cache(model) for level, one in profiles.items()},
    }
    prefilled = timed_in_turns(
        {name: lambda new=new: prefill(new()) for name, new in make.items()},
        repeats=arguments.repeats,
    )
    caches = {name: prefill(new()) for name, new in make.items()}
    retained = {level: caches[level].retained_bytes for level in profiles}
    full = caches["layer"].full_bytes
    decoded = timed_in_turns(
        {name: lambda cache=cache: decode(cache) for name, cache in caches.items()},
        repeats=arguments.repeats,
    )
    prefill_ratios = {level: ratios(prefilled, level, "plain") for level in profiles}
    return {
        "tokens": ids.shape[1],
        "retained_bytes": retained,
        "full_bytes": full,
        "prefill": {name: summary(seconds) for name, seconds in prefilled.items()},
        "prefill_ratio": prefill_ratios,
        "decode": {name: summary(seconds) for name, seconds in decoded.items()},
        "decode_speedup": {level: ratios(decoded, "plain", level) for level in profiles},
        "met": prefill_ratios["layer"]["ratio"] <= PREFILL_LIMIT,
    }


def describe(row: dict[str, Any], level: str) -> str:
    prefill, decode = row["prefill_ratio"][level], row["decode_speedup"][level]
    return (
        f"{row['tokens']:>5} tokens, by {level}: prefill {prefill['ratio']:.3f}x plain "
        f"[{prefill['ratio_quartile_1']:.3f}, {prefill['ratio_quartile_3']:.3f}] "
        f"({row['prefill']['plain']['median_seconds']:.2f} s), target <= {PREFILL_LIMIT}; "
        f"decode {decode['ratio']:.2f}x as fast "
        f"[{decode['ratio_quartile_1']:.2f}, {decode['ratio_quartile_3']:.2f}]; "
        f"{row['retained_bytes'][level]:,} of {row['full_bytes']:,} bytes"
    )


if __name__ == "__main__":
    sys.exit(main())
