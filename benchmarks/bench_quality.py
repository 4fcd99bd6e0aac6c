"""Quality at equal bytes, on long answers: kvalloc beside kvpress, quanto, HQQ and plain rounding.

    python benchmarks/bench_quality.py [--samples 12] [--seconds 1200] [--shares 50 20 10 5 3]

Cells are running text, the full cache's own answer, and four facts asked for in one answer, inside
the prompt, after it, and in a second turn. Shares are of the bytes of a 16-bit cache. KL is by
position of the answer; what was predicted before the eviction is the full cache's and is not
counted ("exact" says how many tokens). Measured in the environment that ``make peers`` makes, all
methods in one process. What is measured stays in benchmarks/quality/cells; only what is missing is
measured, and it can be stopped at any time: tables and picture say of how many prompts they are.
All of it takes hours: the same command goes on. Other options, such as ``--methods`` and
``--cells`` for several processes at once, are those of quality/cells.py.

``--ruler`` has cells of tasks by rule instead, RULER's and others, with the question after the
compression, at 4:1 to 32:1 of the bytes. A task counts where the full cache solves half of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from _common import print_row
from quality.cells import RULER
from quality.picture import STYLES, Panel, draw_bytes
from quality.tables import (
    ANYWHERE,
    CELLS_FOLDER,
    DEFAULT,
    LEAST_KL,
    UNFITTED,
    Ratio,
    Row,
    against_best,
    answer_table,
    at_share,
    by_method,
    current,
    earlier_rounding,
    position_table,
    reached,
    read_rows,
    shared_kl,
    tail_table,
    where_peers_are_better,
)
from results import Cells

from kvalloc.accounting import FloatArray
from kvalloc.formats.shipped_profiles import load_fitted
from kvalloc.online.methods import Setting, method_for
from kvalloc.prompts.intervals import RESAMPLES, TAILS, interval, tails

FOLDER = Path(__file__).resolve().parent
PYTHON = FOLDER.parent / ".venv-kvpress" / "bin" / "python"
CELLS = ("text", "own-answer", "facts-inside", "facts-after", "facts-second-turn")
PACKAGES = ("kvpress", "optimum-quanto", "hqq", "transformers", "torch")
"""Of the environment in which the cells are measured."""
DEMO = "smollm2-135m-instruct"
TWO_THIRDS = 2 / 3
LIMITS = {
    DEMO: {0.2: 0.08, 0.1: 0.15, 0.05: 0.48, 0.03: 0.75},
    "qwen2.5-coder-0.5b-instruct": {0.2: 0.2, 0.1: 0.25, 0.05: 0.5},
    "gemma-3-270m": {0.2: 0.07, 0.1: 0.18, 0.05: 0.5},
}
"""Of the best peer's loss, by model and share; elsewhere two thirds."""
RATIOS = (25, 12.5, 6.25, 3.125)
"""Shares of the tasks by rule, percent."""
RULER_METHODS = (
    *(DEFAULT, UNFITTED, "8 bits", "4 bits", "quanto 4 bits", "quanto 2 bits"),
    *("KVzip", "KVzip at 4 bits", "SnapKV", "ExpectedAttention"),
)
SOLVED = 0.5
"""Least score of the full cache on a task that is shown."""
SCORED_AT, LOST_POINTS = 0.125, 0.01
"""The share at which the score counts, and how much of it may be lost."""
TAIL_AT, ROUNDED = (0.2, 0.25), "8 bits"
"""Shares at which the tail of the KL counts, and the method that it is compared to."""
CALLS = "tools"
"""The cell of calls of tools."""
PICTURED = 600
"""Tokens of the prompts that the pictures are of."""
MET, EQUAL, MISSED = "met", "equal", "MISSED"
FIRST, OFF = "0-15", 1.4
"""Positions of an answer whose loss is predicted, and how many times too much or too little."""


