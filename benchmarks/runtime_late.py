"""The default's ways: what they cost beside a full cache, what bounded memory loses.

    python benchmarks/bench_runtime.py late [--lengths 2048 8192] [--repeats 5 2]

At 20% of the bytes: a prefill by each way over a plain one, in turns; and KL(full cache || reduced
cache) of 64 tokens for the way that holds the full cache while a prompt is read, and those for
bounded memory. Real text, SmolLM2-135M. Some twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from _common import Row, in_turns, parser_of, print_rows, ratio_of, spread_of
from bench_runtime import prompt_ids
from transformers import DynamicCache

from kvalloc.measure.kl import Predictions
from kvalloc.models.loading import LoadedModel, load_model, shape_of
from kvalloc.models.structure import context_limit
from kvalloc.online.default import Default
from kvalloc.online.methods import PIECE, Immediate, Method, SecondRead, Setting, Solved, method_for
from kvalloc.prompts.intervals import resampled_means
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.shape import ModelShape

NEW, SHARE = 64, 0.2
TARGETS = {"decided": 1.12, "twice": 2.5, "early": 1.10}
"""What a prefill may cost over a plain one."""
PAIRS = [
    (("twice", True), ("decided", True)),
    (("twice", True), ("early", True)),
    (("twice", False), ("early", False)),
]
"""The way that holds the full cache, and what is done in bounded memory; and whether the model was
measured: else votes choose in bounded memory."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--repeats", type=int, nargs="+", default=[5, 2], help="of each length")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--kl-tokens", type=int, default=1000)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
    return print_rows(rows_of(loaded, arguments), arguments, "kvalloc", "torch", "transformers")


def rows_of(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[Row]:
    """Return the rows of every length, then the rows of the loss."""
    ids = prompt_ids(loaded, max(*arguments.lengths, arguments.kl_tokens * arguments.samples))
    for length, repeats in zip(arguments.lengths, arguments.repeats, strict=True):
        yield from default_ways(loaded, ids[:, :length], repeats)
    yield from harm(loaded, ids, arguments)


@torch.inference_mode()
def written(model: Any, cache: Any, ids: torch.Tensor, new: int) -> torch.Tensor:
    """Return ``new`` greedy tokens after a prompt."""
    tokens = [ids[:, :0]]
    for number in range(new + 1):
        ids = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        if number < new:
            tokens.append(ids)
    return torch.cat(tokens, dim=1)


def default_ways(loaded: LoadedModel, ids: torch.Tensor, repeats: int) -> Iterator[Row]:
    """Time a prompt by each way of the default, over a full cache."""
    model, shape = loaded.model, shape_of(loaded.model, model_id=loaded.model_id)
    limit = context_limit(model) or ids.shape[1] + PIECE
    ids = ids[:, : limit - PIECE - NEW]  # room for the second read
    make = {"full": partial(DynamicCache, config=model.config)}
    make |= {way: partial(cache_of, model, shape, ids.shape[1], way) for way in TARGETS}
    prefills: dict[str, list[float]] = {way: [] for way in make}
    runs = {way: partial(read_and_written, model, new, ids, prefills[way])
            for way, new in make.items()}  # fmt: skip
    warm_up = int(repeats > 2)
    turns = in_turns(runs, repeats=repeats, warm_up=warm_up)
    plain = prefills["full"][warm_up:]
    for way, target in TARGETS.items():
        item = prefills[way][warm_up:]
        yield {
            "name": f"{ids.shape[1]} tokens, {SHARE:.0%} of the bytes by default, {way}: prefill / "
            "plain",
            **spread_of([a / b for a, b in zip(item, plain, strict=True)]),
            "at_most": target,
            "note": f"with {NEW} tokens {ratio_of(turns, way, 'full')['figure']:.3f}",
        }


def cache_of(
    model: Any, shape: ModelShape, tokens: int, name: str, *, measured: bool = True
) -> Any:
    """A cache as the default makes it for a way; without what was measured of the model or with."""
    setting = Default(share=SHARE).setting(shape)
    setting = setting if measured else Setting(shape=shape, share=SHARE)
    way: Method = method_for(setting, tokens)
    if name == "decided":
        assert isinstance(way, Solved), "nothing is decided for this model"
    else:
        way = {"twice": SecondRead, "early": Immediate}[name](setting=setting)
    options = CacheOptions(by_layer=way.by_layer)
    return build_rows(model, [Way(profile=way.profile(tokens), options=options)])


@torch.inference_mode()
def read_and_written(model: Any, make: Any, ids: torch.Tensor, prefills: list[float]) -> None:
    """A prompt and 64 greedy tokens; what the prompt took is noted."""
    cache, begun = make(), time.perf_counter()
    out = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
    prefills.append(time.perf_counter() - begun)
    written(model, cache, out, NEW - 1)


def predicted(model: Any, cache: Any, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities after each token of an answer, (n_tokens, vocabulary)."""
    model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
    logits: torch.Tensor = model(input_ids=answer, past_key_values=cache).logits[0]
    return logits.float().log_softmax(-1)


@torch.inference_mode()
def harm(loaded: LoadedModel, ids: torch.Tensor, arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure the KL along what the full cache writes."""
    model, shape = loaded.model, shape_of(loaded.model, model_id=loaded.model_id)
    result: dict[tuple[str, bool], list[float]] = {key: [] for pair in PAIRS for key in pair}
    for place in range(arguments.samples):
        first = place * arguments.kl_tokens
        prompt = ids[:, first : first + arguments.kl_tokens]
        answer = written(model, DynamicCache(config=model.config), prompt, NEW)
        plain = predicted(model, DynamicCache(config=model.config), prompt, answer)
        for (way, measured), item in result.items():
            cache = cache_of(model, shape, prompt.shape[1], way, measured=measured)
            item.append(
                float(
                    Predictions(plain).divergences(predicted(model, cache, prompt, answer)).mean()
                )
            )
    for unbounded, bounded in PAIRS:
        pair = np.array([result[unbounded], result[bounded]])
        whole, part = pair.mean(axis=1)
        unmeasured = "" if unbounded[1] else ", nothing measured"
        (drawn,) = resampled_means([pair.T])
        low, high = np.quantile(drawn[:, 1] / drawn[:, 0], (0.025, 0.975))
        yield {
            "name": f"KL in bounded memory, {bounded[0]} / {unbounded[0]}{unmeasured}",
            **{"figure": part / whole, "low": low, "high": high},
            "at_most": 1.5,
            "note": f"{part:.5f} and {whole:.5f} nats a token, 95% interval; {NEW} tokens, "
            f"{arguments.samples} texts of {arguments.kl_tokens} tokens",
        }
