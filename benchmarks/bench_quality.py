"""Quality on held-out prompts: kvalloc's shipped profiles against eleven presses of kvpress.

    python benchmarks/bench_quality.py [--prompts 6] [--seconds 1200] [--fresh]

Measures in the environment that ``make peers`` makes, all methods in one process with the same
versions. Measured cells stay in benchmarks/quality/cells.jsonl, each with its prompt's digest;
only what is missing is measured, unless ``--fresh``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quality.picture import draw_shares, draw_tasks
from quality.tables import (
    CELLS_FILE,
    HELD_OUT,
    OURS,
    SEED,
    Grid,
    Ratio,
    against_best,
    current,
    grid_of,
    method_of,
    of_seed,
    read_rows,
    share_table,
    split_loss,
    task_table,
    without,
)

import kvalloc

FOLDER = Path(__file__).resolve().parent
PYTHON = FOLDER.parent / ".venv-kvpress" / "bin" / "python"
MODEL = "smollm2-135m-instruct"
PROFILES = tuple(f"{MODEL}-loss-{share}" for share in (50, 20, 10))
FIXED = tuple(f"{MODEL}-fixed-{share}" for share in (50, 20, 10))
AFTER_PROFILES = tuple(f"{MODEL}-context-{share}" for share in (40, 20))
SHARES, AFTER_SHARES = (0.5, 0.2, 0.1), (0.4, 0.2)
LIMITS = {0.5: 1 / 4, 0.2: 1 / 3, 0.1: 1 / 2}
CONTEXT, LONG_CONTEXT = 1000, 2048
BIAS_BYTES = 4
BY_POINTS, PREDICTED_WITHIN = 0.02, 0.25
TWICE = "KVzip"
LEAST_PROMPTS = 6
"""Of which the full cache gets some right, before retrieval or context only counts as met."""


def main() -> int:
    asked = parse_arguments()
    if not PYTHON.exists():
        print(f"there is no {PYTHON}: 'make peers' makes it", file=sys.stderr)
        return 2
    if asked.fresh:
        CELLS_FILE.unlink(missing_ok=True)
    if not asked.tables_only:
        measure(asked)
    rows = current(read_rows())
    print(f"cells measured with {versions()}")
    targets = [*inside(rows), *after(rows), *long_prompts(rows), *predicted(rows)]
    print("\ntargets")
    for said, met in targets:
        print(f"  {'met      ' if met else 'MISSED   ' if met is False else 'undecided'}  {said}")
    return 0 if all(met for _, met in targets) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="quality on held-out prompts")
    parser.add_argument("--prompts", type=int, default=2, help="of each task")
    parser.add_argument("--seconds", type=float, default=1200, help="begin no prompt after these")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--tables-only", action="store_true", help="measure nothing")
    return parser.parse_args()


def versions() -> str:
    """What is installed where the cells are measured."""
    names = ("kvpress", "transformers", "torch")
    code = (
        "import json\nfrom importlib.metadata import version\n"
        f"print(json.dumps([(n, version(n)) for n in {names!r}]))"
    )
    ran = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(f"{name} {version}" for name, version in json.loads(ran.stdout))


def measure(asked: argparse.Namespace) -> None:
    """Fill in the missing cells; what does not get done in time is missing in the tables."""
    command = [str(PYTHON), str(FOLDER / "quality" / "cells.py"), "-o", str(CELLS_FILE)]
    command += ["--prompts", str(asked.prompts), "--seconds", str(asked.seconds)]
    usual = ["--profiles", *PROFILES, *FIXED, "--after-profiles", *AFTER_PROFILES]
    long = ["--tasks", "needle", "pairs", "--context", str(LONG_CONTEXT), "--peers", "--after"]
    before = ["--profiles", *PROFILES, "--peers", "--after", "--split", "development"]
    for more in (usual, ["--profiles", PROFILES[1], *long], before):
        subprocess.run([*command, *more], check=False, stdout=sys.stderr)


def inside(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bool | None]]:
    """The question inside the compressed prompt."""
    grids = [found for share in SHARES if (found := grid(rows, share, after=False))]
    for one in grids:
        print(f"\nKL to the full cache at {one.share:.0%} kept, {one.n_prompts} prompts (* least)")
        print("\n".join(task_table(one)))
        print(f"kept entries: {kept_range(rows, one.share)}{bias_bytes()}")
        whole, cells = against_best(one)
        print(f"kvalloc over the best peer of each task: {whole}")
        print("  " + ", ".join(f"{task} {ratio}" for task, ratio in cells.items()))
        fresh = grid(of_seed(rows, SEED), one.share, after=False)
        if fresh is not None and fresh.n_prompts < one.n_prompts:
            print(f"  the {fresh.n_prompts} prompts drawn last alone: {against_best(fresh)[0]}")
        one_pass, cells_then = against_best(without(one, TWICE))
        print(f"without {TWICE}, which reads the prompt again and frees nothing: {one_pass}")
        print("  " + ", ".join(f"{task} {ratio}" for task, ratio in cells_then.items()))
        yield from loss_targets(one, whole, cells)
    if len(grids) == len(SHARES):
        agreement(rows)
        title = f"Held-out prompts of {CONTEXT:,} tokens, mean of {len(grids[0].values)} tasks"
        draw_shares(grids, FOLDER / "quality" / "shares.png", title=title)
        draw_tasks(grids[1], FOLDER / "quality" / "tasks.png", title="20% kept")


def grid(rows: Sequence[dict[str, Any]], share: float, *, after: bool) -> Grid | None:
    found = grid_of(rows, share, after=after, context=CONTEXT)
    return found if found is not None and OURS in found.methods else None


def loss_targets(
    one: Grid, whole: Ratio, cells: dict[str, Ratio]
) -> Iterator[tuple[str, bool | None]]:
    limit = LIMITS[one.share]
    said = f"{one.share:.0%} kept: KL {whole} of the best peer's, target {limit:.2f}, below 1"
    yield said, whole.reaches(limit)
    if one.share >= 0.2:
        worse = {task: ratio for task, ratio in cells.items() if ratio.ratio > 1}
        names = ", ".join(f"{task} {ratio}" for task, ratio in worse.items()) or "none"
        yield f"{one.share:.0%} kept: tasks where a peer is better: {names}", not worse


def agreement(rows: Sequence[dict[str, Any]]) -> None:
    """Kept share x method in right answers and in agreement, as XKV's Figure 12 has it."""
    shown = {
        "score": "right answers of the tasks that ask",
        "agree": "tokens whose first choice is the full cache's",
    }
    for field, what in shown.items():
        found = [
            one
            for share in SHARES
            if (one := grid_of(rows, share, after=False, context=CONTEXT, field=field))
        ]
        print(f"\nkept share x method: {what}")
        print("\n".join(share_table(found)))
    full = [row["score"] for row in rows if row["method"] == "full" and not row["after"]
            and row["context"] == CONTEXT and row["score"] is not None]  # fmt: skip
    print(f"full cache: {sum(full) / len(full):.1%} right of {len(full)}")


