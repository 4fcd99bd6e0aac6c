"""Do budgets carry over: from one length, kind of text and number of prompts to another?

    python benchmarks/bench_transfer.py [--seconds 1500] [--fresh] [--tables-only] [--write]

Fixed budgets of single heads by estimated loss (`kvalloc profile --loss fast --loss-level head`,
entries ranked by `tova`), decided on prompts of the profiling split and measured on those of the
development split; never on held-out ones. Each figure is the loss of the whole reduced cache, KL to
the full cache in nats per token, the mean over prompts that all rows of a table share. What was
measured stays in benchmarks/quality/transfer.jsonl, and only what is missing is measured: about
twenty minutes of one core for all of it, in pieces of ``--seconds``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from quality.transfer import (
    CELLS_FILE,
    EQUAL,
    LONG,
    LONGEST,
    SHORT,
    USUAL,
    Bench,
    OutOfTime,
    Source,
    Study,
    key_of,
    label,
    measure,
    read_cells,
)

from kvalloc.models.loading import load_model
from kvalloc.prompts.calibration import KINDS
from kvalloc.prompts.intervals import interval

PAGE = Path(__file__).resolve().parent.parent / "docs" / "transfer.md"
MARKS = ("<!-- bench_transfer.py: begin -->\n", "<!-- bench_transfer.py: end -->\n")
EACH = 2
"""Prompts of each kind that budgets of all kinds are decided on."""
DRAWS = 5
POOL, MANY = 16, 32
SIZES = (2, 4, 8)
COSTLY = ("made at 2,048, 4 prompts", f"{MANY} prompts")
"""What is decided on prompts that take minutes to measure."""
TEXT_NAMES = {"needle": "needle", "pairs": "pairs", "kl": "prose", "code": "code"}


def main() -> int:
    asked = parse_arguments()
    if asked.fresh:
        CELLS_FILE.unlink(missing_ok=True)
    studies = [lengths(), texts(), numbers()]
    finished = asked.tables_only or measured([*map(affordable, studies), *studies], asked.seconds)
    text = "\n".join(line for study in studies for line in tables(study)).strip()
    print(text)
    if asked.write:
        write_page(text)
    return 0 if finished else 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="how far budgets carry over")
    parser.add_argument("--seconds", type=float, default=1500, help="begin nothing after these")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--tables-only", action="store_true", help="measure nothing")
    parser.add_argument("--write", action="store_true", help="the tables into docs/transfer.md")
    return parser.parse_args()


def measured(studies: Sequence[Study], seconds: float) -> bool:
    """Measure what is missing; whether nothing is."""
    bench = Bench(loaded=load_model("demo"), until=time.monotonic() + seconds)
    try:
        for study in studies:
            measure(bench, study)
    except OutOfTime:
        print(f"stopped after {seconds:.0f} s; run again to go on", file=sys.stderr)
        return False
    return True


def affordable(study: Study) -> Study:
    """What is measured before the rest: neither the longest prompts nor the most of them."""
    return replace(
        study,
        sources={name: of for name, of in study.sources.items() if name not in COSTLY},
        judged=tuple(one for one in study.judged if one[1] < LONGEST),
    )


def lengths() -> Study:
    """Made at three lengths, used at four."""
    some = tuple(range(EACH))
    short = tuple(Source(kind=kind, tokens=SHORT, picked=some) for kind in KINDS)
    every = tuple(range(EACH * len(KINDS)))
    one_each = every[: len(KINDS)]
    sources = {
        EQUAL: (),
        "made at 512, 8 prompts": short,
        "made at 1,000, 8 prompts": (Source(kind="all", tokens=USUAL, picked=every),),
        "made at 2,048, 4 prompts": (Source(kind="all", tokens=LONG, picked=one_each),),
    }
    counts = ((SHORT, 3), (USUAL, 3), (LONG, 1), (LONGEST, 1))
    judged = tuple((kind, tokens, count) for tokens, count in counts for kind in KINDS)
    return Study(name="lengths", sources=sources, judged=judged, shares=(0.5, 0.2))


def texts() -> Study:
    """Made from one kind of text, used on each."""
    eight = tuple(range(8))
    sources = {EQUAL: ()} | {
        f"made from {TEXT_NAMES[kind]}": (Source(kind=kind, tokens=SHORT, picked=eight),)
        for kind in KINDS
    }
    sources["made from all, 2 of each"] = tuple(
        Source(kind=kind, tokens=SHORT, picked=eight[:EACH]) for kind in KINDS
    )
    judged = tuple((kind, SHORT, 6) for kind in KINDS)
    return Study(name="texts", sources=sources, judged=judged, shares=(0.5, 0.2))


def numbers() -> Study:
    """Made from 2 to 32 prompts of one kind, used on others of that kind."""
    sources: dict[str, tuple[Source, ...]] = {EQUAL: ()}
    random = np.random.default_rng(0)
    for size in SIZES:
        for draw in range(DRAWS):
            picked = tuple(sorted(random.choice(POOL, size, replace=False).tolist()))
            sources[f"{size} prompts, draw {draw + 1}"] = needles(picked)
    sources[f"{POOL} prompts"] = needles(tuple(range(POOL)))
    sources[f"{MANY} prompts"] = needles(tuple(range(MANY)))
    return Study(
        name="numbers", sources=sources, judged=(("needle", SHORT, 12),), shares=(0.5, 0.2)
    )


def needles(picked: tuple[int, ...]) -> tuple[Source, ...]:
    return (Source(kind="needle", tokens=SHORT, picked=picked),)


def tables(study: Study) -> list[str]:
    """All tables of a study, as far as it was measured."""
    cells = {key_of(row)[:-1]: row["losses"] for row in read_cells()}
    if study.name == "numbers":
        return number_table(study, cells)
    by_column: dict[str, list[dict[str, float]]] = {}
    for task, tokens, count in study.judged:
        column = f"{tokens:,}" if study.name == "lengths" else TEXT_NAMES[task]
        keys = [(study.name, task, tokens, number) for number in range(count)]
        by_column.setdefault(column, []).extend(cells[key] for key in keys if key in cells)
    heads = [
        f"{column} ({len(found)})" if found else f"{column} (not measured)"
        for column, found in by_column.items()
    ]
    titles = {
        "lengths": "used at so many tokens (so many prompts, all four kinds)",
        "texts": f"used on so many prompts of {SHORT} tokens",
    }
    lines = []
    for share in study.shares:
        rows = [
            [name, *(mean_cell(found, label(name, share)) for found in by_column.values())]
            for name in study.sources
        ]
        lines += ["", f"{share:.0%} kept; {titles[study.name]}", *aligned(["", *heads], rows)]
    return lines


def number_table(study: Study, cells: dict[tuple[Any, ...], dict[str, float]]) -> list[str]:
    """For each number of prompts, the mean over the draws and the range of single ones."""
    ((task, tokens, count),) = study.judged
    keys = [(study.name, task, tokens, number) for number in range(count)]
    found = [cells[key] for key in keys if key in cells]
    heads = ["decided on", *(f"{share:.0%} kept" for share in study.shares)]
    if not found:
        return ["", "numbers of prompts: not measured"]
    groups = {EQUAL: [EQUAL]}
    groups |= {
        f"{size} prompts": [name for name in study.sources if name.startswith(f"{size} prompts,")]
        for size in SIZES
    }
    groups |= {name: [name] for name in (f"{POOL} prompts", f"{MANY} prompts")}
    rows = []
    for name, members in groups.items():
        row = [name]
        for share in study.shares:
            names = [label(member, share) for member in members]
            if any(name not in one for name in names for one in found):
                row.append("not measured")
                continue
            means = [np.mean([one[name] for one in found]) for name in names]
            ends = f" ({min(means):.4f} to {max(means):.4f})" if len(means) > 1 else ""
            row.append(f"{np.mean(means):.4f}{ends}")
        rows.append(row)
    title = (
        f"Needle prompts of {tokens} tokens, used on {len(found)} others; mean of {DRAWS} draws "
        "(least and most of them)"
    )
    return ["", title, *aligned(heads, rows)]


def mean_cell(found: Sequence[dict[str, float]], name: str) -> str:
    """Mean and its 95% bootstrap interval over the prompts."""
    values = [losses[name] for losses in found if name in losses]
    if not values or len(values) < len(found):
        return "-"
    ends = interval([np.array(values)])
    said = "" if ends is None else f" [{ends[0]:.3f}, {ends[1]:.3f}]"
    return f"{np.mean(values):.4f}{said}"


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first to the left."""
    widths = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]
    return [
        "  ".join([f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in [heads, *rows]
    ]


def write_page(text: str) -> None:
    """The tables between the page's marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, begun, rest = page.partition(MARKS[0])
    _, ended, after = rest.partition(MARKS[1])
    if not begun or not ended:
        raise SystemExit(f"{PAGE} lacks the marks {MARKS[0].strip()} and {MARKS[1].strip()}")
    block = f"\n```text\n{text}\n```\n\n"
    PAGE.write_text(f"{before}{begun}{block}{ended}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
