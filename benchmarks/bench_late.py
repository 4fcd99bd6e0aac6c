"""Late eviction: what it takes beside a full cache, and what bounded memory loses.

    python benchmarks/bench_late.py [--lengths 2048 8192] [--repeats 5] [--profile NAME]

With the default's late way at 20% of the bytes, or a profile that waits for tokens after the
prompt: prefill and 64 greedy tokens over the same with a full cache, in turns; the eviction itself
(`cache.evict`) over the prefill; K and V bytes held and stored over those of the full cache; and
KL(full cache || reduced cache) of the 64 tokens after the eviction, for late eviction and for
eviction bounded to twice the budget first. Then what the default's other ways cost at 20% of the
bytes. Real text, SmolLM2-135M. Some twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from _common import describe_where, ratios, timed_in_turns, where_it_ran
from bench_runtime import prompt_ids
from transformers import DynamicCache

import kvalloc
from kvalloc.models.loading import LoadedModel, load_model, shape_of
from kvalloc.models.structure import context_limit
from kvalloc.online.default import PIECE, Default, Way

NEW, SHARE = 64, 0.2
TARGETS: dict[Way, float] = {"decided": 1.15, "surrogate": 1.15, "twice": 2.5, "early": 1.10}
"""What a prefill may cost over a plain one."""


def main() -> int:
    arguments = parse_arguments()
    loaded = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
    named, shape = arguments.profile, shape_of(loaded.model, model_id=loaded.model_id)
    late = Default(share=SHARE).profile(shape, None, "late")
    profile = late if named is None else kvalloc.load_profile(named)
    ids = prompt_ids(loaded, max(*arguments.lengths, arguments.kl_tokens * arguments.samples))
    where = where_it_ran("kvalloc", "torch", "transformers")
    rows = [
        speed(loaded.model, profile, ids[:, :length], arguments.repeats)
        for length in arguments.lengths
    ]
    losses = harm(loaded.model, profile, ids, arguments)
    if arguments.json:
        print(json.dumps({"speed": rows, "kl": losses, "where": where}, indent=1))
        return 0
    print(describe_where(where))
    print(f"{named or f'{SHARE:.0%} of the bytes by default, late'}, {arguments.dtype}")
    for row in rows:
        print(describe(row))
    for length in arguments.lengths:
        for line in default_ways(loaded, ids[:, :length], arguments.repeats):
            print(line, flush=True)
    print(
        f"KL of {NEW} tokens after the eviction, {arguments.samples} texts of "
        f"{arguments.kl_tokens} tokens: late {losses['late']:.5f}, bounded to twice the budget "
        f"{losses['bounded']:.5f} nats a token, {losses['bounded'] / losses['late']:.2f}x "
        f"(text by text {min(losses['ratios']):.2f} to {max(losses['ratios']):.2f})"
    )
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="late eviction, against a full cache")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", help="one that waits; the default's late way without it")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--kl-tokens", type=int, default=1000)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def full(model: Any) -> Any:
    return DynamicCache(config=model.config)


@torch.inference_mode()
def written(model: Any, cache: Any, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, Any]:
    """A prompt and so many greedy tokens after it, one by one."""
    tokens = [ids[:, :0]]
    for number in range(new + 1):
        ids = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        if number < new:
            tokens.append(ids)
    return torch.cat(tokens, dim=1), cache


@torch.inference_mode()
def speed(model: Any, profile: Any, ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Times of prefill and answer in turns, of the eviction alone, and stored bytes."""
    make = {"full": lambda: full(model), "late": lambda: profile.cache(model)}
    runs = {name: (lambda new=new: written(model, new(), ids, NEW)) for name, new in make.items()}
    seconds = timed_in_turns(runs, repeats=repeats)
    prefills, evictions = [], []
    for _ in range(repeats):
        cache = profile.cache(model)
        begun = time.perf_counter()
        out = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        prefills.append(time.perf_counter() - begun)
        awaited = cache.awaited_tokens
        while cache.awaited_tokens > 1:
            out = model(input_ids=out, past_key_values=cache).logits.argmax(-1)
        before, full_bytes = cache.retained_bytes, cache.full_bytes
        begun = time.perf_counter()
        cache.evict()
        evictions.append(time.perf_counter() - begun)
    shares = np.array(evictions) / np.array(prefills)
    return {
        "tokens": ids.shape[1],
        "awaited": awaited,
        "ratio": ratios(seconds, "late", "full"),
        "eviction_share": [float(np.median(shares)), float(shares.min()), float(shares.max())],
        "prefill_seconds": float(np.median(prefills)),
        "held_over_full": before / full_bytes,
        "stored_over_full": cache.retained_bytes / full_bytes,
    }


