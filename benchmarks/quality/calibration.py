"""The prompts that the shipped profiles are tuned on: `kvalloc eval`'s own tasks, profiling split.

    python benchmarks/quality/calibration.py --each 4 -o calibration.jsonl

They share no text, no key, no word list and no random numbers with the held-out split.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvalloc.evaluate.tasks import TASKS
from kvalloc.models import load_model

KINDS = ("needle", "pairs", "labels", "kl", "code", "tracking")


def main() -> None:
    parser = argparse.ArgumentParser(description="calibration prompts, one JSON object a line")
    parser.add_argument("--each", type=int, default=4, help="prompts of each kind")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    tokenizer = load_model("demo").tokenizer
    made = {
        kind: TASKS[kind].make(
            tokenizer, asked.each, asked.context, seed=asked.seed, split="profiling"
        )
        for kind in KINDS
    }
    lines = [
        json.dumps({"text": tokenizer.decode(made[kind][number].input_ids), "kind": kind})
        for number in range(asked.each)
        for kind in KINDS
    ]
    asked.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
