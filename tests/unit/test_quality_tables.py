"""The tables of the quality benchmark, on cells made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from quality.tables import (
    against_best,
    current,
    grid_of,
    of_seed,
    read_rows,
    share_table,
    task_table,
    without,
)


def cell(task, digest, method, kl, **other):
    row = {"task": task, "after": False, "context": 1000, "digest": digest, "method": method}
    return {**row, "share": 0.2, "kl": kl, "agree": 1.0, "score": None, **other}


def cells():
    """Two tasks of two prompts; A is the best peer of one, B of the other."""
    losses = {
        "needle": {"A": (0.4, 0.8), "B": (1.0, 1.0), "p#1": (0.1, 0.2)},
        "prose": {"A": (0.9, 0.7), "B": (0.2, 0.4), "p#1": (0.2, 0.1)},
    }
    return [
        cell(task, f"{task}{number}", method, value)
        for task, methods in losses.items()
        for method, values in methods.items()
        for number, value in enumerate(values)
    ]


def test_the_ratio_is_to_the_best_peer_of_each_task():
    grid = grid_of(cells(), 0.2, after=False, context=1000)
    assert grid.methods == ("A", "B", "kvalloc")
    whole, tasks = against_best(grid)
    # needle 0.15 of 0.6, prose 0.15 of 0.3
    assert tasks["needle"].ratio == pytest.approx(0.25)
    assert tasks["prose"].ratio == pytest.approx(0.5)
    assert whole.ratio == pytest.approx(0.30 / 0.90)
    assert whole.low <= whole.ratio <= whole.high
    assert whole.reaches(0.34) is (whole.high < 1)
    assert whole.reaches(0.3) is False


def test_a_method_can_be_left_out():
    grid = without(grid_of(cells(), 0.2, after=False, context=1000), "B")
    assert grid.methods == ("A", "kvalloc")
    assert against_best(grid)[0].ratio == pytest.approx(0.30 / 1.40)


def test_prompts_of_a_seed_are_judged_alone():
    rows = [{**row, "seed": 8} if row["digest"].endswith("1") else row for row in cells()]
    fresh, first = (grid_of(of_seed(rows, seed), 0.2, after=False, context=1000) for seed in (8, 7))
    assert fresh.values["needle"].tolist() == [[0.8], [1.0], [0.2]]
    assert first.values["prose"].tolist() == [[0.9], [0.2], [0.2]]


def test_one_prompt_gives_no_interval():
    rows = [row for row in cells() if row["digest"].endswith("0")]
    whole, _ = against_best(grid_of(rows, 0.2, after=False, context=1000))
    assert whole.ratio == pytest.approx(0.3 / 0.6)
    assert whole.high is None
    assert whole.reaches(0.6) is None
    assert "no interval" in str(whole)


def test_only_prompts_that_every_method_has_seen_count():
    rows = [row for row in cells() if (row["method"], row["digest"]) != ("B", "needle1")]
    grid = grid_of(rows, 0.2, after=False, context=1000)
    assert {task: values.shape[1] for task, values in grid.values.items()} == {
        "needle": 1,
        "prose": 2,
    }
    assert grid.n_prompts == 3


def test_other_shares_modes_and_lengths_are_other_tables():
    others = [cell("needle", "x", "A", 9.0, share=0.5), cell("needle", "x", "A", 9.0, after=True)]
    others.append(cell("needle", "x", "A", 9.0, context=2048))
    grid = grid_of([*cells(), *others], 0.2, after=False, context=1000)
    assert grid.means().max() == 1.0
    assert grid_of(cells(), 0.1, after=False, context=1000) is None


def test_the_tables_mark_the_least():
    grid = grid_of(cells(), 0.2, after=False, context=1000)
    lines = task_table(grid)
    assert lines[0].split() == ["needle", "prose", "mean"]
    assert lines[3].split() == ["kvalloc", "0.1500*", "0.1500*", "0.1500*"]
    assert "*" not in lines[1]
    assert share_table([grid], form=".2f")[-1].split() == ["kvalloc", "0.15"]


def test_cells_of_a_profile_that_changed_are_left_out(tmp_path):
    file = tmp_path / "cells.jsonl"
    rows = [*cells(), cell("needle", "needle0", "p#2", 0.7)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + '\n{"task": "nee')
    found = current(read_rows(file))
    assert {row["method"] for row in found} == {"A", "B", "p#2"}
