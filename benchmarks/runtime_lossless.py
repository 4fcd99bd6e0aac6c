"""Answers without loss: are they the full cache's, and how often is the full cache read?

    python benchmarks/bench_runtime.py lossless [--models demo] [--dtype NAME] [--prompts N]

Prompts of text, greedy answers, with ``apply(budget="20%", lossless=True)`` and of the plain model:
equal answers, the share of drafted tokens that stay, tokens for each time that the full cache is
read, and the time of both in turns. Here the full cache lies in the same memory, so that verifying
costs time and saves none; where it lies in a slower one, what counts is how seldom it is read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from _common import Row, parser_of, print_rows, spread_of
from bench_runtime import prompt_ids
from transformers import DynamicCache

import kvalloc
from kvalloc.models.loading import load_model
from kvalloc.prompts.intervals import resampled_means

SHARE = 0.2


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["demo"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, nargs="+", default=[50], help="of each model")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    models = zip(arguments.models, arguments.prompts, strict=True)
    rows = (row for model in models for row in rows_of(*model, arguments))
    return print_rows(rows, arguments, "kvalloc", "torch", "transformers")


def rows_of(name: str, n_prompts: int, arguments: argparse.Namespace) -> Iterator[Row]:
    """Return what a model's answers were like."""
    loaded = load_model(name, dtype=arguments.dtype)
    new = arguments.new_tokens
    ids = prompt_ids(loaded, n_prompts * arguments.tokens)
    prompts = ids[:, : n_prompts * arguments.tokens].reshape(n_prompts, -1)
    equal, counts, seconds = 0, [], []
    with kvalloc.apply(loaded.model, budget=SHARE, lossless=True) as applied:
        for prompt in prompts:
            begun = time.perf_counter()
            result = answer(loaded.model, prompt, new)
            middle = time.perf_counter()
            verifier = applied.last_cache.verifier
            plain = DynamicCache(config=loaded.model.config)
            expected = answer(loaded.model, prompt, new, past_key_values=plain)
            seconds.append((middle - begun) / (time.perf_counter() - middle))
            differs = not torch.equal(result, expected)
            equal += not differs or bool(verifier.ties)
            counts.append([verifier.accepted, verifier.tried, verifier.tokens, verifier.rounds,
                           verifier.ties, differs])  # fmt: skip
    table = np.asarray(counts, dtype=np.float64)
    [means] = resampled_means([table])
    sizes = f"{SHARE:.0%}, {n_prompts} prompts of {arguments.tokens} tokens"
    where = f"{loaded.model_id}, {arguments.dtype}, {sizes}"
    yield {
        "name": f"{where}: answers of {new} tokens that are the full cache's",
        "figure": equal / n_prompts,
        "at_least": 1,
        "note": f"{int(table[:, 5].sum())} others; {int(table[:, 4].sum())} ties within rounding",
    }
    for title, of, by, target in (
        ("drafted tokens that stay", 0, 1, 0.95),
        ("tokens for each read of the full cache", 2, 3, 6),
    ):
        shares = means[:, of] / means[:, by]
        low, high = np.quantile(shares, [0.025, 0.975])
        figure = table[:, of].sum() / table[:, by].sum()
        yield {"name": f"{where}: {title}", "figure": float(figure), "low": float(low),
               "high": float(high), "at_least": target,
               "note": f"{int(table[:, of].sum())} of {int(table[:, by].sum())}"}  # fmt: skip
    yield {"name": f"{where}: seconds / plain, the full cache in the same memory",
           **spread_of(seconds), "note": "prompt and answer"}  # fmt: skip


def answer(model: Any, prompt: torch.Tensor, new: int, **options: Any) -> torch.Tensor:
    """Return a greedy answer of that many tokens."""
    ids: torch.Tensor = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], do_sample=False,
        max_new_tokens=new, min_new_tokens=new, **options,
    )  # fmt: skip
    return ids[0, len(prompt) :]


if __name__ == "__main__":
    raise SystemExit(main())