def default_ways(loaded: LoadedModel, ids: torch.Tensor, repeats: int) -> Iterator[str]:
    """What a prompt and 64 tokens cost by each way of the default, over a full cache."""
    model, shape = loaded.model, shape_of(loaded.model, model_id=loaded.model_id)
    limit = context_limit(model) or ids.shape[1] + PIECE
    ids = ids[:, : limit - PIECE - NEW]  # room for the second read
    default, make = Default(share=SHARE), {"full": lambda: full(model)}
    for way in TARGETS:
        _, shipped = default.decided(shape, ids.shape[1])
        if way != "decided" or shipped is None:
            shipped = default.profile(shape, ids.shape[1], way)
        make[way] = partial(shipped.cache, model)
    runs = {name: (lambda new=new: written(model, new(), ids, NEW)) for name, new in make.items()}
    seconds = timed_in_turns(runs, repeats=repeats)
    alone = {
        f"{name}, prefill": (lambda new=new: written(model, new(), ids, 0))
        for name, new in make.items()
    }
    seconds |= timed_in_turns(alone, repeats=repeats)
    for way, target in TARGETS.items():
        found = ratios(seconds, way, "full")
        prefill = ratios(seconds, f"{way}, prefill", "full, prefill")
        yield (
            f"{ids.shape[1]:>5} tokens, {SHARE:.0%} of the bytes by default, {way}: prefill over a "
            f"plain one {prefill['ratio']:.3f} [{prefill['ratio_quartile_1']:.3f}, "
            f"{prefill['ratio_quartile_3']:.3f}] (target {target:.2f}), with {NEW} tokens "
            f"{found['ratio']:.3f}"
        )


@torch.inference_mode()
def harm(
    model: Any, profile: Any, ids: torch.Tensor, arguments: argparse.Namespace
) -> dict[str, Any]:
    """KL along what the full cache writes, after the tokens that are waited for."""
    found: dict[str, list[float]] = {"late": [], "bounded": []}
    for place in range(arguments.samples):
        first = place * arguments.kl_tokens
        prompt = ids[:, first : first + arguments.kl_tokens]
        waits = profile.cache(model)
        model(input_ids=prompt, past_key_values=waits, logits_to_keep=1)
        awaited = waits.awaited_tokens
        answer, _ = written(model, full(model), prompt, awaited + NEW)
        head, tail = answer[:, :awaited], answer[:, awaited:]
        plain, logits = full(model), {}
        for name, cache in (
            ("full", plain),
            ("late", profile.cache(model)),
            ("bounded", profile.cache(model, bounded=2)),
        ):
            model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
            model(input_ids=head, past_key_values=cache, logits_to_keep=1)
            said = model(input_ids=tail, past_key_values=cache).logits[0]
            logits[name] = said.float().log_softmax(-1)
        for name, own in found.items():
            terms = logits["full"].exp() * (logits["full"] - logits[name])
            own.append(float(terms.sum(-1).mean()))
    return {
        "late": float(np.mean(found["late"])),
        "bounded": float(np.mean(found["bounded"])),
        "ratios": [b / a for a, b in zip(found["late"], found["bounded"], strict=True)],
    }


def describe(row: dict[str, Any]) -> str:
    ratio, (share, least, most) = row["ratio"], row["eviction_share"]
    return (
        f"{row['tokens']:>5} tokens: prefill and {NEW} tokens {ratio['ratio']:.3f}x a full cache "
        f"[{ratio['ratio_quartile_1']:.3f}, {ratio['ratio_quartile_3']:.3f}] (target 1.05), "
        f"evicting after {row['awaited']} tokens {share:.3f} of the prefill of "
        f"{row['prefill_seconds']:.2f} s [{least:.3f}, {most:.3f}] (target 0.15); K and V held "
        f"{row['held_over_full']:.3f} of the full cache's, stored {row['stored_over_full']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