def main() -> int:
    request, measuring = parse_arguments()
    if not request.tables_only:
        if not request.python.exists():
            print(f"there is no {request.python}: 'make peers' makes it", file=sys.stderr)
            return 2
        shown = ["--shares", *map(str, request.shares), "--context", str(request.context)]
        if request.ruler:
            shown += ["--answers", "--methods", *RULER_METHODS]
        shown += ["--cells", *request.cells]
        cells = [str(FOLDER / "quality" / "cells.py"), "--model", request.model]
        command = [str(request.python), *cells, *shown, *measuring]
        subprocess.run(command, check=False, stdout=sys.stderr)
        code = f"from _common import where_it_ran; print(where_it_ran(*{PACKAGES})['versions'])"
        print("cells measured with", flush=True)
        subprocess.run([str(request.python), "-c", code], check=True, cwd=FOLDER)
    missed = False
    for folder in sorted(CELLS_FOLDER.iterdir()):
        cells = request.cells
        all_cells = [row for cell in cells for row in read_rows(folder / f"{cell}.jsonl")]
        rows = current([row for row in all_cells if row["context"] == request.context])
        if request.ruler:
            rows = of_solved(rows)
        if not rows:
            continue
        print(f"\n{folder.name}, prompts of {request.context:,} tokens")
        if request.ruler:
            if {*request.cells} == {*RULER}:
                ruler_picture(rows, folder.name)
        elif request.context == PICTURED:
            picture(rows, folder.name)
        for row in report(rows, [share / 100 for share in request.shares], folder.name, [*cells]):
            print_row({**row, "what": f"{folder.name}: {row['what']}"})
            missed |= row["verdict"] == MISSED
    return int(missed)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this script, and those for quality/cells.py."""
    parser = argparse.ArgumentParser(
        description="quality at equal bytes; further options are those of quality/cells.py"
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shares", nargs="+", type=float, help="percent")
    parser.add_argument("--ruler", action="store_true", help="tasks by rule")
    parser.add_argument("--cells", nargs="+", help="only these kinds of prompts")
    parser.add_argument("--context", type=int, help="tokens of a prompt; 1000, of --ruler 2000")
    parser.add_argument("--python", type=Path, default=PYTHON, help="an environment with kvpress")
    parser.add_argument("--tables-only", action="store_true", help="measure nothing")
    request, measuring = parser.parse_known_args()
    request.shares = request.shares or (RATIOS if request.ruler else (50, 20, 10, 5, 3))
    request.context = request.context or (2000 if request.ruler else 1000)
    request.cells = request.cells or [*(RULER if request.ruler else CELLS)]
    return request, measuring


def of_solved(rows: Sequence[Row]) -> list[Row]:
    """The rows of the tasks that the model solves with the full cache; the others are named."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in filter(is_full, rows):
        scores[row["cell"]].append(row["score"])
    for cell, item in scores.items():
        phrase = "" if np.mean(item) >= SOLVED else ", not shown"
        print(f"{cell}: the full cache scores {np.mean(item):.0%} of {len(item)} prompts{phrase}")
    return [row for row in rows if np.mean(scores[row["cell"]]) >= SOLVED]


