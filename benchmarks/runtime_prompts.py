"""Prefill with budgets decided from each prompt, over a plain one.

python benchmarks/bench_runtime.py prompts [--lengths 1024 2048] [--repeats 3]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from _common import Row, in_turns, median_of, parser_of, print_rows, ratio_of
from bench_runtime import prompt_ids

import kvalloc
from kvalloc.models.loading import load_model


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    loaded = load_model(asked.model)
    ids = prompt_ids(loaded, max(asked.lengths))
    rows = (
        row
        for length in asked.lengths
        for row in prefills(loaded.model, ids[:, :length], asked.repeats)
    )
    return print_rows(rows, asked, "kvalloc", "torch", "transformers")


@torch.inference_mode()
def prefills(model: Any, ids: torch.Tensor, repeats: int) -> Iterator[Row]:
    def read(target: dict[str, Any] | None) -> None:
        with nullcontext() if target is None else kvalloc.apply(model, **target):
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    targets: dict[str, Any] = {
        "plain": None,
        "decided from the prompt": {"target_retention": 0.9},
        "decided from the prompt, by layer": {"target_retention": 0.9, "level": "layer"},
    }
    found = in_turns(
        {name: lambda one=one: read(one) for name, one in targets.items()}, repeats=repeats
    )
    for name in [name for name in targets if name != "plain"]:
        yield {
            "name": f"{ids.shape[1]} tokens: {name}",
            **ratio_of(found, name, "plain"),
            "note": f"retention 0.9; plain prefill {median_of(found, 'plain'):.2f} s",
        }
