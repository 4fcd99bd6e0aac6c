"""A slow tier beside a reduced cache: what is lost of the default's loss, and taken in time.

    python benchmarks/bench_runtime.py tier [--models demo] [--dtype NAME] [--texts N]

Held-out texts of ``--tokens`` tokens; the KL of the next 64 to the full cache, one token at a time,
with ``apply(budget="10%", tier="ram")`` over the default's in the same bytes. Meanwhile what
compares, the tier in a folder too, takes each token in turns: tokens a second over the default's,
what is settled between them included. On a CPU the tier lies in the same
memory, so the time says what reading it costs and nothing of what a slower memory would.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from _common import Row, parser_of, print_rows, spread_of
from transformers import DynamicCache

import kvalloc
from kvalloc.models.loading import load_model
from kvalloc.prompts.intervals import resampled_means
from kvalloc.prompts.texts import shipped_texts

BUDGET, NEW = 0.1, 64


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["demo"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, nargs="+", default=[6], help="of each model")
    parser.add_argument("--tokens", type=int, default=1000)
    arguments = parser.parse_args()
    models = zip(arguments.models, arguments.texts, strict=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        rows = (row for model in models for row in rows_of(*model, arguments, folder))
        return print_rows(rows, arguments, "kvalloc", "torch", "transformers")


def rows_of(name: str, n_texts: int, arguments: argparse.Namespace, folder: str) -> Iterator[Row]:
    """Return what a model loses and takes."""
    loaded, n = load_model(name, dtype=arguments.dtype), arguments.tokens
    where = f"{loaded.model_id}, {arguments.dtype}, {BUDGET:.0%}"
    losses, speeds, largest = [], [], 0.0
    for prompt, following in texts_of(loaded, n_texts, n):
        caches = [read(loaded.model, prompt, tier=tier) for tier in (None, "ram", folder)]
        kl, seconds = np.zeros(3), np.zeros((3, 2))
        full = log_shares(loaded.model, following, read(loaded.model, prompt, budget=None))
        for place in range(NEW):
            for number, cache in enumerate(caches):
                begun = time.perf_counter(), time.process_time()
                found = log_shares(loaded.model, following[:, place, None], cache)[0]
                seconds[number] += time.perf_counter() - begun[0], time.process_time() - begun[1]
                kl[number] += float((full[place].exp() * (full[place] - found)).sum()) / NEW
        losses.append(kl)
        speeds.append(seconds[0] / seconds[1:])
        largest = max(largest, caches[1].share)
    [means], (default, own, _) = resampled_means([np.array(losses)]), np.mean(losses, axis=0)
    low, high = np.quantile(means[:, 1] / means[:, 0], [0.025, 0.975])
    of, kls = f"{where}, {n_texts} texts of {n:,} tokens", f"{own:.5f} and {default:.5f} nats"
    row = {"figure": own / default, "low": low, "high": high, "at_most": 0.25}
    note = f"{kls} a token; largest share {largest:.4f}"
    yield {"name": f"{of}: loss over the default's", **row, "note": note}
    for number, tier in enumerate(("ram", "a folder")):
        row = spread_of([float(one[number, 0]) for one in speeds]) | {"at_least": 0.7}
        row["processor_ratio"] = float(np.median([one[number, 1] for one in speeds]))
        name = f"{of}: tokens a second over the default's, tier in {tier}"
        yield {"name": name, **row, "note": f"{NEW} tokens of each text"}


def texts_of(loaded: Any, count: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield prompts and what follows them, of one held-out text after the other."""
    texts = sorted(shipped_texts("heldout_").items())
    for number in range(count):
        ids = loaded.tokenizer(texts[number % len(texts)][1], return_tensors="pt")["input_ids"]
        first = number // len(texts) * (tokens + NEW)
        yield ids[:, first : first + tokens], ids[:, first + tokens : first + tokens + NEW]


def read(model: Any, prompt: torch.Tensor, *, budget: float | None = BUDGET, **options: Any) -> Any:
    """Return the cache of a prompt, the full one where there is no budget."""
    if budget is None:
        cache = DynamicCache(config=model.config)
        model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        return cache
    with kvalloc.apply(model, budget=budget, **options):
        return model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values


def log_shares(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Return the logarithm of what follows each token, (n, vocabulary)."""
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache).logits[0]
    return logits.double().log_softmax(dim=-1)


if __name__ == "__main__":
    raise SystemExit(main())