def report(
    rows: Sequence[Row], shares: Sequence[float], model: str, all_cells: Sequence[str]
) -> list[Cells]:
    """Print the tables of a model; return what was to be reached, and whether it was."""
    targets: list[Cells] = []
    for share in shares:
        subset = at_share(rows, share)
        cells = [cell for cell in all_cells if any(row["cell"] == cell for row in subset)]
        if not cells:
            continue
        ranges = "/".join(reached(subset))
        print(f"\n{100 * share:g}% of the bytes: KL at positions {ranges}, nats per token")
        other_rows = [row for row in rows if row["share"] is None and row["cell"] in cells]
        other_rows = [row for row in other_rows if not is_full(row)]
        other_rows = [row for row in other_rows if row not in subset]  # plain rounding, for the eye
        print("\n".join(position_table([*subset, *other_rows], cells)))
        if shown := tail_table([*subset, *other_rows], cells):
            print("KL of all tokens: mean/99%/99.9%, and how many of their first choices are equal")
            print("\n".join(shown))
        if answers := answer_table([*filter(is_full, rows), *subset], cells):
            print("score of each cache's own answers")
            print("\n".join(answers))
        scored = [*filter(is_full, rows), *subset]
        targets += filter(None, (points_lost(scored, share, cells), calls_lost(scored, share)))
        targets += filter(None, (tail_over_rounding([*subset, *other_rows], share),))
        if not {*cells} & {*RULER} and (guess := predicted(subset, model, share)):
            targets.append(guess)
        results = {method: against_best(subset, method, cells) for method in (UNFITTED, DEFAULT)}
        old = f"{sum(map(earlier_rounding, subset))} of {len(subset)} rows of earlier rounding"
        for method, result in results.items():
            if (whole := result.get("mean")) is None:
                continue
            print(f"{method} over the best peer: {whole}")
            print("  " + "; ".join(f"{cell} {result[cell]}" for cell in cells if cell in result))
            limit = LIMITS.get(model, {}).get(share, TWO_THIRDS)
            targets.append(
                {"what": f"{100 * share:g}%, {method}", **whole.cells()}
                | {"wanted": f"{limit:.2f}, surely below 1", "verdict": verdict(whole, limit)}
                | {"note": old}
            )
        if "mean" not in results[DEFAULT]:
            continue
        better = where_peers_are_better(subset, DEFAULT, cells)
        print(
            f"  a range of positions where a peer surely loses less: {'; '.join(better) or 'none'}"
        )
        better = where_peers_are_better(subset, DEFAULT, cells, [ANYWHERE])
        targets.append(
            {"what": f"{100 * share:g}%, cells in which a peer surely loses less"}
            | {"figure": f"{len(better)}", "wanted": "0", "verdict": MISSED if better else MET}
            | {"note": "; ".join(better)}
        )
    return targets


def points_lost(rows: Sequence[Row], share: float, cells: Sequence[str]) -> Cells | None:
    """Return the score that the default and KVzip lose against the full cache at one share."""
    if share != SCORED_AT:
        return None
    methods = by_method(rows)

    def lost(method: str) -> list[FloatArray]:
        of_cells = [
            [
                methods["full"][cell][one]["score"] - row["score"]
                for one, row in methods[method][cell].items()
                if row["score"] is not None
            ]
            for cell in cells
        ]
        return [np.array(item) for item in of_cells if item]

    def mean(of_cells: list[FloatArray]) -> float:
        return float(np.concatenate(of_cells).mean())

    if not (ours := lost(DEFAULT)):
        return None
    of_peer = lost("KVzip")
    largest = min(LOST_POINTS, mean(of_peer) / 2) if of_peer else LOST_POINTS
    ends = interval(ours)
    return {
        "what": f"{100 * share:g}%, score lost of 1",
        "figure": f"{mean(ours):.3f}",
        **({} if ends is None else {"low": f"{ends[0]:.3f}", "high": f"{ends[1]:.3f}"}),
        "wanted": f"{max(largest, 0):.3f}",
        "verdict": MET if mean(ours) <= max(largest, 0) else MISSED,
        "prompts": f"{sum(map(len, ours))}",
        "note": f"KVzip loses {mean(of_peer):.3f}" if of_peer else "",
    }


def calls_lost(rows: Sequence[Row], share: float) -> Cells | None:
    """Return how many calls of tools of the full cache the default loses, and an interval."""
    methods = by_method(row for row in rows if row["cell"] == CALLS)
    full, ours = methods["full"][CALLS], methods[DEFAULT][CALLS]
    lost = np.array([full[one]["score"] - row["score"] for one, row in ours.items()])
    if not len(lost):
        return None
    low, high = interval([lost]) or (0.0, 0.0)
    right = float(np.mean([full[one]["score"] for one in ours]))
    return {
        "what": f"{100 * share:g}%, exact calls of tools lost of 1",
        **{"figure": f"{lost.mean():.3f}", "low": f"{low:.3f}", "high": f"{high:.3f}"},
        "wanted": "0, within the interval",
        "verdict": MET if low <= 0 else MISSED,
        "prompts": f"{len(lost)}",
        "note": f"the full cache's calls: {right:.0%} exact",
    }


