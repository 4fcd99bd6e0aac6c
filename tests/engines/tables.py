"""What engines lose beside what kvalloc predicts, as the last `make test-engines` found it.

python tests/engines/tables.py          # tables as in docs/interop.md
python tests/engines/tables.py --rows   # a row a setting, one line of JSON each, for benchmarks
"""

from __future__ import annotations

import json
import sys

from engine_runs import ENVIRONMENTS, Row

HEAD = """\
| setting | bits | mean | 99% | top-1 |
|---|---|---|---|---|"""
"""Each of the last three has the engine's figure, then the prediction."""


def main(arguments: list[str]) -> None:
    for file in sorted((ENVIRONMENTS / "results").glob("*.json")):
        kept = json.loads(file.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in kept["rows"]]
        about = f"{kept['engine']}, {kept['model']}, {kept['tokens']:,} tokens"
        if "--rows" in arguments:
            for row in rows:
                print(json.dumps(benchmark_row(about, row)))
        else:
            print(f"{about}\n\n{HEAD}")
            print(*map(line, rows), sep="\n", end="\n\n")


def line(row: Row) -> str:
    """Return a row of the table."""
    pairs = (
        ", ".join(f"{getattr(row, f'{of}_{name}'):.2g}" for of in ("engine", "predicted"))
        for name in ("mean", "p99", "top1")
    )
    return "| " + " | ".join([f"`{row.setting}`", f"{row.bits:.2f}", *pairs]) + " |"


def benchmark_row(about: str, row: Row) -> dict[str, str]:
    """Return a row as benchmarks/record.py keeps it."""
    found = {"what": f"{about}: {row.setting}", "figure": f"{row.ratio:.2f}"}
    if row.is_judged:
        found |= {"wanted": "0.8 to 1.25", "verdict": "met" if row.is_predicted else "MISSED"}
    note = f"{row.engine_mean:.5f} nats in the engine, {row.predicted_mean:.5f} predicted"
    return found | {"note": note}


if __name__ == "__main__":
    main(sys.argv[1:])