def kept_range(rows: Sequence[dict[str, Any]], share: float) -> str:
    kept: dict[str, list[float]] = {}
    for row in rows:
        if abs(row["share"] - share) < 0.006 and row["context"] == CONTEXT:
            kept.setdefault(method_of(row), []).append(row["kept"])
    lowest = min(kept, key=lambda name: min(kept[name]))
    highest = max(kept, key=lambda name: max(kept[name]))
    low, high = min(kept[lowest]), max(kept[highest])
    ours = kept[OURS]
    return (
        f"{low:.2%} ({lowest}) to {high:.2%} ({highest}), kvalloc {min(ours):.2%}..{max(ours):.2%}"
    )


def bias_bytes() -> str:
    """What kvalloc's entries carry beside keys and values, where its profiles have biases."""
    profile = kvalloc.load_profile(PROFILES[0])
    if not profile.policy.parameters.get("biases"):
        return ""
    share = BIAS_BYTES / profile.shape.bytes_per_entry
    return f"; with a logit bias of {BIAS_BYTES} bytes an entry, {share:.1%} more, not counted"


def after(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bool | None]]:
    """Context only: the question comes after the compression."""
    for share in AFTER_SHARES:
        one = grid(rows, share, after=True)
        said = f"context only, {share:.0%} kept: ahead of CriticalAdaKV(SnapKV)"
        if one is None:
            yield f"{said}: not measured", None
            continue
        print(f"\ncontext only: KL at {share:.0%} kept, {one.n_prompts} prompts (* least)")
        print("\n".join(task_table(one)))
        means = dict(zip(one.methods, one.means().mean(axis=1), strict=True))
        ahead = bool(means[OURS] < means["CriticalAdaKV(SnapKV)"])
        yield f"{said}: {one.n_prompts} prompts", surely(ahead, one.n_prompts)


def long_prompts(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bool | None]]:
    """Needle and key-value retrieval at 20% of 2,048 tokens."""
    for task in ("needle", "pairs"):
        wanted = [row for row in rows if row["context"] == LONG_CONTEXT and row["task"] == task
                  and not row["after"]]  # fmt: skip
        right_of = {row["digest"]: row["score"] for row in wanted if method_of(row) == OURS}
        ours = list(right_of.values())
        full = [row["score"] for row in wanted
                if row["method"] == "full" and row["digest"] in right_of]  # fmt: skip
        said = f"{task} at 20% of {LONG_CONTEXT:,} tokens within 2 points of the full cache"
        if not ours:
            yield f"{said}: not measured", None
            continue
        right, whole = sum(ours) / len(ours), sum(full) / len(full)
        said += f": {right:.0%} right of {len(ours)}, full cache {whole:.0%}"
        yield said, surely(right >= whole - BY_POINTS, sum(score > 0 for score in full))


def predicted(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bool | None]]:
    """What was to be expected from prompts of the development split, and what came."""
    every = read_rows()
    for share in (0.5, 0.2):
        names = {row["method"] for row in rows if method_of(row) == OURS
                 and not row["after"] and abs(row["share"] - share) < 0.006}  # fmt: skip
        if len(names) != 1:
            continue
        digest = names.pop().split("#")[1]
        foretold = split_loss(every, digest, split="development", context=CONTEXT)
        came = split_loss(every, digest, split=HELD_OUT, context=CONTEXT)
        if foretold is None or came is None:
            yield f"{share:.0%} kept: predicted loss: not measured", None
            continue
        off = abs(foretold[0] - came[0]) / came[0]
        said = f"{share:.0%} kept: predicted {foretold[0]:.5f} ({foretold[1]} prompts)"
        said += f", measured {came[0]:.5f} nats ({came[1]} prompts)"
        yield f"{said}, {off:.0%} off, target {PREDICTED_WITHIN:.0%}", off <= PREDICTED_WITHIN


def surely(met: bool, n_prompts: int) -> bool | None:
    """A miss is a miss; that a target is met cannot be said of a few prompts."""
    return met if n_prompts >= LEAST_PROMPTS or not met else None


if __name__ == "__main__":
    sys.exit(main())