def tail_over_rounding(rows: Sequence[Row], share: float) -> Cells | None:
    """Return the tail of the default's KL over that of all entries at 8 bits."""
    if share not in TAIL_AT:
        return None
    methods = by_method(row for row in rows if row.get("kls"))
    ours, rounded = methods[DEFAULT], methods[ROUNDED]
    pairs = [(row, rounded[cell].get(one)) for cell in ours for one, row in ours[cell].items()]
    kls = [(row["kls"], other["kls"]) for row, other in pairs if other is not None]
    ends = [tails([kl for item in side for kl in item]) for side in zip(*kls, strict=True)]
    known = [name for name in TAILS if ends and ends[0][name] and ends[1][name]]
    if not known:
        return None
    name = known[-1]
    mine, other = (end[name] for end in ends)
    low, high = tail_interval(kls, TAILS[name][0])
    return {
        "what": f"{100 * share:g}%, {100 * TAILS[name][0]:g}% KL over that of {ROUNDED}",
        **{"figure": f"{mine / other:.2f}", "low": f"{low:.2f}", "high": f"{high:.2f}"},
        "wanted": "1.00",
        "verdict": MET if mine <= other else MISSED,
        "prompts": f"{len(kls)}",
        "note": f"{mine:.4f} and {other:.4f} nats of {ends[0]['n_tokens']:,} tokens",
    }


def tail_interval(
    kls: Sequence[tuple[Sequence[float], Sequence[float]]], share: float
) -> tuple[float, float]:
    """Return a 95% bootstrap interval over prompts of the ratio of two percentiles over tokens."""
    random, ratios = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        drawn = random.integers(len(kls), size=len(kls))
        sides = zip(*(kls[one] for one in drawn), strict=True)
        ours, other = (
            np.quantile(np.concatenate(side), share, method="inverted_cdf") for side in sides
        )
        ratios.append(ours / other)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def picture(rows: Sequence[Row], model: str) -> None:
    """Draw loss against bytes."""
    shown = shown_in(rows)
    if shown.lines:
        name = "shares.png" if model == DEMO else f"shares-{model}.png"
        draw_bytes(
            [Panel(lines=shown.lines, label="KL to the full cache, nats per token")],
            FOLDER / "quality" / name,
            title=f"{model}: long answers, held-out prompts",
            note=f"prompts of each kind: {shown.prompts} ({', '.join(shown.cells)})",
        )  # fmt: skip


def ruler_picture(rows: Sequence[Row], model: str) -> None:
    """Draw the score of each method's own answers, and the tail of the KL, against bytes."""
    points: dict[tuple[str, float | None], list[Row]] = defaultdict(list)
    for row in rows:
        if line_of(row["method"]) in STYLES:
            points[row["method"], row["share"]].append(row)
    for least in sorted({*map(len, points.values())}):  # as few prompts as a percentile takes
        some = {key: item for key, item in points.items() if len(item) >= least}
        sets = [{(row["cell"], row["digest"]) for row in item} for item in some.values()]
        shared = set.intersection(*sets)
        some = {
            key: [row for row in item if (row["cell"], row["digest"]) in shared]
            for key, item in some.items()
        }
        ends = {key: tails([kl for row in item for kl in row["kls"]]) for key, item in some.items()}
        known = [name for name in TAILS if all(end[name] is not None for end in ends.values())]
        if shared and known:
            break
    else:
        return
    scores, kls = defaultdict(list), defaultdict(list)
    for (method, share), item in some.items():
        size = float(np.mean([row["bytes"] for row in item]))
        scores[line_of(method)].append((size, float(np.mean([row["score"] for row in item]))))
        kls[line_of(method)].append((size, ends[method, share][known[-1]]))
    cells = [*dict.fromkeys(row["cell"] for row in rows)]
    tail = f"{100 * TAILS[known[-1]][0]:g}% of the tokens have a smaller KL, nats"
    draw_bytes(
        [
            Panel(lines=scores, label="score of each cache's own answers", is_score=True),
            Panel(lines=kls, label=tail),
        ],
        FOLDER / "quality" / f"ruler-{model}.png",
        title=f"{model}: tasks by rule, the question after the compression",
        note=f"{len(shared)} prompts ({', '.join(cells)})",
    )  # fmt: skip


