"""What it loses that a cache stores kept entries at 16 bits where the model computes in float32.

    python benchmarks/bench_runtime.py half [--samples 6] [--tokens 600]

Along the same text, each prompt is reduced twice by the same budgets: its entries stay in float32,
and are stored in half precision, as they always are. KL(float32 || half precision) of the tokens
after the prompt. Real text, SmolLM2-135M. A minute on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from unittest import mock

import torch
from _common import Row, parser_of, print_rows
from bench_runtime import prompt_ids
from runtime_late import kl_of, predicted

import kvalloc
from kvalloc.models.loading import LoadedModel, load_model
from kvalloc.runtime import kept

TARGET, NEW = 1e-5, 64


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", default="smollm2-135m-instruct-retention-90")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=600)
    arguments = parser.parse_args()
    rows = rows_of(load_model(arguments.model), arguments)
    return print_rows(rows, arguments, "kvalloc", "torch", "transformers")


@torch.inference_mode()
def rows_of(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[Row]:
    """Return the rows of the mean and of the worst token."""
    profile = kvalloc.load_profile(arguments.profile)
    ids = prompt_ids(loaded, arguments.samples * (arguments.tokens + NEW))
    losses, stored = [], []
    for text in ids.view(arguments.samples, -1):
        parts = text[None, : arguments.tokens], text[None, arguments.tokens :]
        half, whole = (kvalloc.make_cache(loaded.model, profile) for _ in range(2))
        with mock.patch.object(kept, "halved", lambda *numbers: list(numbers)):
            expected = predicted(loaded.model, whole, *parts)
        losses.append(kl_of(expected, predicted(loaded.model, half, *parts)))
        stored.append(half.retained_bytes / whole.retained_bytes)
    means = [float(loss.mean()) for loss in losses]
    texts = f"{arguments.samples} texts of {arguments.tokens} + {NEW} tokens, {arguments.profile}"
    yield {
        "name": "KL of entries at 16 bits to entries in float32, mean",
        "figure": sum(means) / len(means),
        "unit": "nats",
        "low": min(means),
        "high": max(means),
        "at_most": TARGET,
        "note": f"{texts}; stored in {max(stored):.3f} of the bytes",
    }
    yield {
        "name": "the same, the token that loses most",
        "figure": max(float(loss.max()) for loss in losses),
        "unit": "nats",
        "at_most": TARGET,
        "note": texts,
    }
