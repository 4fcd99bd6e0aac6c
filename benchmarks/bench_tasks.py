"""What the full cache of SmolLM2-135M-Instruct gets right of every task that asks.

    python benchmarks/bench_tasks.py [--prompts 8] [--seconds 1200] [--fresh]

Where the full cache gets little right, the score tells nothing about a smaller one. Each prompt is
a line of benchmarks/quality/tasks.jsonl with its digest; only what is missing is measured, unless
``--fresh``. The table also goes into docs/evaluating.md, between its marks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quality.digests import digest_of_case
from quality.tables import read_rows

from kvalloc.evaluate.methods import CacheMethod, answer_greedily
from kvalloc.models.loading import load_model
from kvalloc.prompts.intervals import interval
from kvalloc.prompts.tasks import TASKS

FOLDER = Path(__file__).resolve().parent
CELLS = FOLDER / "quality" / "tasks.jsonl"
PAGE = FOLDER.parent / "docs" / "evaluating.md"
MARKS = ("<!-- bench_tasks.py: begin -->\n", "<!-- bench_tasks.py: end -->\n")
CONTEXTS = (1000, 2048)
SEED = 0
UNASKED = ("kl", "own")


def main() -> int:
    asked = parse_arguments()
    if asked.fresh:
        CELLS.unlink(missing_ok=True)
    names = [name for name in TASKS if name not in UNASKED]
    loaded = load_model("demo")
    wanted = list(prompts(loaded.tokenizer, names, asked.prompts))
    if not asked.tables_only:
        measure(loaded, wanted, asked.seconds)
    rows = table(names, wanted, {key_of(row): row["score"] for row in read_rows(CELLS)})
    print("\n".join(rows))
    if asked.write:
        write_page(rows)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the full cache on every task")
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--seconds", type=float, default=1200, help="begin no prompt after these")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--tables-only", action="store_true", help="measure nothing")
    parser.add_argument("--write", action="store_true", help="the table into docs/evaluating.md")
    return parser.parse_args()


def prompts(tokenizer: Any, names: Sequence[str], count: int) -> Iterator[dict[str, Any]]:
    """Development prompts: the first of every task and length, then the second, ..."""
    made = {
        (name, context): TASKS[name].make(tokenizer, count, context, seed=SEED)
        for context in CONTEXTS
        for name in names
    }
    for number in range(count):
        for (name, context), cases in made.items():
            case = cases[number]
            digest = digest_of_case(case)
            yield {"task": name, "context": context, "digest": digest, "case": case}


def measure(loaded: Any, wanted: Sequence[dict[str, Any]], seconds: float) -> None:
    """Answer what is missing, one line of the file a prompt."""
    from transformers import DynamicCache

    done = {key_of(row) for row in read_rows(CELLS)}
    full = CacheMethod(make_cache=lambda: DynamicCache(config=loaded.model.config))
    until = time.monotonic() + seconds
    with CELLS.open("a", encoding="utf-8") as out:
        for prompt in wanted:
            if key_of(prompt) in done:
                continue
            if time.monotonic() > until:
                print(f"stopped after {seconds:.0f} s; run again to go on", file=sys.stderr)
                return
            case = prompt["case"]
            turn = case.turns[0]
            read = full.compress(loaded.model, case.input_ids)
            answer = answer_greedily(read, loaded.tokenizer, (), turn.max_new_tokens)
            row = {key: prompt[key] for key in ("task", "context", "digest")}
            out.write(json.dumps({**row, "score": turn.score(answer.text)}) + "\n")
            out.flush()


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["context"], row["digest"]


def table(
    names: Sequence[str], wanted: Sequence[dict[str, Any]], scores: dict[tuple[Any, ...], float]
) -> list[str]:
    """Task x length in Markdown: mean score, its interval, prompts."""
    heads = "".join(f" {context:,} tokens |" for context in CONTEXTS)
    lines = [f"| task |{heads}", f"|---|{'---|' * len(CONTEXTS)}"]
    for name in names:
        cells = ""
        for context in CONTEXTS:
            keys = [
                key_of(one) for one in wanted if one["task"] == name and one["context"] == context
            ]
            cells += f" {cell([scores[key] for key in keys if key in scores])} |"
        lines.append(f"| `{name}` |{cells}")
    return lines


def cell(scores: Sequence[float]) -> str:
    if not scores:
        return "not measured"
    ends = interval([np.array(scores)])
    said = "" if ends is None or ends[0] == ends[1] else f" [{ends[0]:.0%}, {ends[1]:.0%}]"
    return f"{sum(scores) / len(scores):.0%}{said} of {len(scores)}"


def write_page(rows: Sequence[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise SystemExit(f"{PAGE} lacks the marks {MARKS[0].strip()} and {MARKS[1].strip()}")
    PAGE.write_text(
        before + MARKS[0] + "\n" + "\n".join(rows) + "\n\n" + MARKS[1] + after, encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