def predicted(rows: Sequence[Row], model: str, share: float) -> Cells | None:
    """Return the loss that a model's shipped fitted file predicts over the measured loss."""
    file = FOLDER.parent / "profiles" / f"{model}.fitted.safetensors"
    item = [row for row in rows if row["method"] == DEFAULT and row["kl"][FIRST][1]]
    if not file.exists() or not item:
        return None
    setting = Setting(shape=load_fitted(str(file)).shape, share=share, file=str(file))
    method = method_for(setting, item[0]["context"])
    expected = getattr(method, "predicted_loss", None)
    if expected is None:
        return None
    cells: dict[str, dict[str, float]] = defaultdict(dict)
    for row in item:  # the latest of each prompt
        cells[row["cell"]][row["digest"]] = row["kl"][FIRST][0]
    kls = [np.array([*each.values()]) for each in cells.values()]
    measured = float(np.mean([each.mean() for each in kls]))
    ends = interval(kls, lambda means: expected / means)
    if max(expected, measured) < LEAST_KL or ends is None:
        return None
    ratio, (low, high) = expected / measured, ends
    return {
        "what": f"{100 * share:g}%, predicted over measured loss of positions {FIRST}",
        **{"figure": f"{ratio:.2f}", "low": f"{low:.2f}", "high": f"{high:.2f}"},
        "wanted": f"within {OFF} times",
        "verdict": MET if 1 / OFF <= ratio <= OFF else MISSED,
        "prompts": f"{min(map(len, kls))}",
    }


def verdict(result: Ratio, limit: float) -> str:
    """Whether a ratio is within a limit, and surely below 1."""
    if result.low == result.high == 1.0:
        return EQUAL
    return MET if result.ratio <= limit and (result.high or 2.0) < 1 else MISSED


def is_full(row: Row) -> bool:
    return bool(row["method"] == "full")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the picture shows.

    Attributes
    ----------
    lines : dict of str to list of (float, float)
        Bytes and mean KL of each method's points.
    cells : tuple of str
        Of which it is the mean.
    prompts : str
        How many of each.
    """

    lines: dict[str, list[tuple[float, float]]]
    cells: tuple[str, ...]
    prompts: str


def shown_in(rows: Sequence[Row]) -> Shown:
    """Draw the cells that the largest number of methods have.

    KL is over the tokens that all methods predicted after their eviction.
    """
    prompts: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if line_of(row["method"]) in STYLES:
            prompts[row["cell"], row["digest"]].append(row)
    points: dict[Any, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for (cell, _), item in prompts.items():
        for row, kl in zip(item, shared_kl(item), strict=True):
            if kl is not None:
                points[row["method"], row["share"]][cell].append((row["bytes"], kl))

    def complete(cells: tuple[str, ...]) -> dict[Any, dict[str, list[tuple[float, float]]]]:
        return {key: item for key, item in points.items() if all(item[cell] for cell in cells)}

    sets = [subset for count in range(len(CELLS), 0, -1) for subset in combinations(CELLS, count)]
    cells = max(sets, key=lambda subset: len(complete(subset)) * len(subset))
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    counts = []
    for (method, _), item in complete(cells).items():
        means = np.mean([np.mean(item[cell], axis=0) for cell in cells], axis=0)
        lines[line_of(method)].append((float(means[0]), float(means[1])))
        counts += [len(item[cell]) for cell in cells]
    few, n_items = min(counts, default=0), max(counts, default=0)
    phrase = f"{few}" if few == n_items else f"{few} to {n_items}"
    return Shown(lines=dict(lines), cells=cells, prompts=phrase)


def line_of(method: str) -> str:
    """Return the line of the picture that has a method's point."""
    if method == DEFAULT:
        return "kvalloc, default"
    if method in ("8 bits", "4 bits"):
        return "plain 8 and 4 bits"
    return method


if __name__ == "__main__":
    sys.exit(main())
