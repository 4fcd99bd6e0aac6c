"""Tables of quality cells: kept share x method, and what of the best peer's loss is left."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.prompts.intervals import resampled_means

Row = Mapping[str, Any]

CELLS_FILE = Path(__file__).resolve().parent / "cells.jsonl"
HELD_OUT = "held-out"
SEED, FIRST_SEED = 8, 7
"""Of the held-out prompts: now, and of cells that do not say. A fresh one whenever a method was
changed after cells had been seen."""
OURS = "kvalloc"
OURS_FIXED = "kvalloc, fixed budgets"
FIXED = "-fixed-"
"""In the name of a profile whose budgets do not follow the prompt; it competes with nobody."""
LEAST_KL = 1e-6
"""Below it a loss is nought: a ratio of two of them says nothing."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Cells of one share and mode, all methods on the same prompts.

    Attributes
    ----------
    share : float
    methods : tuple of str
        Peers, then ``kvalloc``.
    values : dict of str to ndarray of float64, (n_methods, n_prompts)
        By task.
    """

    share: float
    methods: tuple[str, ...]
    values: dict[str, FloatArray]

    @property
    def n_prompts(self) -> int:
        return sum(values.shape[1] for values in self.values.values())

    def means(self) -> FloatArray:
        """Mean over the prompts, ``(n_methods, n_tasks)``."""
        return np.stack([values.mean(axis=1) for values in self.values.values()], axis=1)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """kvalloc's loss over that of the best peer in each cell, and its 95% interval."""

    ratio: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.ratio:.2f} [no interval from one prompt]"
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def reaches(self, limit: float) -> bool | None:
        """Whether it is at most the limit and surely below 1; None where that cannot be said."""
        if self.ratio > limit:
            return False
        return None if self.high is None else self.high < 1


def grid_of(
    rows: Sequence[Row], share: float, *, after: bool, context: int, field: str = "kl"
) -> Grid | None:
    """Cells of a share, of the prompts that every method has been put to; None without any."""
    wanted = [
        row
        for row in rows
        if row["after"] == after
        and row["context"] == context
        and row["method"] != "full"
        and abs(row["share"] - share) < 0.006
        and row[field] is not None
    ]
    methods = ordered({method_of(row) for row in wanted})
    by_prompt: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in wanted:
        by_prompt[row["task"], row["digest"]][method_of(row)] = float(row[field])
    values: dict[str, list[list[float]]] = defaultdict(list)
    for (task, _), found in by_prompt.items():
        if len(found) == len(methods):
            values[task].append([found[method] for method in methods])
    if not values:
        return None
    return Grid(
        share=share,
        methods=methods,
        values={task: np.array(cells).T for task, cells in values.items()},
    )


def method_of(row: Row) -> str:
    """kvalloc's profiles are one method, but for those of fixed budgets."""
    if "#" not in row["method"]:
        return str(row["method"])
    return OURS_FIXED if FIXED in row["method"] else OURS


def ordered(methods: set[str]) -> tuple[str, ...]:
    own = (OURS_FIXED, OURS)
    return (*sorted(methods - {*own}), *(name for name in own if name in methods))


def of_seed(rows: Sequence[Row], seed: int) -> list[Row]:
    """Cells of the prompts that were drawn with a seed."""
    return [row for row in rows if row.get("seed", FIRST_SEED) == seed]


def without(grid: Grid, method: str) -> Grid:
    """The same without one method."""
    kept = [place for place, name in enumerate(grid.methods) if name != method]
    return Grid(
        share=grid.share,
        methods=tuple(grid.methods[place] for place in kept),
        values={task: values[kept] for task, values in grid.values.items()},
    )


def against_best(grid: Grid, *, seed: int = 0) -> tuple[Ratio, dict[str, Ratio]]:
    """The ratio over the mean of the tasks, and in each task.

    In every resample the best peer of each task is chosen anew, which favours the peers.
    """
    own = np.array([method == OURS for method in grid.methods])
    peers = ~own & np.array([method != OURS_FIXED for method in grid.methods])
    ours: dict[str, FloatArray] = {}
    best: dict[str, FloatArray] = {}
    drawn = resampled_means([values.T for values in grid.values.values()], seed=seed)
    for (task, values), resamples in zip(grid.values.items(), drawn, strict=True):
        means = np.concatenate([values.mean(axis=1)[None], resamples]).T
        ours[task] = np.maximum(means[own][0], LEAST_KL)
        best[task] = np.maximum(means[peers].min(axis=0), LEAST_KL)
    tasks = list(grid.values)
    whole = sum(ours[task] for task in tasks) / sum(best[task] for task in tasks)
    counts = {task: values.shape[1] for task, values in grid.values.items()}
    return ratio_of(np.asarray(whole), min(counts.values())), {
        task: ratio_of(ours[task] / best[task], counts[task]) for task in tasks
    }


def ratio_of(values: FloatArray, n_prompts: int) -> Ratio:
    """The first is the estimate, the others its resamples; one prompt gives no interval."""
    if n_prompts < 2:
        return Ratio(ratio=float(values[0]), low=None, high=None)
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return Ratio(ratio=float(values[0]), low=float(low), high=float(high))


def task_table(grid: Grid, *, form: str = ".4f") -> list[str]:
    """Methods x tasks at one share, the best of each column marked."""
    means = grid.means()
    columns = [*grid.values, "mean"]
    table = np.column_stack([means, means.mean(axis=1)])
    lines = [f"{'':26s}" + "".join(f"{name:>10s}" for name in columns)]
    best = table.min(axis=0)
    for method, numbers in zip(grid.methods, table, strict=True):
        cells = "".join(
            f"{format(number, form) + ('*' if number == least else ' '):>10s}"
            for number, least in zip(numbers, best, strict=True)
        )
        lines.append(f"{method:26s}{cells}")
    return lines


def share_table(grids: Sequence[Grid], *, form: str = ".1%") -> list[str]:
    """Kept share x method, the mean over the tasks: the shape of XKV's Figure 12."""
    methods = ordered({method for grid in grids for method in grid.methods})
    lines = [f"{'':26s}" + "".join(f"{grid.share:>10.0%}" for grid in grids)]
    for method in methods:
        cells = ""
        for grid in grids:
            if method in grid.methods:
                mean = grid.means().mean(axis=1)[grid.methods.index(method)]
                cells += f"{format(mean, form):>10s}"
            else:
                cells += f"{'-':>10s}"
        lines.append(f"{method:26s}{cells}")
    return lines


def read_rows(path: Path = CELLS_FILE) -> list[dict[str, Any]]:
    """Rows of a file of cells; a line that a kill left half-written is passed over."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def current(rows: Sequence[Row], *, split: str = HELD_OUT) -> list[dict[str, Any]]:
    """Those of a split, without the cells of profiles that have changed since."""
    rows = [row for row in rows if row.get("split", HELD_OUT) == split]
    newest = {row["method"].split("#")[0]: row["method"] for row in rows if "#" in row["method"]}
    return [
        dict(row) for row in rows if row["method"] in newest.values() or "#" not in row["method"]
    ]


def split_loss(
    rows: Sequence[Row], digest: str, *, split: str, context: int
) -> tuple[float, int] | None:
    """Mean over the tasks of what a profile lost on all prompts of a split, and of how many."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for row in current(rows, split=split):
        own = row["method"].endswith(f"#{digest}")
        if own and not row["after"] and row["context"] == context:
            by_task[row["task"]].append(row["kl"])
    means = [sum(losses) / len(losses) for losses in by_task.values()]
    count = sum(len(losses) for losses in by_task.values())
    return (sum(means) / len(means), count) if means else None
